"""The exact min-max partition of a chain into contiguous stages: pure functions of integers.

Dynamic programme over (stage, first unit): the best that units[i:] can do is the minimum over the first stage's end of
max(cost of that stage, best of the rest). A walk from the front then takes the earliest cuts that reach the optimum.
O(k n^2), exact, never an empty stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import inf

__all__ = ["bottleneck", "partition"]


def partition(
    costs: Sequence[int],
    *,
    num_stages: int,
    crossing: Sequence[int] | None = None,
    memory: Sequence[Sequence[int]] | None = None,
    memory_limit: int | None = None,
) -> tuple[int, ...] | None:
    """Cuts ``costs`` into ``num_stages`` contiguous non-empty stages so that the slowest is fastest.

    Args:
        costs: cost of each unit, integer nanoseconds.
        crossing: cost of sending what leaves unit i (added to the stage that ends with it and to the one that starts
            after it); zeros if not given. The last entry is never used.
        memory: bytes that each unit takes on each stage, [num_stages][units]; earlier stages of 1F1B keep more
            micro-batches alive. memory_limit: bytes that a stage may take; no limit if not given.

    Returns:
        The first unit of stages 1..num_stages-1, the smallest such tuple among equally good ones; None if no cut fits.
    """
    n = len(costs)
    assert num_stages >= 1
    crossing = crossing or [0] * n
    prefix_cost = [0, *accumulate(costs)]
    prefix_memory = [[0, *accumulate(row)] for row in memory or ()]

    def stage_cost(stage: int, start: int, stop: int) -> float:
        if memory_limit is not None and prefix_memory[stage][stop] - prefix_memory[stage][start] > memory_limit:
            return inf
        received = crossing[start - 1] if start > 0 else 0
        sent = crossing[stop - 1] if stop < n else 0
        return prefix_cost[stop] - prefix_cost[start] + received + sent

    # slowest[stage][start]: the least that the slowest stage costs where units[start:] go to the stages from this on.
    last = [stage_cost(num_stages - 1, start, n) for start in range(n)]
    slowest = [last]
    for stage in reversed(range(num_stages - 1)):
        rest = slowest[0]
        here = [
            min((max(stage_cost(stage, start, stop), rest[stop]) for stop in range(start + 1, n)), default=inf)
            for start in range(n)
        ]
        slowest.insert(0, here)
    best = slowest[0][0]
    if best == inf:
        return None
    boundaries: list[int] = []
    start = 0
    for stage, rest in enumerate(slowest[1:]):
        stops = range(start + 1, n)
        start = next(stop for stop in stops if max(stage_cost(stage, start, stop), rest[stop]) <= best)
        boundaries.append(start)
    return tuple(boundaries)


def bottleneck(costs: Sequence[int], boundaries: Sequence[int], *, crossing: Sequence[int] | None = None) -> int:
    """Cost of the slowest stage of a partition."""
    n = len(costs)
    crossing = crossing or [0] * n
    cuts = (0, *boundaries, n)
    return max(
        sum(costs[a:b]) + (crossing[a - 1] if a > 0 else 0) + (crossing[b - 1] if b < n else 0)
        for a, b in zip(cuts, cuts[1:])
    )
