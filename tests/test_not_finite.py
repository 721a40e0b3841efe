"""An update that is not finite is skipped on all ranks, where the configuration says so: nothing changes by it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from laws import Case, Weights, configuration, final_weights, write_replay
from ranks import RankPool

from pipetransformer.engine import Objective, are_finite
from pipetransformer.process.world import World
from pipetransformer.trainer import Trainer

PLANS = {
    "replicas": Case("vit", 2, ((0, 0, 1),), 1),
    "a pipeline": Case("vit", 2, ((0, 0, 2),), 2),
    "all shared out": Case("vit", 2, ((0, 0, 1),), 1, shard="full"),
    "in the first step of a plan": Case("vit", 2, ((0, 0, 2), (5, 3, 1))),
}


def run(
    world: World, case: Case, folder: str, bad: tuple[int, ...], what: str = "gradient"
) -> tuple[list[Weights], Weights | None, list[int]]:
    """A run with gradients, or a loss, of rank 1 that are not numbers in the steps ``bad``: (this rank's weights after
    each step, all final weights, the steps that were skipped)."""
    replay, seen = Path(folder) / f"replay_{world.rank}.jsonl", list[Weights]()
    write_replay(replay, case.plans())
    settings = [*case.overrides(""), f"run.replay={replay}", f"run.dir={folder}", "run.id=x", "train.not_finite=skip"]

    def probe(step: int, gradients: Mapping[str, torch.Tensor]) -> None:
        held = trainer.engine.layout.updated
        seen.append({name: parameter.detach().numpy().copy() for name, parameter in held.items()})
        if step in bad and world.rank == 1 and what == "gradient":
            next(reversed(gradients.values())).fill_(float("nan"))

    def spoilt(self: Objective, *arguments: torch.Tensor) -> torch.Tensor:
        loss = usual(self, *arguments)
        return loss * float("nan") if self._step in bad and world.rank == 1 and what == "loss" else loss

    usual = Objective._cross_entropy
    with mock.patch.object(Objective, "_cross_entropy", spoilt):
        trainer = Trainer(configuration("vit", settings), world, probe=probe, timed=False)
        trainer.run()
    told = [json.loads(line) for line in (Path(folder) / "x" / "events.jsonl").read_text().splitlines()]
    assert all(np.isfinite(float(event["loss"])) for event in told if event["event"] == "steps")
    return seen, final_weights(trainer), [event["step"] for event in told if event["event"] == "skipped"]


@pytest.mark.parametrize("name", PLANS)
def test_a_bad_step_changes_nothing(name: str, ranks: RankPool, tmp_path: Path) -> None:
    for rank, (seen, weights, skipped) in enumerate(ranks.run(2, run, PLANS[name], str(tmp_path), (5, 6))):
        assert skipped == [6, 7]
        for earlier, later, is_same in ((5, 6, True), (6, 7, True), (7, 8, False)):
            common = seen[earlier].keys() & seen[later].keys()
            same = [np.array_equal(seen[earlier][key], seen[later][key]) for key in common]
            assert all(same) == is_same, (rank, earlier)
        if weights is not None:
            assert all(np.isfinite(value).all() for value in weights.values())


def test_a_bad_loss_leaves_no_figure(ranks: RankPool, tmp_path: Path) -> None:
    answers = ranks.run(2, run, PLANS["replicas"], str(tmp_path), (5, 6), "loss")
    assert [skipped for *_, skipped in answers] == [[6, 7]] * 2


def test_too_many_in_a_row_stop_the_job(ranks: RankPool, tmp_path: Path) -> None:
    case = PLANS["replicas"]
    with pytest.raises(AssertionError, match="step 19, rank 0: 20 updates in a row were not finite; there is no check"):
        ranks.run(2, run, case, str(tmp_path), tuple(range(20)))


@pytest.mark.parametrize(
    ("numbers", "finite"),
    [
        ([], True),
        ([[1.0, -2.0], [0.0]], True),
        ([[1.0], [2.0, float("nan")]], False),
        ([[float("inf"), float("-inf")], [1.0]], False),
        ([[3e38, 3e38], [1.0]], True),  # their sum is too large, they are not
    ],
)
def test_all_numbers_are_looked_at(numbers: list[list[float]], finite: bool) -> None:
    assert are_finite([torch.tensor(each, dtype=torch.float32) for each in numbers]) is finite
