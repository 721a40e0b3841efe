"""Which bytes move in a transition, and their move: the fewest that are possible, each from a nearest holder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

__all__ = ["Transfer", "execute_transfers", "plan_transfers"]


@dataclass(frozen=True, slots=True)
class Transfer:
    """Unit ``unit`` goes from rank ``source`` to rank ``target``."""

    unit: int
    source: int
    target: int


def plan_transfers(
    held: Mapping[int, frozenset[int]], needed: Mapping[int, frozenset[int]], *, ranks_per_node: int
) -> tuple[Transfer, ...]:
    """Every needed unit that a rank lacks arrives exactly once.

    Args:
        held, needed: ranks by unit, before and after. A unit that nobody holds is nobody's to send (no optimizer state
            exists yet) and is left out.

    Returns:
        Transfers in a fixed order. The source is on the target's node where possible, then the one that has sent least,
        then the nearest by number.
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
    """Moves the units' tensors in one batch of point-to-point operations.

    Args:
        tensors: the tensors of a unit on this rank, in the same order everywhere; a target's are filled in place.

    Returns:
        Bytes that this rank received.
    """
    operations: list[dist.P2POp] = []
    received = 0
    for transfer in transfers:
        if rank == transfer.source:
            for tensor in tensors(transfer.unit):
                assert tensor.is_contiguous()
                operations.append(dist.P2POp(dist.isend, tensor, transfer.target))
        elif rank == transfer.target:
            for tensor in tensors(transfer.unit):
                assert tensor.is_contiguous()
                operations.append(dist.P2POp(dist.irecv, tensor, transfer.source))
                received += tensor.numel() * tensor.element_size()
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()
    return received
