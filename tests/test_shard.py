"""Replicas that share out the optimizer's state: who has what, what it takes of memory and time, what a rank holds, and
norms over all ranks. That the weights are the plain loop's: ``test_exactness.py``; after a resumption:
``test_resume.py``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from laws import NUM_BLOCKS, REPOSITORY, Case, configuration, make_plan, write_replay
from ranks import RankPool
from test_planner import random_job

from pipetransformer.config import load_config
from pipetransformer.errors import UserError
from pipetransformer.pipe.planner.checks import check_layout
from pipetransformer.pipe.planner.choice import Planner
from pipetransformer.pipe.planner.constraints import Constraints, divisors
from pipetransformer.pipe.planner.costs import JobCosts, Link, UnitCosts
from pipetransformer.pipe.planner.microbatches import uncut_plans
from pipetransformer.pipe.planner.search import predict, simulate_plan
from pipetransformer.pipe.planner.transition_cost import transition_bytes
from pipetransformer.plan import SHARDS, ParallelPlan
from pipetransformer.plan.units import Numbering
from pipetransformer.process.world import World
from pipetransformer.run import events
from pipetransformer.trainer import Trainer

PLAN = ParallelPlan(2, 2, 2, (6,), 4, "1f1b", None, 8, shard="optimizer")


def test_replicas_take_turns() -> None:
    assert PLAN.shares_state and PLAN.ranks_by_unit()[3] == range(0, 4, 2)
    assert [PLAN.state_ranks()[unit][0] for unit in range(3, 10)] == [0, 2, 0, 3, 1, 3, 1], "from the head on"
    assert all(len(ranks) == 1 for ranks in PLAN.state_ranks().values())
    alone = replace(PLAN, dp=1, shard="none")
    assert alone.state_ranks() == alone.ranks_by_unit() and not replace(alone, shard="optimizer").shares_state


def test_a_rank_is_predicted_to_hold_the_largest_share() -> None:
    random, seen = Random(0), 0
    while seen < 200:
        num_units = random.randint(4, 9)
        job = replace(random_job(random, num_units), optimizer_factor=random.choice([1.0, 2.0, 3.0]), num_ranks=8)
        pp, batch = random.choice(divisors(4)), 32
        plan = ParallelPlan(0, pp, 8 // pp, tuple(range(1, pp)), 4, "1f1b", None, num_units - 2)
        whole = predict(plan, costs=job, global_batch_size=batch).memory_bytes
        shared = predict(replace(plan, shard="optimizer"), costs=job, global_batch_size=batch).memory_bytes
        for place in range(pp):
            state = [
                round(n * job.optimizer_factor) - n for n in map(job.parameter_bytes.__getitem__, plan.units_of(place))
            ]
            most = max(sum(state[::-1][replica :: plan.dp]) for replica in range(plan.dp))
            assert whole[place] - shared[place] == sum(state) - most
        seen += 1


def test_a_freeze_moves_nothing_of_what_still_trains() -> None:
    costs = replace(random_job(Random(2), 8), optimizer_factor=3.0, num_ranks=4)
    for shard in ("optimizer", "full"):
        before, after = (ParallelPlan(n, 1, 4, (), 2, "1f1b", None, 6, shard=shard) for n in (1, 2))
        assert {u: before.state_ranks()[u] for u in after.state_ranks()} == after.state_ranks()
        # The frozen block goes to those that do not hold it; under "optimizer" all do.
        expected = 0 if shard == "optimizer" else costs.parameter_bytes[2]
        assert transition_bytes(before, after, costs=costs) == expected
    thawed = transition_bytes(after, replace(after, frozen=1), costs=costs)
    assert thawed == 0, "it never had a step"


def test_a_thaw_brings_moments_to_their_owner_alone() -> None:
    costs = replace(random_job(Random(2), 8), optimizer_factor=3.0, num_ranks=4)
    one, two = (
        ParallelPlan(0, pp, 4 // pp, tuple(range(4, 4 * pp, 4)), 2, "1f1b", None, 6, shard="full") for pp in (1, 2)
    )
    received = [0] * 4
    for unit, (rank,) in two.state_ranks().items():
        received[rank] += 3 * costs.parameter_bytes[unit] if rank not in one.state_ranks()[unit] else 0
    assert transition_bytes(one, two, costs=costs) == max(received) > 0


@pytest.mark.parametrize(
    ("shard", "seconds"),
    [
        # Two units of 10 + 20 ns, M 2: 120 ns; a sum of both units' 2 x 100 bytes at 1 ns a byte; an update of 200.
        ("none", 120 + 200 + 200),
        ("optimizer", 120 + 100 + 100 + 100),  # half of the sum, one unit's update, the other half
        ("full", 120 + 2 * (100 + 200) + 100),  # in each micro-batch the weights twice and the gradients once
    ],
)
def test_a_step_takes_what_moves(shard: str, seconds: int) -> None:
    nothing, unit = (0, 0), UnitCosts(1, 1, (10, 10), (20, 20), *[(0, 0)] * 10)
    assert unit.between_bytes == nothing
    costs = JobCosts({1: unit}, (100, 100), 3.0, 1.0, Link(0, 0.0), Link(0, 1.0), num_ranks=2)
    plan = ParallelPlan(0, 1, 2, (), 2, "1f1b", None, 0, shard=shard)
    assert simulate_plan(plan, costs=costs, global_batch_size=4).total == seconds


def test_moments_of_a_freeze_that_may_be_undone_are_shared_out_too() -> None:
    job = replace(random_job(Random(4), 6), optimizer_factor=3.0, num_ranks=4, parked_from=0, keeps_boundaries=False)
    plan = ParallelPlan(2, 1, 4, (), 1, "1f1b", None, 4, shard="optimizer")
    parked, kept = (
        predict(plan, costs=replace(job, parked_from=first), global_batch_size=32).memory_bytes[0]
        for first in (None, 0)
    )
    state = sum(round(3 * n) - n for n in job.parameter_bytes[:3])
    assert kept - parked == -(-state // 4)


def test_a_job_plans_with_it(tmp_path: Path) -> None:
    config = load_config(
        REPOSITORY / "config" / "train_config_digits_no_freeze.yaml", ["dp.shard=optimizer", "pipe.initial_length=1"]
    )
    planner = Planner.of(config, num_blocks=4, world_size=4, local_size=4)
    choice = planner.first_plan(replace(random_job(Random(1), 6), num_ranks=4), {})
    assert choice.plan.shard == "optimizer" and choice.plan.pp == 1 and choice.plan.shares_state


def held(world: World, folder: str, shard: str) -> tuple[int, int, list[float]]:
    """Numbers that this rank's optimizer holds at the end, those of all weights, and the norms of all steps."""
    case = Case("vit", world.size, ((0, 0, 1),), 2, shard=shard)
    replay = Path(folder) / f"replay-{shard}-{world.rank}.jsonl"
    write_replay(replay, case.plans())
    place = (f"run.replay={replay}", f"run.dir={folder}", f"run.id={shard}")
    trainer = Trainer(configuration("vit", [*case.overrides(""), *place]), world, timed=False)
    found: list[tuple[int, list[float]]] = []

    def note(event: events.Event) -> None:
        if isinstance(event, events.TrainingEnds):
            state = trainer.engine.layout.state()
            found.append((sum(t.numel() for own in state.values() for t in own.values() if t.dim()), []))

    norms = [0.0] * NUM_BLOCKS

    def probe(step: int, gradients: object) -> None:
        if step:
            add(trainer.engine.take_norms().sums)

    def add(sums: list[float]) -> None:
        norms[:] = [a + b for a, b in zip(norms, sums)]

    trainer.engine.stepper._probe = probe
    trainer.listeners = (*trainer.listeners, note)
    trainer.run()
    weights = sum(p.numel() for p in trainer.job.chain.model.parameters())
    return found[0][0], weights, norms


