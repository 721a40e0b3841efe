"""The partitioner equals brute force: the slowest stage, the tie rule, the memory limit."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations
from random import Random

import pytest

from benchmarks.partitioner.__main__ import all_rows, trained_chain
from pipetransformer.pipe.planner.partition import balance_bound, partition, stage_costs

NUM_CHAINS = 1000


def brute_force(
    costs: list[int],
    num_stages: int,
    crossing: list[int],
    memory: list[list[int]],
    largest: list[list[int]],
    received: list[list[int]],
    limit: int | None,
) -> tuple[int, tuple[int, ...]] | None:
    """(cost of the slowest stage, boundaries) of the best cut that fits: it orders as ``partition`` says."""
    n = len(costs)
    found = []
    for boundaries in combinations(range(1, n), num_stages - 1):
        stages = list(zip((0, *boundaries), (*boundaries, n)))
        rows = zip(memory, largest, received, stages)
        taken = [sum(row[a:b]) + max(most[a:b]) + first[a] for row, most, first, (a, b) in rows]
        if limit is not None and max(taken) > limit:
            continue
        each = [
            sum(costs[a:b]) + (crossing[a - 1] if a > 0 else 0) + (crossing[b - 1] if b < n else 0) for a, b in stages
        ]
        found.append((max(each), -min(each), boundaries))
    if not found:
        return None
    slowest, _, boundaries = min(found)
    return slowest, boundaries


@pytest.mark.parametrize("largest_cost", [3, 10**9], ids=["ties", "nanoseconds"])
def test_partition_equals_brute_force(largest_cost: int) -> None:
    random = Random(largest_cost)
    num_refused = 0
    for _ in range(NUM_CHAINS):
        n = random.randint(1, 12)
        num_stages = random.randint(1, n)
        costs = [random.randint(0, largest_cost) for _ in range(n)]
        crossing = [random.choice([0, random.randint(0, largest_cost)]) for _ in range(n)]
        memory = [[random.randint(0, 9) for _ in range(n)] for _ in range(num_stages)]
        largest = [[random.choice([0, random.randint(0, 9)]) for _ in range(n)] for _ in range(num_stages)]
        received = [[random.choice([0, random.randint(0, 9)]) for _ in range(n)] for _ in range(num_stages)]
        limit = random.choice([None, random.randint(5, 60)])
        expected = brute_force(costs, num_stages, crossing, memory, largest, received, limit)
        found = partition(
            costs,
            num_stages=num_stages,
            crossing=crossing,
            memory=memory,
            largest=largest,
            received=received,
            memory_limit=limit,
        )
        assert found == (None if expected is None else expected[1]), (costs, num_stages, crossing, memory, limit)
        if found is not None and expected is not None:
            assert max(stage_costs(costs, found, crossing=crossing)) == expected[0]
        num_refused += found is None
    assert 0 < num_refused < NUM_CHAINS / 2


@pytest.mark.parametrize(
    ("costs", "num_stages", "expected"),
    [
        ([1, 1, 1, 1], 1, ()),
        ([1, 1, 1, 1], 2, (2,)),
        ([1, 1, 1, 1], 4, (1, 2, 3)),
        ([9, 1, 1, 1], 2, (1,)),
        ([9, 1, 1, 1, 1], 3, (1, 3)),  # the first stage decides how slow it is; the others are balanced
        ([0, 0, 0], 3, (1, 2)),  # no stage is empty, even where that costs nothing
        ([1, 1], 3, None),
    ],
)
def test_partition_by_hand(costs: list[int], num_stages: int, expected: tuple[int, ...] | None) -> None:
    assert partition(costs, num_stages=num_stages) == expected


def test_an_expensive_crossing_is_avoided() -> None:
    assert partition([4, 4, 4, 4], num_stages=2, crossing=[0, 9, 0, 0]) == (1,)


def test_memory_outweighs_speed() -> None:
    row = [1, 1, 4, 4]
    assert partition([1, 1, 1, 1], num_stages=2, memory=[row, row], memory_limit=6) == (3,)
    assert partition([1, 1, 1, 1], num_stages=2, memory=[row, row], memory_limit=5) is None


def test_the_bound_is_the_best_balance_of_all_partitions() -> None:
    random = Random(0)
    for _ in range(300):
        n = random.randint(1, 9)
        num_stages = random.randint(1, n)
        costs = [random.randint(0, 100) for _ in range(n)]
        every = [stage_costs(costs, cuts) for cuts in combinations(range(1, n), num_stages - 1)]
        best = max(Fraction(min(each), max(each)) if any(each) else Fraction(1) for each in every)
        assert balance_bound(costs, num_stages=num_stages) == best


def test_a_graph_of_a_thousand_units_is_cut_in_no_time() -> None:
    random = Random(0)
    costs = [random.randint(0, 10**9) for _ in range(1000)]
    boundaries = partition(costs, num_stages=16)
    assert boundaries is not None
    assert max(stage_costs(costs, boundaries)) < 1.1 * sum(costs) / 16


# ---- the benchmark ---------------------------------------------------------------------------------------------------


def test_chains_as_they_are_trained_have_near_equal_blocks_between_a_small_stem_and_head() -> None:
    random, lengths = Random(0), set()
    for _ in range(100):
        (stem, *blocks, head), num_stages = trained_chain(random, tolerance=0.05, num_stages=8)
        lengths.add(len(blocks))
        assert num_stages == 8 and all(950_000 <= cost <= 1_050_000 for cost in blocks)
        assert max(stem, head) <= 250_000
    assert lengths == {6, 12, 24}


def test_the_exact_cut_is_never_worse_than_torchgpipes() -> None:
    pytest.importorskip("torchgpipe", reason='pip install -e ".[bench]"')
    rows = {str(row["costs"]): row for row in all_rows(60)}
    assert list(rows)[:3] == ["lognormal(0, 1)", "blocks ±1 %, 2 stages", "blocks ±1 %, 4 stages"] and len(rows) == 7
    assert all(row["worse"] == 0 and row["chains"] == 60 for row in rows.values())
    assert float(rows["lognormal(0, 1)"]["median ratio"] or 0) > 1.05
    assert (
        rows["blocks ±5 %, 8 stages"]["median ratio"] == 1.0 < float(rows["blocks ±5 %, 8 stages"]["worst ratio"] or 0)
    )
