"""Costs that were measured before training follow what the stages take while training, and the cut follows them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from ranks import RankPool
from test_planner import even_job

from pipetransformer.engine.step import PhaseSeconds
from pipetransformer.pipe import controller
from pipetransformer.pipe.controller import AutoPipe
from pipetransformer.pipe.measure.profile_file import Profile
from pipetransformer.pipe.measure.watch import CostWatch
from pipetransformer.pipe.measure.workload import Workload
from pipetransformer.pipe.planner.answers import Outlook
from pipetransformer.pipe.planner.constraints import Constraints
from pipetransformer.pipe.planner.search import best_plans, predict
from pipetransformer.plan import ParallelPlan
from pipetransformer.process.world import World

NUM_BLOCKS, BATCH = 6, 8
CONSTRAINTS = Constraints(
    world_size=2, global_batch_size=BATCH, schedules=(("1f1b", 1),), num_microbatches=2, pipeline_lengths=(2,),
    memory_limit=None,
)  # fmt: skip

WORKLOAD = Workload(Counter({0: 1}), modal_length=0, lengths=(0,), share=1, rows=(1,), examples={})


def measurements() -> Profile:
    """Eight equal units of 10 ns forward and 20 ns backward a row."""
    job = even_job(NUM_BLOCKS + 2)
    return Profile({}, job, {0: job.by_rows[1]}, memcpy_bytes_per_second=1.0)


def watched(world: World, plan: ParallelPlan, slow: tuple[float, float], num_steps: int) -> Any:
    """What a rank believes after steps whose stages took ``slow`` times what was expected."""
    watch = CostWatch(measurements(), WORKLOAD, rank=world.rank, global_batch_size=BATCH)
    batches: Any = [SimpleNamespace(length=0)] * num_steps
    units = len(plan.units_of(world.rank))
    rows = BATCH // plan.dp
    forward = units * rows * 10e-9 * num_steps * slow[world.rank % 2]
    watch.spent(PhaseSeconds(forward=forward, backward=2 * forward))
    watch.trained(plan, batches)
    return watch.take()


def test_a_slow_stage_hands_over_units(ranks: RankPool) -> None:
    plan = ParallelPlan(0, 2, 1, (4,), 2, "1f1b", None, NUM_BLOCKS)
    first, second = ranks.run(2, watched, plan, (1.0, 3.0), 20)
    assert first == second
    unit, before = first.job.by_rows[1], measurements().job.by_rows[1]
    assert sum(unit.step_ns) == pytest.approx(sum(before.step_ns), rel=0.02)  # all together: as calibrated
    assert unit.forward_ns[7] == pytest.approx(3 * unit.forward_ns[0], rel=0.1)
    assert first.measured[0] == unit
    best, *_ = best_plans(0, cached=None, costs=first.job, constraints=CONSTRAINTS, num_blocks=NUM_BLOCKS, lines={})
    assert best.plan.boundaries == (5,)


def test_what_was_expected_changes_nothing(ranks: RankPool) -> None:
    plan = ParallelPlan(2, 2, 1, (5,), 2, "1f1b", None, NUM_BLOCKS)
    found, _ = ranks.run(2, watched, plan, (1.0, 1.0), 20)
    assert found == measurements()


def test_a_machine_that_is_slower_as_a_whole_changes_nothing(ranks: RankPool) -> None:
    plan = ParallelPlan(0, 2, 1, (4,), 2, "1f1b", None, NUM_BLOCKS)
    found, _ = ranks.run(2, watched, plan, (2.0, 2.0), 20)
    assert found == measurements()


def test_few_steps_tell_nothing(ranks: RankPool) -> None:
    plan = ParallelPlan(0, 2, 1, (4,), 2, "1f1b", None, NUM_BLOCKS)
    assert ranks.run(2, watched, plan, (1.0, 3.0), 9) == [None, None]


def test_a_gain_that_may_be_noise_is_left() -> None:
    from test_planner import make_planner

    controller = make_planner(
        world_size=2, pipe={"initial_length": 2}, train={"epochs": 1, "batch_size": BATCH, "lr": 0.1}
    )
    costs = measurements().job
    even = ParallelPlan(0, 2, 1, (4,), 2, "1f1b", None, NUM_BLOCKS)
    choice = controller.first_plan(costs, {})
    outlook = Outlook(costs, 1000)
    assert choice.plan.boundaries == (4,)
    assert not controller.pays(choice, current=choice.plan, outlook=outlook)
    assert controller.pays(choice, current=replace(choice.plan, boundaries=(6,)), outlook=outlook)
    assert not controller.pays(
        replace(choice, transition_seconds=1.0), current=replace(even, boundaries=(6,)), outlook=outlook
    )
    step = choice.prediction.step_seconds
    for gain, pays in ((0.04, False), (0.06, True)):
        better = replace(choice, prediction=replace(choice.prediction, step_seconds=step * (1 - gain)))
        assert controller.pays(better, current=choice.plan, outlook=outlook) is pays


def test_decisions_every_few_steps_add_up_to_news(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five steps tell too little; with the next five they do, and then they are counted no more."""
    monkeypatch.setattr(controller, "slowest", lambda seconds: seconds)
    autopipe = AutoPipe.__new__(AutoPipe)
    autopipe._watch, autopipe._observed, autopipe._recent = None, {}, controller._Recent()
    plan = ParallelPlan(0, 1, 1, (), 1, "1f1b", None, 6)
    news = []
    for _ in range(4):
        autopipe._recent = autopipe._recent.plus(5, work=5.0, seconds=1.0)
        news.append(autopipe._remeasure(plan))
    assert news == [False, True, False, True]
    assert autopipe._observed[plan].seconds == pytest.approx(0.2)


