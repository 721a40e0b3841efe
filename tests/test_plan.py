"""A plan says who holds what, and cannot say what no pipeline can do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipetransformer.plan import ParallelPlan
from pipetransformer.plan.schedules import SCHEDULES, why_not
from pipetransformer.plan.units import Numbering

PLAN = ParallelPlan(2, 2, 2, (4, 6, 8), 4, "interleaved", None, 8, 2)


def test_several_stages_a_rank() -> None:
    assert PLAN.cuts == (3, 4, 6, 8, 10)
    assert PLAN.num_stages == 4
    assert PLAN.stages_of(0) == PLAN.stages_of(2) == range(0, 4, 2)
    assert PLAN.staged_units_of(3) == (range(4, 6), range(8, 10))
    assert PLAN.units_of(3) == (4, 5, 8, 9)
    assert PLAN.ranks_by_unit()[3] == range(0, 4, 2) and PLAN.ranks_by_unit()[9] == range(1, 4, 2)


@given(st.data())
def test_ranks_of_units_are_units_of_ranks(data: st.DataObject) -> None:
    pp, dp, v = (data.draw(st.integers(1, most)) for most in (4, 3, 3))
    schedule = data.draw(st.sampled_from([*SCHEDULES]))
    v = 1 if pp == 1 or schedule in ("gpipe", "1f1b") else max(v, 2 if schedule == "interleaved" else 1)
    frozen = data.draw(st.integers(0, 4))
    first = frozen + 1 if frozen else 0
    cuts = data.draw(st.lists(st.integers(first + 1, 18), min_size=pp * v - 1, max_size=pp * v - 1, unique=True))
    plan = ParallelPlan(frozen, pp, dp, tuple(sorted(cuts)), 4 * pp, schedule, None, 17, v)
    held = {(unit, rank) for rank in range(pp * dp) for unit in plan.units_of(rank)}
    assert held == {(unit, rank) for unit, ranks in plan.ranks_by_unit().items() for rank in ranks}
    assert sorted(unit for unit, rank in held if plan.replica_of(rank) == 0) == list(range(first, 19))
    assert all(plan.stage_of(rank) == plan.stages_of(rank)[0] for rank in range(pp * dp))
    assert ParallelPlan.from_dict(plan.as_dict()) == plan


@given(st.integers(1, 40), st.integers(1, 2))
def test_units_are_numbered_part_by_part(num_blocks: int, units_per_block: int) -> None:
    numbering = Numbering(num_blocks, units_per_block)
    parts = [numbering.part_of(unit) for unit in range(numbering.num_units)]
    blocks = [part for block in range(1, num_blocks + 1) for part in [block] * units_per_block]
    assert parts == [0, *blocks, num_blocks + 1]
    assert all(numbering.first_of(part) == parts.index(part) for part in parts)
    assert numbering.behind(0) == 0
    assert all(numbering.behind(n) == parts.index(n + 1) for n in range(1, num_blocks + 1))
    assert Numbering.of(num_blocks=num_blocks, num_units=numbering.num_units) == numbering


@given(st.data())
def test_a_plan_in_halves_and_back_is_itself(data: st.DataObject) -> None:
    num_blocks, pp = data.draw(st.integers(4, 12)), data.draw(st.integers(1, 4))
    frozen = data.draw(st.integers(0, num_blocks - 4))
    first = frozen + 1 if frozen else 0
    cuts = sorted(data.draw(st.sets(st.integers(first + 1, num_blocks + 1), min_size=pp - 1, max_size=pp - 1)))
    plan = ParallelPlan(frozen, pp, 1, tuple(cuts), pp, "1f1b", None, num_blocks)
    halves = plan.renumbered(2)
    assert halves is not None and halves.units_per_block == 2 and halves.renumbered(1) == plan
    parts = {(plan.numbering.part_of(u), ranks) for u, ranks in plan.ranks_by_unit().items()}
    assert parts == {(halves.numbering.part_of(u), ranks) for u, ranks in halves.ranks_by_unit().items()}


def test_a_plan_that_cuts_a_block_has_no_whole_ones() -> None:
    plan = ParallelPlan(1, 2, 1, (6,), 2, "1f1b", 1, 4, units_per_block=2)
    assert plan.cuts == (3, 6, 10) and plan.first_computed == 3
    assert plan.renumbered(1) is None and plan.renumbered(2) == plan
    assert replace(plan, boundaries=(7,)).renumbered(1) == ParallelPlan(1, 2, 1, (4,), 2, "1f1b", 1, 4)


WRONG: dict[str, dict[str, Any]] = {
    "a stage too many": {"boundaries": (4, 5, 6, 8)},
    "an empty stage": {"boundaries": (4, 4, 8)},
    "interleaved with one stage a rank": {"stages_per_rank": 1, "boundaries": (4,)},
    "1f1b with two": {"schedule": "1f1b"},
    "gpipe with two": {"schedule": "gpipe"},
    "unequal rounds": {"num_microbatches": 5},
    "no such schedule": {"schedule": "sometimes", "stages_per_rank": 1, "boundaries": (4,)},
    "two stages on one rank alone": {"pp": 1, "dp": 4, "boundaries": (4,)},
}


@pytest.mark.parametrize("what", WRONG)
def test_a_plan_that_no_pipeline_can_do(what: str) -> None:
    with pytest.raises((AssertionError, KeyError)):
        replace(PLAN, **WRONG[what])


def test_events_of_older_versions_are_read() -> None:
    plan = ParallelPlan(0, 2, 1, (3,), 2, "1f1b", None, 4)
    fields = plan.as_dict()
    del fields["stages_per_rank"], fields["units_per_block"]
    assert ParallelPlan.from_dict(fields) == plan
    del fields["schedule"]
    with pytest.raises(KeyError):
        ParallelPlan.from_dict(fields)


def test_any_schedule_is_admitted_on_one_rank() -> None:
    for schedule in SCHEDULES:
        assert ParallelPlan(0, 1, 4, (), 3, schedule, None, 4).num_stages == 1
    assert why_not("1f1b", num_ranks=4, num_microbatches=3) is not None


REASONS = {
    ("gpipe", 4, 1, 1): None,
    ("gpipe", 4, 0, 1): "over 4 ranks takes 1 or more",
    ("gpipe", 4, 4, 2): "has 1 stage a rank",
    ("1f1b", 4, 4, 1): None,
    ("1f1b", 4, 3, 1): "over 4 ranks takes 4 or more",
    ("1f1b", 4, 4, 3): "has 1 stage a rank",
    ("interleaved", 4, 3, 2): None,
    ("interleaved", 4, 4, 1): "needs at least 2 stages a rank",
    ("interleaved", 2, 5, 2): "over 2 ranks takes 4 or 6",
    ("interleaved", 2, 0, 2): "over 2 ranks takes 1",
    ("zero_bubble", 4, 11, 1): "over 4 ranks takes 10 or 12",
    ("zero_bubble", 4, 12, 3): None,
}


@pytest.mark.parametrize("numbers", REASONS)
def test_a_schedule_that_does_not_run_says_why(numbers: tuple[str, int, int, int]) -> None:
    schedule, num_ranks, num_microbatches, stages = numbers
    reason = why_not(schedule, num_ranks=num_ranks, num_microbatches=num_microbatches, stages_per_rank=stages)
    assert reason == REASONS[numbers]
