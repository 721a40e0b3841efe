"""The costs of messages between ranks, measured with real messages."""

from __future__ import annotations

from collections.abc import Callable
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
    return _link(dist.all_reduce, world.device)


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

    is_first = peer is not None and world.rank < peer

    def there_and_back(buffer: torch.Tensor) -> None:
        for is_sender in (is_first, not is_first):
            (dist.send if is_sender else dist.recv)(buffer, peer)

    dist.barrier()
    latency, per_byte = (0.0, 0.0) if peer is None else _link(there_and_back, world.device)
    dist.barrier()
    return latency / 2, per_byte / 2


def _link(pass_on: Callable[[torch.Tensor], object], device: torch.device) -> tuple[float, float]:
    """Seconds of latency and seconds per byte of a message, which ``pass_on`` passes on to other ranks."""

    def seconds(num_bytes: int) -> float:
        buffer = torch.zeros(num_bytes // 4, device=device)

        def action() -> None:
            pass_on(buffer)
            synchronize(device)

        return median_seconds(action)

    latency = seconds(8)
    return latency, max(0.0, seconds(_LINK_BYTES) - latency) / _LINK_BYTES