def test_the_rest_of_a_run_is_counted_in_the_steps_that_are_predicted() -> None:
    """Those of full batches of long texts: a mean step, of shorter ones in part, takes half as long."""
    autopipe: Any = AutoPipe.__new__(AutoPipe)
    job = even_job(NUM_BLOCKS + 2)
    short = job.by_rows[1]
    columns = {name: tuple(3 * ns for ns in getattr(short, name)) for name in ("forward_ns", "backward_ns")}
    autopipe.profile = Profile({}, job, {8: short, 24: replace(short, **columns)}, memcpy_bytes_per_second=1.0)
    autopipe.workload = replace(WORKLOAD, counts=Counter({8: 30, 24: 10}), modal_length=24, lengths=(24, 8))
    autopipe.layouts = SimpleNamespace(fastest_move=0.0, spread=None, timed_samples=BATCH)
    autopipe._calendar, autopipe._chain = SimpleNamespace(total_steps=20, batches_per_epoch=5), mock.Mock(untouched=0)
    autopipe.lines = dict
    plan = ParallelPlan(0, 1, 1, (), 1, "1f1b", None, 6)
    assert autopipe._outlook(4, plan).remaining_steps == pytest.approx(16 * (30 / 3 + 10) / BATCH / 5)


def test_tables_of_which_few_rows_are_summed_make_a_predicted_step_of_replicas_shorter() -> None:
    job = even_job(NUM_BLOCKS + 2)
    job = replace(job, reduction=replace(job.reduction, ns_per_byte=1.0), parameter_bytes=(1000,) * (NUM_BLOCKS + 2))
    few = replace(job, summed_bytes=(0, *job.parameter_bytes[1:]))
    plan = ParallelPlan(0, 1, 2, (), 1, "1f1b", None, NUM_BLOCKS)
    for shard in ("none", "optimizer"):
        steps = [predict(replace(plan, shard=shard), costs=costs, global_batch_size=BATCH) for costs in (job, few)]
        saved = steps[0].step_seconds - steps[1].step_seconds
        assert saved > 1e-7 if shard == "none" else saved == 0.0, "who shares out the updates sums them whole"
