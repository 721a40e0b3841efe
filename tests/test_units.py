"""Cut in halves, what counts in blocks still counts in blocks, and no balance is worse."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random
from unittest import mock

import numpy as np
import pytest
from laws import (
    NUM_BLOCKS,
    STATIC,
    TWO_RANKS,
    Case,
    configuration,
    configuration_file,
    deviation,
    reference,
    reference_norms,
    write_replay,
)
from ranks import RankPool
from test_planner import random_job
from test_resume import interrupted_run

from pipetransformer.config import load_config
from pipetransformer.engine import step
from pipetransformer.errors import UserError
from pipetransformer.pipe.planner.checks import check_layout
from pipetransformer.pipe.planner.choice import Planner
from pipetransformer.pipe.planner.constraints import Constraints
from pipetransformer.pipe.planner.costs import JobCosts, UnitCosts
from pipetransformer.pipe.planner.partition import stage_costs
from pipetransformer.pipe.planner.search import best_plans
from pipetransformer.plan import ParallelPlan
from pipetransformer.plan.units import Numbering
from pipetransformer.process.world import World
from pipetransformer.run import events
from pipetransformer.trainer import Trainer

HALF, BLOCK = "pipe.units=half", "pipe.units=block"


def norms_of(world: World, case: Case, folder: str) -> tuple[list[float], int]:
    replay = Path(folder) / f"replay_{world.rank}.jsonl"
    write_replay(replay, case.plans())
    overrides = [*case.overrides(""), f"pipe.units={case.units}", "freeze.policy=paper", f"run.replay={replay}"]
    overrides += [f"run.dir={folder}", "run.id=norms", "run.overwrite=true"]
    sums, count, kept = np.zeros(NUM_BLOCKS), 0, list[int]()

    def listen(event: events.Event) -> None:
        """Adds up the gradient norms that are told."""
        nonlocal sums, count
        if isinstance(event, events.Stepped):
            kept.append(len(trainer.engine.stepper._squares))
        elif isinstance(event, events.Logged):
            sums += np.array(event.figures.gradient_norms) * event.figures.num_steps
            count += event.figures.num_steps

    trainer = Trainer(configuration(case.model, overrides), world, timed=False, listeners=[listen])
    with mock.patch.object(step, "_STEPS_TOGETHER", 3):
        trainer.run()
    assert 0 < max(kept) < 3, "norms are summed some steps at once, and a run that nobody asks for them keeps few"
    return sums.tolist(), count


def test_the_norm_of_a_block_is_that_of_both_halves(ranks: RankPool, tmp_path: Path) -> None:
    """Where they are on two ranks, too."""
    expected = reference_norms(Case("vit", 1, STATIC[1], 2), "")
    assert len(set(expected)) == NUM_BLOCKS, "a neighbour's norm would be as good"
    halves = Case("vit", 2, STATIC[2], 2, units="half")
    assert [plan.boundaries for plan in halves.plans().values()] == [(6,)], "units 5 and 6 are one block"
    for found, count in ranks.run(2, norms_of, halves, str(tmp_path)):
        assert count == 20
        assert found == pytest.approx(expected, rel=1e-9)


def test_norms_of_replayed_plans_are_summed_each_under_its_own(ranks: RankPool, tmp_path: Path) -> None:
    """A transition changes which ranks hold a block, and with whom a rank sums."""
    case = Case("vit", 2, TWO_RANKS, 2, units="half")
    expected = reference_norms(case, "")
    for found, count in ranks.run(2, norms_of, case, str(tmp_path)):
        assert count == 20
        assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("units", [(BLOCK, HALF), (HALF, BLOCK)])
def test_a_run_goes_on_and_is_replayed_in_other_units(units: tuple[str, str], ranks: RankPool, tmp_path: Path) -> None:
    """Its plans cut between blocks; moments of frozen blocks are parked."""
    case, saving = Case("vit", 2, TWO_RANKS, 2), "checkpoint.every=7 steps"
    weights, _ = reference(case, "")
    before, after = units
    ranks.run(2, interrupted_run, case, str(tmp_path), [saving, before], 12, False)
    answers = ranks.run(2, interrupted_run, case, str(tmp_path), [saving, after], None, True)
    assert answers[0][1] == "step-00000010"
    assert deviation(answers[0][0], weights) < 1e-10


def test_a_plan_that_cuts_blocks_is_refused_where_they_are_whole(ranks: RankPool, tmp_path: Path) -> None:
    halves = Case("vit", 2, STATIC[2], 2, units="half")
    ranks.run(2, interrupted_run, halves, str(tmp_path), ["checkpoint.every=3 steps", HALF], 4, False)
    with pytest.raises(AssertionError, match="run.resume: the plan of .*step-00000003 cuts blocks .* pipe.units=half"):
        ranks.run(2, interrupted_run, halves, str(tmp_path), [BLOCK], None, True)
    with pytest.raises(AssertionError, match="run.replay: .* holds a plan that cuts blocks in halves; give pipe.units"):
        ranks.run(2, interrupted_run, halves, str(tmp_path), [BLOCK, "run.overwrite=true"], None, False)


def test_a_live_run_in_halves_measures_plans_and_freezes(ranks: RankPool, tmp_path: Path) -> None:
    plans = ranks.run(2, live_plans, str(tmp_path))
    assert plans[0] == plans[1]
    assert all(plan.units_per_block == 2 and plan.num_units == 2 * NUM_BLOCKS + 2 for plan in plans[0])
    assert plans[0][0].pp == 2 and plans[0][-1].frozen > 0


def live_plans(world: World, folder: str) -> list[ParallelPlan]:
    overrides = [*Case("vit", 2, STATIC[2]).overrides(""), HALF, "pipe.initial_length=2", "freeze.policy=schedule"]
    overrides += ["freeze.every=5 steps", "freeze.alpha=0.4", f"run.dir={folder}", "run.id=live"]
    trainer = Trainer(configuration("vit", overrides), world)
    trainer.run()
    events = [json.loads(line) for line in (Path(folder) / "live" / "events.jsonl").read_text().splitlines()]
    return [ParallelPlan.from_dict(event["plan"]) for event in events if event["event"] == "plan"]


def test_more_stages_than_halves_are_refused() -> None:
    config = load_config(configuration_file("vit"), [HALF, "pipe.initial_length=9"])
    with pytest.raises(UserError, match=r"exceeds the 8 units \(stem, halves of blocks, head\) of .*; give at most 8$"):
        check_layout(config, world_size=9, local_size=9, num_units=Numbering(3, 2).num_units)


# ---- balance ---------------------------------------------------------------------------------------------------------


def whole_blocks(halves: JobCosts) -> JobCosts:
    """What the same blocks cost whole."""

    def merged(column: tuple[int, ...]) -> tuple[int, ...]:
        pairs = zip(column[1:-1:2], column[2:-1:2], strict=True)
        return (column[0], *(first + second for first, second in pairs), column[-1])

    def whole(costs: UnitCosts) -> UnitCosts:
        leaving = costs.boundary_bytes
        columns = UnitCosts(costs.rows, costs.length, *map(merged, costs.columns()))
        return replace(columns, boundary_bytes=(leaving[0], *leaving[2:-1:2], leaving[-1]))

    by_rows = {rows: whole(costs) for rows, costs in halves.by_rows.items()}
    return replace(halves, by_rows=by_rows, parameter_bytes=merged(halves.parameter_bytes))


def slowest_stage(job: JobCosts, *, num_blocks: int, frozen: int, pp: int) -> int | None:
    """Of the planner's cut, communication included; None where no cut has a unit for each stage."""
    ((rows, unit),) = job.by_rows.items()
    constraints = Constraints(pp, rows * pp, (("gpipe", 1),), pp, (pp,), None)
    found = best_plans(frozen, cached=None, costs=job, constraints=constraints, num_blocks=num_blocks, lines={})
    if not found:
        return None
    best = found[0]
    first = best.plan.first_active
    crossing = [2 * job.send.ns(num_bytes) for num_bytes in unit.boundary_bytes[first:]]
    return max(stage_costs(unit.step_ns[first:], [cut - first for cut in best.plan.boundaries], crossing=crossing))


