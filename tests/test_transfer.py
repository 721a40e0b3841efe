"""A transition moves the fewest bytes: what a rank lacks arrives once, what it has stays."""

from __future__ import annotations

import time
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import RankPool

from pipetransformer.dp import Holders, Transfer, execute_transfers, transfers_of
from pipetransformer.plan import ParallelPlan
from pipetransformer.process.world import World

NUM_RANKS = 8
RANKS = st.builds(range, st.integers(0, NUM_RANKS), st.integers(0, NUM_RANKS), st.integers(1, NUM_RANKS))
HOLDERS = st.dictionaries(st.integers(0, 9), RANKS, max_size=10)
RANKS_PER_NODE = st.sampled_from([1, 2, 4, 8])


def transfers(held: Holders, needed: Holders, ranks_per_node: int, *, end: str = "target") -> list[Transfer]:
    """Those of all ranks, as the one end of each has planned them, by unit."""
    planned = [
        (rank, each)
        for rank in range(NUM_RANKS)
        for each in transfers_of(rank, held, needed, ranks_per_node=ranks_per_node)
    ]
    assert all(rank in (each.source, each.target) for rank, each in planned)
    found = [each for rank, each in planned if rank == getattr(each, end)]
    return sorted(found, key=lambda each: (each.unit, each.target))


@given(held=HOLDERS, needed=HOLDERS, ranks_per_node=RANKS_PER_NODE)
def test_each_missing_unit_arrives_once_and_nothing_else_moves(
    held: Holders, needed: Holders, ranks_per_node: int
) -> None:
    arrivals = Counter((each.unit, each.target) for each in transfers(held, needed, ranks_per_node))
    missing = {(unit, rank) for unit, ranks in needed.items() if held.get(unit) for rank in {*ranks} - {*held[unit]}}
    assert arrivals == Counter(missing)


@given(held=HOLDERS, needed=HOLDERS, ranks_per_node=RANKS_PER_NODE)
def test_sources_hold_the_unit_and_are_on_the_target_s_node_where_they_can(
    held: Holders, needed: Holders, ranks_per_node: int
) -> None:
    for transfer in transfers(held, needed, ranks_per_node):
        holders = held[transfer.unit]
        node = transfer.target // ranks_per_node
        neighbours = {rank for rank in holders if rank // ranks_per_node == node}
        assert transfer.source in (neighbours or holders)


@given(held=HOLDERS, needed=HOLDERS, ranks_per_node=RANKS_PER_NODE)
def test_both_ends_plan_alike_and_in_one_order(held: Holders, needed: Holders, ranks_per_node: int) -> None:
    ours = transfers(held, needed, ranks_per_node)
    assert ours == transfers(held, needed, ranks_per_node, end="source")
    for rank in range(NUM_RANKS):
        units = [each.unit for each in transfers_of(rank, held, needed, ranks_per_node=ranks_per_node)]
        assert units == sorted(units)


@pytest.mark.parametrize(
    ("held", "needed", "ranks_per_node", "expected"),
    [
        ({0: range(1)}, {0: range(2)}, 2, [(0, 0, 1)]),
        ({0: range(2)}, {0: range(1)}, 2, []),
        ({}, {0: range(2)}, 2, []),  # nobody has it
        ({0: range(2)}, {0: range(2, 4)}, 4, [(0, 0, 2), (0, 1, 3)]),  # in turn
        ({0: range(0, 4, 2)}, {0: range(1, 4, 2)}, 2, [(0, 0, 1), (0, 2, 3)]),  # within each node
        ({0: range(1), 1: range(1, 2)}, {0: range(1, 2), 1: range(1)}, 1, [(0, 0, 1), (1, 1, 0)]),
        ({1: range(2)}, {1: range(2, 6)}, 2, [(1, 1, 2), (1, 0, 3), (1, 1, 4), (1, 0, 5)]),  # unit 1 begins elsewhere
    ],
)
def test_transfers_by_hand(
    held: Holders, needed: Holders, ranks_per_node: int, expected: list[tuple[int, int, int]]
) -> None:
    assert transfers(held, needed, ranks_per_node) == [Transfer(*each) for each in expected]


def test_the_sources_of_an_even_move_send_evenly() -> None:
    held, needed = {unit: range(2) for unit in range(6)}, {unit: range(2, 8) for unit in range(6)}
    assert {*Counter(each.source for each in transfers(held, needed, 2)).values()} == {18}


def test_a_thousand_ranks_plan_in_a_moment() -> None:
    """The fastest of a few: each rank plans its own, and this machine is shared."""
    blocks, ranks = 96, 1024
    plans = [
        ParallelPlan(0, pp, ranks // pp, tuple(range(98 // pp, 98, 98 // pp))[: pp - 1], pp, "1f1b", None, blocks)
        for pp in (64, 16)
    ]
    held, needed = (plan.ranks_by_unit() for plan in plans)

    def seconds(rank: int) -> float:
        start = time.perf_counter()
        transfers_of(rank, held, needed, ranks_per_node=8)
        return time.perf_counter() - start

    assert max(min(seconds(rank) for _ in range(5)) for rank in (0, 511, 1023)) < 0.02


# Moved for real

UNITS = range(4)
STAGES_OF_4 = {unit: range(unit, unit + 1) for unit in UNITS}
STAGES_OF_2 = {unit: range(unit // 2, 4, 2) for unit in UNITS}
EVERYWHERE = dict.fromkeys(UNITS, range(4))


def unit_tensors(unit: int) -> list[torch.Tensor]:
    """What a unit holds: weights of several shapes, types and sizes, one of them a number."""
    values = torch.arange(10_000 * (unit + 1), dtype=torch.float64) + unit
    return [values.view(100, -1), values[:7].float(), torch.tensor(float(unit)), values[:3].to(torch.int64)]


def moves(world: World, held: Holders, needed: Holders) -> tuple[bool, int]:
    mine = {unit: unit_tensors(unit) for unit in UNITS}
    for unit in UNITS:
        if world.rank not in held[unit]:
            for tensor in mine[unit]:
                tensor.fill_(-1)
    planned = transfers_of(world.rank, held, needed, ranks_per_node=world.local_size)
    num_bytes = execute_transfers(planned, rank=world.rank, tensors=lambda unit: mine[unit])
    arrived = all(
        torch.equal(have, want)
        for unit in UNITS
        if world.rank in needed[unit]
        for have, want in zip(mine[unit], unit_tensors(unit), strict=True)
    )
    return arrived, num_bytes


@pytest.mark.parametrize(
    ("held", "needed"),
    [
        (STAGES_OF_4, STAGES_OF_2),
        (STAGES_OF_2, STAGES_OF_4),
        (STAGES_OF_4, EVERYWHERE),
        (EVERYWHERE, STAGES_OF_4),
        (STAGES_OF_4, {unit: range(3 - unit, 4 - unit) for unit in UNITS}),
    ],
)
def test_four_ranks_receive_what_they_lack_and_no_byte_more(ranks: RankPool, held: Holders, needed: Holders) -> None:
    for rank, (arrived, num_bytes) in enumerate(ranks.run(4, moves, held, needed)):
        lacking = [unit for unit in UNITS if rank in needed[unit] and rank not in held[unit]]
        assert arrived
        assert num_bytes == sum(tensor.nbytes for unit in lacking for tensor in unit_tensors(unit))
