"""What messages between ranks cost, measured by sending them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist

from pipetransformer.process.device import synchronize
from pipetransformer.process.world import World

__all__ = ["between_seconds", "median_seconds", "reduction_seconds", "send_seconds"]

_LINK_BYTES = 2**22


def median_seconds(action: Callable[[], object], *, repeats: int = 5) -> float:
    """Of ``action`` after a warm-up."""
    times = []
    for _ in range(repeats + 1):
        start = perf_counter()
        action()
        times.append(perf_counter() - start)
    return median(times[1:])


def reduction_seconds(world: World) -> tuple[float, float]:
    """Collective. (seconds of latency, seconds a byte) of a sum over all ranks."""
    if world.size == 1:
        return 0.0, 0.0

    def reduce(num_bytes: int) -> Callable[[], None]:
        buffer = torch.zeros(num_bytes // 4, device=world.device)

        def sum_up() -> None:
            dist.all_reduce(buffer)
            synchronize(world.device)

        return sum_up

    return _link(reduce)


def send_seconds(world: World) -> tuple[float, float]:
    """Collective. (seconds of latency, seconds a byte) between ranks 2k and 2k + 1 of a node, all such pairs at once.

    Zeros on a rank that has no partner: none has where nodes have one rank each.
    """
    peer = world.local_rank ^ 1
    return _exchange_seconds(world, peer=world.rank - world.local_rank + peer if peer < world.local_size else None)


def between_seconds(world: World) -> tuple[float, float]:
    """Collective. (seconds of latency, seconds a byte) between nodes 2k and 2k + 1: the first ranks of both, so that a
    node's link is theirs alone. Zeros on every other rank."""
    node = world.rank // world.local_size ^ 1
    is_chosen = world.local_rank == 0 and node < world.num_nodes
    return _exchange_seconds(world, peer=node * world.local_size if is_chosen else None)


def _exchange_seconds(world: World, *, peer: int | None) -> tuple[float, float]:
    """Collective. By real sends to ``peer`` and back; nobody does anything else meanwhile."""
    if world.size == 1:
        return 0.0, 0.0

    def exchange(num_bytes: int, peer: int) -> Callable[[], None]:
        buffer = torch.zeros(num_bytes, dtype=torch.uint8, device=world.device)

        def there_and_back() -> None:
            for is_sender in (True, False) if world.rank < peer else (False, True):
                (dist.send if is_sender else dist.recv)(buffer, peer)
            synchronize(world.device)

        return there_and_back

    dist.barrier()
    latency, per_byte = (0.0, 0.0) if peer is None else _link(partial(exchange, peer=peer))
    dist.barrier()
    return latency / 2, per_byte / 2


def _link(action: Callable[[int], Callable[[], None]]) -> tuple[float, float]:
    """(seconds of latency, seconds a byte) of what ``action`` makes for a number of bytes."""
    latency = median_seconds(action(8))
    return latency, max(0.0, median_seconds(action(_LINK_BYTES)) - latency) / _LINK_BYTES