def test_halves_never_balance_worse_than_blocks() -> None:
    random, better = Random(0), 0
    for _ in range(300):
        num_blocks, pp = random.randint(1, 8), random.randint(1, 6)
        frozen = random.randint(0, num_blocks)
        halves = random_job(random, 2 * num_blocks + 2)
        rows, costs = next(iter(halves.by_rows.items()))
        halves = replace(halves, by_rows={rows: costs}, recompute="never")
        in_blocks = slowest_stage(whole_blocks(halves), num_blocks=num_blocks, frozen=frozen, pp=pp)
        in_halves = slowest_stage(halves, num_blocks=num_blocks, frozen=frozen, pp=pp)
        if in_blocks is not None:
            assert in_halves is not None and in_halves <= in_blocks
            better += in_halves < in_blocks
    assert better > 50, "halves gained nothing"


@pytest.mark.parametrize(("schedule", "stages_per_rank", "most"), [("1f1b", 1, 9), ("interleaved", 2, 7)])
def test_a_kept_pipeline_leaves_a_half_for_each_stage(schedule: str, stages_per_rank: int, most: int) -> None:
    """Of 10 blocks: 3 stages need the head and the halves of one block, 6 stages the head and five halves."""
    kept = ["pipe.initial_length=3", "pipe.microbatches=3", f"pipe.schedule={schedule}", "dp.enabled=false"]
    pipe = Planner.of(load_config(configuration_file("vit"), [HALF, *kept]), num_blocks=10, world_size=3, local_size=3)
    cuts = tuple(range(1, 3 * stages_per_rank))
    assert pipe.max_frozen(ParallelPlan(0, 3, 1, cuts, 3, schedule, None, 10, stages_per_rank, 2)) == most
