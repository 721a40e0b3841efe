"""The simulator gives the closed forms of the papers exactly, and its orders are those that torch runs."""

from __future__ import annotations

from fractions import Fraction
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipetransformer.pipe.planner.step_simulator import StageCosts, simulate
from pipetransformer.plan.schedules import Work, orders, peak_alive, why_not

SIZES = list(product((1, 2, 3, 4, 8), (1, 2, 4, 8, 16)))
ADMITTED = [(name, k, m) for name in ("gpipe", "1f1b") for k, m in SIZES if name == "gpipe" or m >= k]


@pytest.mark.parametrize(("schedule", "num_ranks", "num_microbatches"), ADMITTED)
def test_bubble_of_equal_stages(schedule: str, num_ranks: int, num_microbatches: int) -> None:
    """(K - 1) / (M + K - 1): GPipe, section 2.3; 1F1B has the same, with fewer activations."""
    stages = [StageCosts(forward=3, backward=7)] * num_ranks
    timeline = simulate(schedule, stages, num_ranks=num_ranks, num_microbatches=num_microbatches)
    slots = num_microbatches + num_ranks - 1
    assert timeline.compute == timeline.total == slots * 10
    assert timeline.busy == (num_microbatches * 10,) * num_ranks
    assert Fraction(timeline.bubble).limit_denominator(1000) == Fraction(num_ranks - 1, slots)


@pytest.mark.parametrize(("num_ranks", "rounds", "per_rank"), list(product((2, 4, 8), (1, 2, 4), (2, 3))))
def test_bubble_of_interleaved_stages(num_ranks: int, rounds: int, per_rank: int) -> None:
    """(K - 1) / v of a whole stage's forward and backward: arXiv 2104.04473, section 2.2."""
    stages = [StageCosts(forward=2, backward=4)] * (num_ranks * per_rank)
    microbatches = rounds * num_ranks
    timeline = simulate("interleaved", stages, num_ranks=num_ranks, num_microbatches=microbatches)
    assert timeline.compute == microbatches * per_rank * 6 + (num_ranks - 1) * 6


@pytest.mark.parametrize(("num_ranks", "rounds"), list(product((2, 4, 8), (2, 3))))
def test_bubble_of_weights_apart(num_ranks: int, rounds: int) -> None:
    """ZB1P waits (K - 1)(F + I - W), with F = I = W a third of what 1F1B waits: arXiv 2401.10241, table 2."""
    stages = [StageCosts(forward=5, backward=10, weight=5)] * num_ranks
    microbatches = rounds * num_ranks
    timeline = simulate("zero_bubble", stages, num_ranks=num_ranks, num_microbatches=microbatches)
    assert timeline.compute == microbatches * 15 + (num_ranks - 1) * 5


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), SIZES)
def test_activations_alive(num_ranks: int, num_microbatches: int) -> None:
    """GPipe keeps all M micro-batches; 1F1B min(K - stage, M)."""
    every = dict(num_ranks=num_ranks, num_microbatches=num_microbatches)
    assert [peak_alive(order) for order in orders("gpipe", **every)] == [num_microbatches] * num_ranks
    if num_microbatches >= num_ranks:
        expected = [min(num_ranks - stage, num_microbatches) for stage in range(num_ranks)]
        assert [peak_alive(order) for order in orders("1f1b", **every)] == expected


def test_a_slow_stage_sets_the_pace() -> None:
    """GPipe over stages of 1 and 5: the second begins after the first's forward and then never waits."""
    timeline = simulate("gpipe", [StageCosts(1, 1), StageCosts(5, 5)], num_ranks=2, num_microbatches=4)
    assert timeline.compute == 1 + 4 * 5 + 4 * 5 + 1
    assert timeline.busy == (8, 40)


def test_messages_follow_each_other_on_a_link() -> None:
    """A link that is slower than the stages: each message waits for the one before, and arrives a latency later."""
    stages = [StageCosts(forward=1, backward=1, send=10), StageCosts(forward=1, backward=1, send_back=0)]
    timeline = simulate("gpipe", stages, num_ranks=2, num_microbatches=3, latency=2)
    forwards = [span.start for span in timeline.spans if span.rank == 1 and span.work.kind == "F"]
    assert forwards == [1 + 10 + 2, 1 + 20 + 2, 1 + 30 + 2]


