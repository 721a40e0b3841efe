"""The exact min-max partition of a chain into contiguous stages: pure functions of integers.

A first dynamic programme runs over (stage, first unit). The best cut of units[i:] minimises, over the end of its first
stage, max(cost of this stage, best of the rest). A second one runs over the cuts that reach this optimum, and makes the
fastest stage as slow as possible. A walk from the front then takes the earliest boundaries that reach both. The result
is exact, found in O(K n^2) for K stages of n units, and no stage is empty. A graph is cut in the same way, along a
topological order of its nodes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cache
from itertools import accumulate, pairwise

import numpy as np

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
    """Cuts a chain into ``num_stages`` contiguous, non-empty stages, so that the slowest stage is as fast as possible.

    Args:
        costs: nanoseconds of each unit [units].
        crossing: nanoseconds of the message from each unit to the next [units], added to the stages on both sides of a
            cut; zeros if not given. The last entry is never used.
        memory: bytes of each unit on each stage [num_stages][units], summed over a stage. They depend on the stage:
            earlier stages of 1F1B keep more micro-batches.
        largest: further bytes [num_stages][units], which count only for the unit of a stage that has most of them.
        received: further bytes [num_stages][units], which count only for the first unit of a stage.
        memory_limit: bytes that a stage may take; no limit if not given.

    Returns:
        The first units of stages 1 .. num_stages - 1; None if no cut fits. Among equally good cuts, the one with the
        slowest fastest stage; among these, the smallest tuple.
    """
    n = len(costs)
    assert num_stages >= 1
    if num_stages > n:
        return None
    cost = _stage_matrix(costs, crossing)
    allowed = _memory_masks(memory, largest, received, memory_limit, num_stages=num_stages, num_units=n)
    best = _from_behind(cost, allowed, join=np.maximum, choose=np.min, never=_NEVER)[0][0]
    if best >= _NEVER:
        return None
    fits = [mask & (cost <= best) for mask in allowed]
    fastest = _fastest(cost, fits)
    most = fastest[0][0]
    boundaries: list[int] = []
    start = 0
    for stage in range(num_stages - 1):
        reaches = fits[stage][start] & (np.minimum(cost[start], fastest[stage + 1]) >= most)
        start = int(reaches.argmax())
        boundaries.append(start)
    return tuple(boundaries)


def _fastest(cost: Matrix, fits: Sequence[Matrix]) -> list[np.ndarray]:
    """[stage][start]: the highest cost of the fastest stage, if ``stage`` and those behind it hold units[start:].

    Only stages that ``fits`` allows count; -1 where there is no such cut.
    """
    return _from_behind(cost, fits, join=np.minimum, choose=np.max, never=np.int64(-1))


def _from_behind(
    cost: Matrix,
    allowed: Sequence[Matrix],
    *,
    join: Callable[..., np.ndarray],
    choose: Callable[..., np.ndarray],
    never: np.int64,
) -> list[np.ndarray]:
    """[stage][start]: the chosen one of all cuts of units[start:] into ``stage`` and those behind it.

    Args:
        join: gives the figure of a cut from the cost of its first stage and the figure of the rest.
        choose: gives the chosen figure along an axis.
        never: the figure where there is no cut.
    """
    n, last = len(cost) - 1, len(allowed) - 1
    chosen = [np.full(n + 1, never) for _ in allowed]
    chosen[last][:n] = np.where(allowed[last][:n, n], cost[:n, n], never)
    for stage in reversed(range(last)):
        chosen[stage] = choose(np.where(allowed[stage], join(cost, chosen[stage + 1]), never), axis=1)
    return chosen


def stage_costs(
    costs: Sequence[int], boundaries: Sequence[int], *, crossing: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Nanoseconds of every stage of a partition [num_stages], messages included."""
    cost = _stage_matrix(costs, crossing)
    return tuple(int(cost[start, stop]) for start, stop in pairwise((0, *boundaries, len(costs))))


def balance_bound(costs: Sequence[int], *, num_stages: int) -> Fraction:
    """The best balance of any contiguous partition: cost of the fastest stage divided by that of the slowest.

    Messages cost nothing here. The search is branch and bound over the cost of the slowest stage. If this cost is
    between ``low`` and ``high``, the balance is at most: the highest cost of the fastest stage with no stage above
    ``high``, divided by ``low``.
    """
    n = len(costs)
    assert 1 <= num_stages <= n
    if not any(costs):
        return Fraction(1)
    cost = _stage_matrix(costs, None)
    after = ~np.tri(n + 1, dtype=bool)
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
    """The smallest memory limit for which ``fits`` is true.

    Args:
        fits: false below some limit and true from there on.
        refused: a limit for which it is false.
    """
    too_small, enough = refused, 2 * refused
    while not fits(enough):
        too_small, enough = enough, 2 * enough
    return bisect_left(range(enough), True, lo=too_small + 1, key=fits)


def _stage_matrix(costs: Sequence[int], crossing: Sequence[int] | None) -> Matrix:
    """Matrix [start, stop]: cost of a stage of units start .. stop - 1, messages included, int64."""
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
    """One matrix [start, stop] per stage: whether a stage of units start .. stop - 1 is not empty and fits."""
    after = ~np.tri(num_units + 1, dtype=bool)
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