def test_each_replica_holds_its_part_of_the_state_and_norms_are_of_all(ranks: RankPool, tmp_path: Path) -> None:
    whole, shared = (ranks.run(4, held, str(tmp_path), shard) for shard in ("none", "optimizer"))
    total = 2 * whole[0][1]
    assert [rank[0] for rank in whole] == [total] * 4
    assert sum(rank[0] for rank in shared) == total and max(rank[0] for rank in shared) < 0.35 * total
    for rank in shared:
        assert rank[2] == pytest.approx(whole[0][2], rel=1e-9)


def test_the_plan_tells_it() -> None:
    plan = make_plan(0, 2, world_size=4, num_microbatches=2, schedule="1f1b", shard="optimizer")
    assert ParallelPlan.from_dict(plan.as_dict()) == plan
    old = {key: value for key, value in plan.as_dict().items() if key != "shard"}
    assert ParallelPlan.from_dict(old).shard == "none"


def test_what_would_fit_if_replicas_shared_out_is_told() -> None:
    job = replace(random_job(Random(3), 6), optimizer_factor=3.0, num_ranks=4, parked_from=None)
    first = Constraints(
        world_size=4, global_batch_size=32, schedules=(("1f1b", 1),), num_microbatches=1, pipeline_lengths=(1,),
        memory_limit=None,
    )  # fmt: skip

    def told(limit: int, shard: str = "none", key: str | None = None) -> str:
        allowed = replace(first, memory_limit=limit, shard=shard)
        with pytest.raises(UserError) as caught:
            Planner(allowed, num_blocks=4, local_size=4, limit_key=key).first_plan(job, {})
        return str(caught.value)

    needed = {
        shard: Planner(replace(first, shard=shard), num_blocks=4, local_size=4)
        .first_plan(job, {})
        .prediction.memory_bytes[0]
        for shard in SHARDS
    }
    assert needed["none"] > needed["optimizer"] > needed["full"]
    assert told(needed["optimizer"]).endswith("; give dp.shard=optimizer")
    assert told(needed["optimizer"] - 1).endswith("; give dp.shard=full")
    assert told(needed["full"] - 1).endswith("; give pipe.recompute always, or more ranks")
    assert told(needed["full"] - 1, "full").endswith("; give pipe.recompute always, or more ranks")
    limit = needed["full"]
    assert told(limit, key="pipe.memory_limit").endswith(f"; give dp.shard=full, or at least {needed['none']}")


def test_halves_of_a_backward_borrow_nothing() -> None:
    given = ["dp.shard=full", "pipe.schedule=zero_bubble"]
    config = load_config(REPOSITORY / "config" / "train_config_digits_no_freeze.yaml", given)
    with pytest.raises(UserError, match="^dp.shard: full cannot go with pipe.schedule zero_bubble, .*give optimizer"):
        check_layout(config, world_size=4, local_size=4, num_units=8)
    halves = replace(PLAN, schedule="zero_bubble", shard="none")
    assert halves.sharing("full") is halves and halves.sharing("optimizer").shard == "optimizer"
    with pytest.raises(AssertionError):
        replace(PLAN, schedule="zero_bubble", shard="full")
    allowed = Constraints(
        world_size=4, global_batch_size=32, schedules=(("1f1b", 1), ("zero_bubble", 1)), num_microbatches=4,
        pipeline_lengths=(2,), memory_limit=None, shard="full",
    )  # fmt: skip
    found = list(uncut_plans(0, cached=None, constraints=allowed, numbering=Numbering(6)))
    assert [plan.schedule for plan in found] == ["1f1b"]
