"""The transfers of a transition: the fewest possible bytes, each from a nearest holder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor


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


def plan_transfers(
    held: Mapping[int, frozenset[int]], needed: Mapping[int, frozenset[int]], *, ranks_per_node: int
) -> tuple[Transfer, ...]:
    """Plans one transfer for each unit that a rank needs and does not hold.

    A unit without a holder is left out: it has no optimizer state yet.

    Args:
        held: holders of each unit before the transition.
        needed: holders of each unit after it.
        ranks_per_node: ranks of each node, which have consecutive numbers.

    Returns:
        Transfers in a fixed order. Each source is chosen by three rules, in this order: on the target's node, with the
        fewest sends so far, nearest by number.
    """
    sent: Counter[int] = Counter()
    transfers: list[Transfer] = []
    for unit in sorted(needed):
        holders = held.get(unit, frozenset())
        if not holders:
            continue
        for target in sorted(needed[unit] - holders):
            node = target // ranks_per_node
            *_, source = min((s // ranks_per_node != node, sent[s], abs(s - target), s) for s in holders)
            sent[source] += 1
            transfers.append(Transfer(unit=unit, source=source, target=target))
    return tuple(transfers)


def execute_transfers(
    transfers: Sequence[Transfer],
    *,
    rank: int,
    tensors: Callable[[int], Iterable[Tensor]],
) -> int:
    """Moves the tensors of all transfers in one batch of point-to-point operations.

    Args:
        transfers: the transfers of all ranks, in the same order on every rank.
        rank: this rank.
        tensors: gives the contiguous tensors of a unit on this rank, in the same order on every rank. Those of a target
            are filled in place.

    Returns:
        Bytes that this rank received.
    """
    operations: list[dist.P2POp] = []
    received = 0
    for transfer in transfers:
        if rank not in (transfer.source, transfer.target):
            continue
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
