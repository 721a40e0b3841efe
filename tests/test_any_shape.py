"""A run goes on in any shape: on other ranks and nodes, with more epochs; and one that has ended says so."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from laws import Case, Weights, configuration, deviation, final_weights, reference, write_replay
from ranks import RankPool
from test_resume import _Stop, interrupted_run

from pipetransformer.process.world import World
from pipetransformer.run.checksums import digests_of, write_digests
from pipetransformer.trainer import Trainer

FROZEN = ((0, 0), (5, 2), (9, 4), (15, 2))  # (step, frozen blocks)
LENGTHS = {4: (4, 2, 1, 2), 3: (3, 3, 1, 3), 2: (2, 2, 1, 2), 1: (1, 1, 1, 1)}  # pp of these plans, by ranks
EVERY = "checkpoint.every=2 steps"


def case_on(num_ranks: int, **settings: object) -> Case:
    moves = tuple((step, frozen, pp) for (step, frozen), pp in zip(FROZEN, LENGTHS[num_ranks]))
    return Case("vit", num_ranks, moves, 4, cached=True, **settings)  # type: ignore[arg-type]


SHARED = pytest.param({"shard": "full"}, marks=pytest.mark.full, id="all shared out")


@pytest.mark.parametrize("settings", [pytest.param({}, id="all have all"), SHARED])
def test_ranks_come_and_go(settings: dict[str, object], ranks: RankPool, tmp_path: Path) -> None:
    """4, 2, 1, 3 and 4 ranks, with freezing, thawing and a cache, mid-epoch each time."""
    weights, _ = reference(case_on(4, **settings), "")
    stages = ((4, 3, None), (2, 7, "2"), (1, 11, "6"), (3, 17, "10"), (4, None, "16"))
    for num_ranks, stop_after, resumed_from in stages:
        case = case_on(num_ranks, **settings)
        resumes = resumed_from is not None
        sharing = [EVERY, f"dp.shard={case.shard}"]
        answers = ranks.run(num_ranks, interrupted_run, case, str(tmp_path), sharing, stop_after, resumes)
    assert answers[0][1] == "step-00000016"
    assert deviation(answers[0][0], weights) < 1e-10


def live_run(
    world: World, folder: str, extra: list[str], stop_after: int | None, nodes: int = 1
) -> tuple[Weights | None, list[dict[str, object]]]:
    """A run that decides itself, as many nodes as it is told: (weights, plans that were entered)."""
    each = world.size // nodes
    world = replace(world, local_size=each, local_rank=world.rank % each)
    settings = [*Case("vit", 1, ()).overrides(""), "pipe.measure=false", EVERY, f"run.dir={folder}", "run.id=x", *extra]

    def probe(step: int, gradients: object) -> None:
        if step == stop_after:
            raise _Stop

    try:
        trainer = Trainer(configuration("vit", settings), world, probe=probe)
        trainer.run()
    except _Stop:
        return None, []
    events = Path(folder, "x", "events.jsonl").read_text().splitlines()
    return final_weights(trainer), [json.loads(line) for line in events]


STATIC = ["freeze.policy=static", "freeze.max_frozen=3", "freeze.guard=false", "freeze.warmup=1 epoch"]


@pytest.mark.parametrize(("nodes", "then"), [(1, 1), (2, 1), (1, 2)])
def test_a_live_run_finds_a_plan_for_other_ranks_and_nodes(
    nodes: int, then: int, ranks: RankPool, tmp_path: Path
) -> None:
    weights, _ = reference(Case("vit", 4, ((0, 0, 1), (5, 3, 1))), "", num_nodes=nodes)
    ranks.run(4, live_run, str(tmp_path), STATIC, 12, nodes)
    ours, events = ranks.run(2, live_run, str(tmp_path), [*STATIC, "run.resume=true"], None, then)[0]
    assert deviation(ours, weights) < 1e-10
    told = [event["plan"] for event in events if event["event"] == "plan"]
    assert {plan["frozen"] for plan in told[-2:]} == {3}
    assert [plan["pp"] * plan["dp"] for plan in (told[0], told[-1])] == [4, 2]
    if nodes == 2:
        with pytest.raises(AssertionError):
            assert deviation(ours, reference(Case("vit", 4, ((0, 0, 1), (5, 3, 1))), "")[0]) < 1e-10


def test_a_run_may_be_given_more_epochs(ranks: RankPool, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """With a schedule that does not depend on their number, as if it had been planned so; under the guard, too."""
    steady = ["train.lr_schedule=constant", "train.warmup_ratio=0", *STATIC[:2], STATIC[3], "train.batch_size=16"]
    for name in ("whole", "grown"):
        (tmp_path / name).mkdir()
    whole, _ = ranks.run(2, live_run, str(tmp_path / "whole"), steady, None)[0]
    grown = str(tmp_path / "grown")
    ranks.run(2, live_run, grown, [*steady, "train.epochs=2"], None)
    ours, events = ranks.run(2, live_run, grown, [*steady, "run.resume=true"], None)[0]
    (resumed,) = [event for event in events if event["event"] == "resume"]
    assert any(change.startswith("train.epochs was 2 and is 4 now: the learning") for change in resumed["changes"])
    assert deviation(ours, whole) == 0
    with pytest.raises(AssertionError, match=r"train.epochs: .* has \d+ steps behind it; give at least 4"):
        ranks.run(2, live_run, grown, [*steady, "run.resume=true", "train.epochs=1"], None)


def ended_run(world: World, folder: str, epochs: int) -> list[str]:
    """Resumes a run that has ended; the names of the events that it tells."""
    told: list[str] = []
    settings = [*Case("vit", 1, ()).overrides(""), f"run.dir={folder}", "run.id=x", "run.resume=true"]
    config = configuration("vit", [*settings, f"train.epochs={epochs}", "pipe.measure=false", EVERY])
    Trainer(config, world, listeners=[lambda event: told.append(type(event).__name__)]).run()
    return told


def test_a_run_that_has_ended_says_so_and_does_nothing(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, live_run, str(tmp_path), [], None)
    before = {path: path.read_bytes() for path in (tmp_path / "x").rglob("*") if path.is_file()}
    assert ranks.run(2, ended_run, str(tmp_path), 4) == [["Announced", "Closed"]] * 2
    assert before == {path: path.read_bytes() for path in (tmp_path / "x").rglob("*") if path.is_file()}
    assert "Finished" in ranks.run(2, ended_run, str(tmp_path), 5)[0], "more epochs are something to do"


def test_a_checkpoint_of_another_version_is_refused_in_a_line(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(1, live_run, str(tmp_path), ["checkpoint.every=1 epoch"], 12)
    (state,) = (tmp_path / "x" / "checkpoints").glob("step-*/state.json")
    saved = json.loads(state.read_text())
    del saved["version"]
    state.write_text(json.dumps(saved))
    write_digests(state.parent, digests_of(path for path in state.parent.iterdir() if path.name != "sha256.json"))
    with pytest.raises(AssertionError, match="is a checkpoint of version 1 and this one reads 2; finish the run with"):
        ranks.run(1, live_run, str(tmp_path), ["run.resume=true"], None)


def test_a_replay_has_the_plans_of_its_own_ranks(ranks: RankPool, tmp_path: Path) -> None:
    write_replay(tmp_path / "of_four", case_on(4).plans())
    with pytest.raises(AssertionError, match="was recorded with 4 ranks and this job has 2"):
        ranks.run(2, live_run, str(tmp_path), [f"run.replay={tmp_path / 'of_four'}"], None)
