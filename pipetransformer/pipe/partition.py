"""The exact min-max partition of a chain into contiguous stages: pure functions of integers.

Dynamic programme over (stages left, first unit): the best cost of cutting units[i:] into k stages is the minimum over
the first stage's end of max(cost of that stage, best of the rest). O(k n^2), exact, never an empty stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

__all__ = ["bottleneck", "partition"]


def partition(
    costs: Sequence[int],
    *,
    num_stages: int,
    crossing: Sequence[int] | None = None,
    memory: Sequence[int] | None = None,
    memory_limits: Sequence[int] | None = None,
) -> tuple[int, ...] | None:
    """Cuts ``costs`` into ``num_stages`` contiguous non-empty stages so that the slowest is fastest.

    Args:
        costs: cost of each unit, integer nanoseconds.
        crossing: cost of sending what leaves unit i (added to the stage that ends with it and to the one that starts
            after it); zeros if not given. The last entry is never used.
        memory, memory_limits: bytes of each unit and the limit of each stage; no limit if not given.

    Returns:
        The first unit of stages 1..num_stages-1, the smallest such tuple among equally good ones; None if no cut fits.
    """
    n = len(costs)
    assert num_stages >= 1
    if num_stages > n:
        return None
    crossing = crossing or [0] * n
    prefix_cost = [0, *accumulate(costs)]
    prefix_memory = [0, *accumulate(memory)] if memory is not None else None

    def stage_cost(start: int, stop: int, stage: int) -> int | None:
        if prefix_memory is not None and memory_limits is not None:
            if prefix_memory[stop] - prefix_memory[start] > memory_limits[stage]:
                return None
        received = crossing[start - 1] if start > 0 else 0
        sent = crossing[stop - 1] if stop < n else 0
        return prefix_cost[stop] - prefix_cost[start] + received + sent

    # best[i] = (cost, boundaries) of cutting units[i:] into the stages from the current one on.
    best: list[tuple[int, tuple[int, ...]] | None] = []
    for start in range(n + 1):
        cost = stage_cost(start, n, num_stages - 1) if start < n else None
        best.append(None if cost is None else (cost, ()))
    for stage in range(num_stages - 2, -1, -1):
        better: list[tuple[int, tuple[int, ...]] | None] = []
        for start in range(n + 1):
            choice: tuple[int, tuple[int, ...]] | None = None
            for stop in range(start + 1, n):
                rest, own = best[stop], stage_cost(start, stop, stage)
                if rest is None or own is None:
                    continue
                candidate = (max(own, rest[0]), (stop, *rest[1]))
                if choice is None or candidate < choice:
                    choice = candidate
            better.append(choice)
        best = better
    return None if best[0] is None else best[0][1]


def bottleneck(
    costs: Sequence[int], boundaries: Sequence[int], *, crossing: Sequence[int] | None = None
) -> int:
    """Cost of the slowest stage of a partition."""
    n = len(costs)
    crossing = crossing or [0] * n
    cuts = (0, *boundaries, n)
    return max(
        sum(costs[a:b]) + (crossing[a - 1] if a > 0 else 0) + (crossing[b - 1] if b < n else 0)
        for a, b in zip(cuts, cuts[1:])
    )
