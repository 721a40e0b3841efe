"""The costs of messages between ranks, measured with real messages."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist

from pipetransformer.process.device import synchronize
from pipetransformer.process.world import World

_LINK_BYTES = 2**22


def median_seconds(action: Callable[[], object], *, repeats: int = 5) -> float:
    """Median duration of ``action`` in seconds, over ``repeats`` calls after a warm-up call."""
    times = []
    for _ in range(repeats + 1):
        start = perf_counter()
        action()
        times.append(perf_counter() - start)
    return median(times[1:])


def reduction_seconds(world: World) -> tuple[float, float]:
    """Collective. Seconds of latency and seconds per byte of a sum over all ranks; zeros for a single rank."""
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
    """Collective. Seconds of latency and seconds per byte between ranks 2k and 2k + 1 of a node, all pairs at once.

    Both are zero on a rank without a partner. On nodes of one rank no rank has a partner.
    """
    peer = world.local_rank ^ 1
    return _exchange_seconds(world, peer=world.rank - world.local_rank + peer if peer < world.local_size else None)


def between_seconds(world: World) -> tuple[float, float]:
    """Collective. Seconds of latency and seconds per byte between nodes 2k and 2k + 1.

    The first ranks of both nodes send, so that no other rank uses the link. Both figures are zero on all other ranks.
    """
    node = world.rank // world.local_size ^ 1
    is_chosen = world.local_rank == 0 and node < world.num_nodes
    return _exchange_seconds(world, peer=node * world.local_size if is_chosen else None)


def _exchange_seconds(world: World, *, peer: int | None) -> tuple[float, float]:
    """Collective. Times sends to ``peer`` and back, while no rank does anything else; zeros without a peer."""
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
    """Seconds of latency and seconds per byte of a message. ``action(n)`` gives a function that sends n bytes."""
    latency = median_seconds(action(8))
    return latency, max(0.0, median_seconds(action(_LINK_BYTES)) - latency) / _LINK_BYTES
