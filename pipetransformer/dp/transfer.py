"""The transfers of a transition: the fewest possible bytes, each from a holder on the same node where there is one.

The ranks that hold or need a unit are a ``range``, as those of a stage are (``ParallelPlan.ranks_by_unit``). So a rank
finds its own transfers without those of the others, in a time that does not grow with ranks x units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

Holders = Mapping[int, range]
"""The ranks of each unit, by unit; a unit without any may be missing."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """The move of one unit.

    Attributes:
        unit: the unit.
        source: the rank that sends it.
        target: the rank that receives it.
    """

    unit: int
    source: int
    target: int


def transfers_of(rank: int, held: Holders, needed: Holders, *, ranks_per_node: int) -> tuple[Transfer, ...]:
    """The transfers that ``rank`` takes part in: one for each unit that a rank needs and does not hold.

    A source is on its target's node where a holder is; the sources there take turns, and so do all holders for the
    targets of nodes without one. A unit without a holder is left out: it has no optimizer state yet.

    Args:
        held: holders of each unit before the transition.
        needed: holders of each unit after it.
        ranks_per_node: ranks of each node, which have consecutive numbers.

    Returns:
        Transfers by unit, so that the two ranks of each have them in the same order.
    """
    found: list[Transfer] = []
    for unit in sorted(needed):
        holders, targets = held.get(unit, range(0)), needed[unit]
        if rank in holders:
            served = _targets_of(rank, unit, holders, targets, ranks_per_node)
            found += (Transfer(unit, rank, target) for target in served if target not in holders)
        elif holders and rank in targets:
            found.append(Transfer(unit, _source_of(rank, unit, holders, targets, ranks_per_node), rank))
    return tuple(found)


def _source_of(target: int, unit: int, holders: range, targets: range, ranks_per_node: int) -> int:
    node = target // ranks_per_node
    near = _on_node(node, holders, ranks_per_node)
    sources, turns = (near, _on_node(node, targets, ranks_per_node)) if near else (holders, targets)
    return sources[(turns.index(target) + unit) % len(sources)]  # another unit begins with another source


def _targets_of(source: int, unit: int, holders: range, targets: range, ranks_per_node: int) -> Iterator[int]:
    """Those whose ``_source_of`` is ``source``."""
    node = source // ranks_per_node
    near = _on_node(node, holders, ranks_per_node)
    yield from _on_node(node, targets, ranks_per_node)[(near.index(source) - unit) % len(near) :: len(near)]
    for target in targets[(holders.index(source) - unit) % len(holders) :: len(holders)]:
        if not _on_node(target // ranks_per_node, holders, ranks_per_node):
            yield target


def _on_node(node: int, ranks: range, ranks_per_node: int) -> range:
    """Those of ``ranks`` that are on a node."""
    before = max(0, -(-(node * ranks_per_node - ranks.start) // ranks.step))  # as many are on the nodes before it
    return range(ranks[before:].start, min(ranks.stop, (node + 1) * ranks_per_node), ranks.step)


def execute_transfers(
    transfers: Sequence[Transfer],
    *,
    rank: int,
    tensors: Callable[[int], Iterable[Tensor]],
) -> int:
    """Moves the tensors of all transfers in one batch of point-to-point operations.

    Args:
        transfers: the transfers of this rank, in an order that both of its ends have.
        rank: this rank.
        tensors: gives the contiguous tensors of a unit on this rank, in the same order on every rank. Those of a target
            are filled in place.

    Returns:
        Bytes that this rank received.
    """
    operations: list[dist.P2POp] = []
    received = 0
    for transfer in transfers:
        sends = rank == transfer.source
        for tensor in tensors(transfer.unit):
            assert tensor.is_contiguous()
            peer = transfer.target if sends else transfer.source
            operations.append(dist.P2POp(dist.isend if sends else dist.irecv, tensor, peer))
            received += 0 if sends else tensor.nbytes
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()
    return received
