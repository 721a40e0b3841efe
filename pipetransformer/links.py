"""What messages between ranks cost, measured by sending them."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist

from pipetransformer.distributed import World, synchronize

__all__ = ["median_seconds", "reduction_seconds", "send_seconds"]

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
    """Collective. (seconds of latency, seconds a byte) between ranks 2k and 2k + 1, by real sends there and back."""
    peer = world.rank ^ 1
    if peer >= world.size:
        return 0.0, 0.0

    def exchange(num_bytes: int) -> Callable[[], None]:
        buffer = torch.zeros(num_bytes, dtype=torch.uint8, device=world.device)

        def there_and_back() -> None:
            for sender in (0, 1):
                (dist.send if world.rank % 2 == sender else dist.recv)(buffer, peer)
            synchronize(world.device)

        return there_and_back

    latency, per_byte = _link(exchange)
    return latency / 2, per_byte / 2


def _link(action: Callable[[int], Callable[[], None]]) -> tuple[float, float]:
    """(seconds of latency, seconds a byte) of what ``action`` makes for a number of bytes."""
    latency = median_seconds(action(8))
    return latency, max(0.0, median_seconds(action(_LINK_BYTES)) - latency) / _LINK_BYTES