def test_late_receives_wait_for_every_message() -> None:
    """Ready long before it is asked for, a message still takes its time: 2 + 1 before each forward of the last rank."""
    stages = [StageCosts(forward=1, backward=1, send=2), StageCosts(forward=10, backward=5, send_back=4)]
    common = dict(num_ranks=2, num_microbatches=3, latency=1, receives_late=True)
    timeline = simulate("gpipe", stages, **common)
    starts = {span.work: span.start for span in timeline.spans}
    assert [starts[Work("F", 1, m)] for m in range(3)] == [1 + 3, 14 + 3, 27 + 3]
    assert [starts[Work("B", 1, m)] for m in range(3)] == [40, 45, 50]
    assert [starts[Work("B", 0, m)] for m in range(3)] == [45 + 5, 51 + 5, 57 + 5]
    assert timeline.compute == 63


def test_reduction_hides_behind_the_last_backward() -> None:
    stages = [StageCosts(forward=4, backward=8)]
    common = dict(num_ranks=1, num_microbatches=2, reduce=[6], update=[3])
    assert simulate("gpipe", stages, **common, overlap=0.0).total == 24 + 6 + 3
    assert simulate("gpipe", stages, **common, overlap=0.5).total == 24 + 2 + 3
    assert simulate("gpipe", stages, **common, overlap=1.0).total == 24 + 3


def test_the_prefix_delays_the_first_forward() -> None:
    timeline = simulate("1f1b", [StageCosts(1, 2)] * 2, num_ranks=2, num_microbatches=2, first=7)
    assert timeline.spans[0].start == 7
    assert timeline.compute == 7 + 3 * 3
    assert timeline.busy == (7 + 6, 6)


@given(
    schedule=st.sampled_from(["gpipe", "1f1b", "interleaved", "zero_bubble"]),
    num_ranks=st.integers(1, 5),
    num_microbatches=st.integers(1, 12),
    costs=st.lists(st.tuples(*[st.integers(1, 50)] * 4), min_size=10, max_size=10),
    latency=st.integers(0, 30),
    late=st.booleans(),
)
def test_every_step_obeys_cause_and_effect(
    schedule: str,
    num_ranks: int,
    num_microbatches: int,
    costs: list[tuple[int, int, int, int]],
    latency: int,
    late: bool,
) -> None:
    per_rank = 2 if schedule == "interleaved" else 1
    if why_not(schedule, num_ranks=num_ranks, num_microbatches=num_microbatches, stages_per_rank=per_rank) is not None:
        return
    stages = [StageCosts(f, b + 1, b // 2, s, s) for f, b, s, _ in costs[: num_ranks * per_rank]]
    common = dict(num_ranks=num_ranks, num_microbatches=num_microbatches, latency=latency, receives_late=late)
    timeline = simulate(schedule, stages, **common)
    assert simulate(schedule, stages, **common, contention=[1.0] * num_ranks) == timeline
    spans = {span.work: span for span in timeline.spans}
    whole = {"F", "I", "W"} if schedule == "zero_bubble" else {"F", "B"}
    assert len(spans) == len(timeline.spans) == len(stages) * num_microbatches * len(whole)
    for (kind, stage, microbatch), span in spans.items():
        if kind == "F" and stage > 0:
            before = spans[type(span.work)("F", stage - 1, microbatch)]
            away = num_ranks > 1
            assert span.start >= before.stop + away * (stages[stage - 1].send + latency)
        if kind in "BI":
            assert span.start >= spans[type(span.work)("F", stage, microbatch)].stop
            if stage + 1 < len(stages):
                assert span.start >= spans[type(span.work)(kind, stage + 1, microbatch)].stop
        if kind == "W":
            assert span.start >= spans[type(span.work)("I", stage, microbatch)].stop
    for rank in range(num_ranks):
        mine = [span for span in timeline.spans if span.rank == rank]
        assert all(a.stop <= b.start for a, b in zip(mine, mine[1:]))


def test_a_rank_that_computes_alone_is_faster_where_cores_are_shared() -> None:
    """Two stages of 4 and 4, one micro-batch: never both at once, so that each takes half of what its costs say."""
    stages = [StageCosts(forward=4, backward=8)] * 2
    common = dict(num_ranks=2, contention=[0.5, 1.0])
    assert simulate("gpipe", stages, num_microbatches=1, **common).compute == 12
    # Three forwards: 2 alone, 4 + 4 together, 2 alone; the backwards alike.
    assert simulate("gpipe", stages, num_microbatches=3, **common).compute == (2 + 4 + 4 + 2) + (4 + 8 + 8 + 4)


def test_the_prefix_shares_cores_too() -> None:
    """Rank 1 waits for rank 0 at first: the prefix of 10 goes on alone."""
    timeline = simulate("gpipe", [StageCosts(4, 8)] * 2, num_ranks=2, num_microbatches=1, first=10, contention=[0.5, 1])
    assert timeline.compute == 5 + 12
