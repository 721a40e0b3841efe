"""Which plans of an event log a replay takes, and which logs it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from pipetransformer.errors import UserError
from pipetransformer.plan import ParallelPlan
from pipetransformer.plan.units import Numbering
from pipetransformer.process.world import World
from pipetransformer.run.replay import read_plans

WORLD, BLOCKS = World(0, 2, 0, 2, torch.device("cpu")), Numbering(6, 1)


def plan(frozen: int, pp: int = 1) -> ParallelPlan:
    cuts = (4 + frozen // 2,) if pp == 2 else ()
    return ParallelPlan(frozen, pp, 2 // pp, cuts, 2, "1f1b", None, 6)


def adopted(step: int, frozen: int, pp: int = 1) -> dict[str, object]:
    return {"event": "plan", "step": step, "plan": plan(frozen, pp).as_dict()}


def read(
    folder: Path, *events: dict[str, object], numbering: Numbering = BLOCKS, world: World = WORLD
) -> dict[int, ParallelPlan]:
    path = folder / "events.jsonl"
    path.write_text("".join(f"{json.dumps(event)}\n" for event in events))
    return read_plans(str(path), world=world, numbering=numbering, total_steps=20)


def test_plans_that_a_resumption_undid_are_left_out(tmp_path: Path) -> None:
    """The first launch froze at steps 5, 10 and 15 and died; the second went on from step 10 and froze less."""
    first = (adopted(0, 0, 2), adopted(5, 1), adopted(10, 2), adopted(15, 5))
    second = ({"event": "resume", "step": 10}, adopted(10, 2, 2), adopted(18, 3))
    found = read(tmp_path, {"event": "run", "total_steps": 20}, *first, *second)
    assert found == {0: plan(0, 2), 5: plan(1), 10: plan(2, 2), 18: plan(3)}


def test_plans_are_told_in_the_units_of_the_job(tmp_path: Path) -> None:
    found = read(tmp_path, adopted(0, 0, 2), numbering=Numbering(6, 2))
    assert found[0].units_per_block == 2 and found[0].boundaries == (7,), "unit 4 is block 3, whose first half is 7"


@pytest.mark.parametrize(
    ("events", "numbering", "world", "line"),
    [
        ([adopted(5, 1)], BLOCKS, WORLD, "holds no plan for step 0; give the events.jsonl of a whole run"),
        ([{"event": "run", "total_steps": 21}], BLOCKS, WORLD, "recorded with 21 steps and this job has 20"),
        ([adopted(0, 0)], Numbering(5, 1), WORLD, "recorded with 6 blocks and this model has 5"),
        ([adopted(0, 0)], BLOCKS, World(0, 3, 0, 3, torch.device("cpu")), "with 2 ranks and this job has 3"),
        ([adopted(0, 0, 2)], BLOCKS, World(0, 2, 0, 1, torch.device("cpu")), "a pipeline of 2 ranks, and a node"),
        ([{"event": "plan", "step": 0, "plan": {}}], BLOCKS, WORLD, "a plan that cannot be read"),
    ],
)
def test_a_log_of_another_job_is_refused(
    events: list[dict[str, object]], numbering: Numbering, world: World, line: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=f"^run.replay: .*{line}"):
        read(tmp_path, *events, numbering=numbering, world=world)
