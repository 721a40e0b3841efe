"""The exact min-max partition of a chain into contiguous stages: pure functions of integers.

Dynamic programme over (stage, first unit): the best that units[i:] can do is the minimum over the first stage's end of
max(cost of that stage, best of the rest). A second one, over the cuts whose stages all keep to that optimum, makes the
fastest stage as slow as it can be. A walk from the front then takes the earliest cuts that reach both. O(K n^2), exact,
never an empty stage. A graph is cut alike, along a topological order of its nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cache
from itertools import accumulate, pairwise

import numpy as np

__all__ = ["balance_bound", "bottleneck", "partition", "smallest_limit", "stage_costs"]

_NEVER = np.int64(2**62)
Matrix = np.ndarray


def partition(
    costs: Sequence[int],
    *,
    num_stages: int,
    crossing: Sequence[int] | None = None,
    memory: Sequence[Sequence[int]] | None = None,
    largest: Sequence[Sequence[int]] | None = None,
    received: Sequence[Sequence[int]] | None = None,
    memory_limit: int | None = None,
) -> tuple[int, ...] | None:
    """Cuts ``costs`` into ``num_stages`` contiguous non-empty stages so that the slowest is fastest.

    Args:
        costs: cost of each unit, integer nanoseconds.
        crossing: cost of sending what leaves unit i (added to the stage that ends with it and to the one that starts
            after it); zeros if not given. The last entry is never used.
        memory: bytes that each unit takes on each stage, [num_stages][units]; earlier stages of 1F1B keep more
            micro-batches alive. Beside these, alike: largest, of the unit alone that has most; received, of the first.
        memory_limit: bytes that a stage may take; no limit if not given.

    Returns:
        The first unit of stages 1..num_stages-1; None if no cut fits. Of equally good ones, that whose fastest stage is
        slowest, and of these the smallest tuple.
    """
    n = len(costs)
    assert num_stages >= 1
    if num_stages > n:
        return None
    cost = _stage_matrix(costs, crossing)
    allowed = _memory_masks(memory, largest, received, memory_limit, num_stages=num_stages, num_units=n)
    # slowest[stage][start]: the least that the slowest stage costs where units[start:] go to the stages from this on.
    slowest = [np.full(n + 1, _NEVER) for _ in range(num_stages)]
    last = num_stages - 1
    slowest[last][:n] = np.where(allowed[last][:n, n], cost[:n, n], _NEVER)
    for stage in reversed(range(last)):
        here = np.where(allowed[stage], np.maximum(cost, slowest[stage + 1]), _NEVER)
        slowest[stage] = here.min(axis=1)
    best = slowest[0][0]
    if best >= _NEVER:
        return None
    fits = [mask & (cost <= best) for mask in allowed]
    fastest = _fastest(cost, fits)
    most = fastest[0][0]
    boundaries: list[int] = []
    start = 0
    for stage in range(last):
        reaches = fits[stage][start] & (np.minimum(cost[start], fastest[stage + 1]) >= most)
        start = int(reaches.argmax())
        boundaries.append(start)
    return tuple(boundaries)


def _fastest(cost: Matrix, fits: Sequence[Matrix]) -> list[np.ndarray]:
    """[stage][start]: the most that the fastest stage costs where units[start:] go to the stages from this on, each of
    which ``fits``; -1: none do."""
    n, last = len(cost) - 1, len(fits) - 1
    fastest = [np.full(n + 1, -1, dtype=np.int64) for _ in fits]
    fastest[last][:n] = np.where(fits[last][:n, n], cost[:n, n], -1)
    for stage in reversed(range(last)):
        here = np.where(fits[stage], np.minimum(cost, fastest[stage + 1]), -1)
        fastest[stage] = here.max(axis=1)
    return fastest


def stage_costs(
    costs: Sequence[int], boundaries: Sequence[int], *, crossing: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Cost of every stage of a partition, communication included."""
    cost = _stage_matrix(costs, crossing)
    return tuple(int(cost[start, stop]) for start, stop in pairwise((0, *boundaries, len(costs))))


def bottleneck(costs: Sequence[int], boundaries: Sequence[int], *, crossing: Sequence[int] | None = None) -> int:
    """Cost of the slowest stage of a partition."""
    return max(stage_costs(costs, boundaries, crossing=crossing))


def balance_bound(costs: Sequence[int], *, num_stages: int) -> Fraction:
    """The best balance, fastest over slowest stage, of any contiguous partition; communication costs nothing.

    Branch and bound over what the slowest stage may cost: where that is between ``low`` and ``high``, the balance is at
    most that of the fastest stage under ``high`` to ``low``.
    """
    n = len(costs)
    assert 1 <= num_stages <= n
    if not any(costs):
        return Fraction(1)
    cost = _stage_matrix(costs, None)
    after = np.arange(n + 1)[None, :] > np.arange(n + 1)[:, None]
    slowest = np.unique(cost[after & (cost > 0)])

    @cache
    def fastest(index: int) -> int:
        return int(_fastest(cost, [after & (cost <= slowest[index])] * num_stages)[0][0])

    best, ranges = Fraction(0), [(0, len(slowest) - 1)]
    while ranges:
        low, high = ranges.pop()
        best = max(best, Fraction(fastest(high), int(slowest[high])))
        if low < high and fastest(high) > best * int(slowest[low]):
            middle = (low + high) // 2
            ranges += [(middle + 1, high), (low, middle)]
    return best


def smallest_limit(fits: Callable[[int], bool], *, refused: int) -> int:
    """The smallest memory limit that ``fits``, which ``refused`` does not; some larger one must."""
    too_small, enough = refused, 2 * refused
    while not fits(enough):
        too_small, enough = enough, 2 * enough
    while enough - too_small > 1:
        middle = (too_small + enough) // 2
        too_small, enough = (too_small, middle) if fits(middle) else (middle, enough)
    return enough


def _stage_matrix(costs: Sequence[int], crossing: Sequence[int] | None) -> Matrix:
    """[start, stop]: cost of a stage of units start .. stop - 1, int64."""
    total = np.array([0, *accumulate(costs)], dtype=np.int64)
    sent = np.array([0, *(crossing[:-1] if crossing else [0] * (len(costs) - 1)), 0], dtype=np.int64)
    return (total + sent)[None, :] - (total - sent)[:, None]


def _memory_masks(
    memory: Sequence[Sequence[int]] | None,
    largest: Sequence[Sequence[int]] | None,
    received: Sequence[Sequence[int]] | None,
    limit: int | None,
    *,
    num_stages: int,
    num_units: int,
) -> list[Matrix]:
    """By stage [start, stop]: whether such a stage is not empty and fits."""
    after = np.arange(num_units + 1)[None, :] > np.arange(num_units + 1)[:, None]
    if memory is None or limit is None:
        return [after] * num_stages
    nothing = [[0] * num_units] * num_stages
    masks = []
    for row, most, first in zip(memory, largest or nothing, received or nothing):
        total = np.array([0, *accumulate(row)], dtype=np.int64)
        single = np.zeros((num_units + 1, num_units + 1), dtype=np.int64)  # [start, stop]: maximum of most[start:stop]
        single[:, 1:] = np.maximum.accumulate(np.where(after[:, 1:], np.array(most)[None, :], 0), axis=1)
        entering = np.array([*first, 0], dtype=np.int64)[:, None]
        masks.append(after & (total[None, :] - total[:, None] + single + entering <= limit))
    return masks
