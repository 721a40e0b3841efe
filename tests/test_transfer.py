"""A transition moves the fewest bytes: what a rank lacks arrives once, what it has stays."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import RankPool

from pipetransformer.dp import Transfer, execute_transfers, plan_transfers
from pipetransformer.process.world import World

NUM_RANKS = 8
RANKS = st.frozensets(st.integers(0, NUM_RANKS - 1))
HOLDERS = st.dictionaries(st.integers(0, 9), RANKS, max_size=10)
RANKS_PER_NODE = st.sampled_from([1, 2, 4, 8])
Holders = dict[int, frozenset[int]]


@given(held=HOLDERS, needed=HOLDERS, ranks_per_node=RANKS_PER_NODE)
def test_each_missing_unit_arrives_once_and_nothing_else_moves(
    held: Holders, needed: Holders, ranks_per_node: int
) -> None:
    transfers = plan_transfers(held, needed, ranks_per_node=ranks_per_node)
    arrivals = Counter((transfer.unit, transfer.target) for transfer in transfers)
    missing = {(unit, rank) for unit, ranks in needed.items() if held.get(unit) for rank in ranks - held[unit]}
    assert arrivals == Counter(missing)


@given(held=HOLDERS, needed=HOLDERS, ranks_per_node=RANKS_PER_NODE)
def test_sources_hold_the_unit_and_are_on_the_target_s_node_where_they_can(
    held: Holders, needed: Holders, ranks_per_node: int
) -> None:
    for transfer in plan_transfers(held, needed, ranks_per_node=ranks_per_node):
        holders = held[transfer.unit]
        node = transfer.target // ranks_per_node
        neighbours = {rank for rank in holders if rank // ranks_per_node == node}
        assert transfer.source in (neighbours or holders)


@given(held=HOLDERS, needed=HOLDERS, ranks_per_node=RANKS_PER_NODE)
def test_all_ranks_plan_alike(held: Holders, needed: Holders, ranks_per_node: int) -> None:
    def shuffled(holders: Holders) -> Holders:
        return {unit: frozenset(sorted(ranks, reverse=True)) for unit, ranks in reversed(holders.items())}

    assert plan_transfers(held, needed, ranks_per_node=ranks_per_node) == plan_transfers(
        shuffled(held), shuffled(needed), ranks_per_node=ranks_per_node
    )


@pytest.mark.parametrize(
    ("held", "needed", "ranks_per_node", "expected"),
    [
        ({0: {0}}, {0: {0, 1}}, 2, [(0, 0, 1)]),
        ({0: {0, 1}}, {0: {0}}, 2, []),
        ({}, {0: {0, 1}}, 2, []),  # nobody has it
        ({0: {0, 1}}, {0: {2, 3}}, 4, [(0, 1, 2), (0, 0, 3)]),  # the nearer one first, then the one that sent less
        ({0: {0, 2}}, {0: {1, 3}}, 2, [(0, 0, 1), (0, 2, 3)]),  # within each node
        ({0: {0}, 1: {1}}, {0: {1}, 1: {0}}, 1, [(0, 0, 1), (1, 1, 0)]),
    ],
)
def test_transfers_by_hand(
    held: dict[int, set[int]], needed: dict[int, set[int]], ranks_per_node: int, expected: list[tuple[int, int, int]]
) -> None:
    transfers = plan_transfers(
        {unit: frozenset(ranks) for unit, ranks in held.items()},
        {unit: frozenset(ranks) for unit, ranks in needed.items()},
        ranks_per_node=ranks_per_node,
    )
    assert list(transfers) == [Transfer(*each) for each in expected]


# Moved for real

UNITS = range(4)
STAGES_OF_4 = {unit: frozenset({unit}) for unit in UNITS}
STAGES_OF_2 = {unit: frozenset({unit // 2, unit // 2 + 2}) for unit in UNITS}
EVERYWHERE = dict.fromkeys(UNITS, frozenset(range(4)))


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
    transfers = plan_transfers(held, needed, ranks_per_node=world.local_size)
    num_bytes = execute_transfers(transfers, rank=world.rank, tensors=lambda unit: mine[unit])
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
        (STAGES_OF_4, {unit: frozenset({3 - unit}) for unit in UNITS}),
    ],
)
def test_four_ranks_receive_what_they_lack_and_no_byte_more(ranks: RankPool, held: Holders, needed: Holders) -> None:
    for rank, (arrived, num_bytes) in enumerate(ranks.run(4, moves, held, needed)):
        lacking = [unit for unit in UNITS if rank in needed[unit] - held[unit]]
        assert arrived
        assert num_bytes == sum(tensor.nbytes for unit in lacking for tensor in unit_tensors(unit))
