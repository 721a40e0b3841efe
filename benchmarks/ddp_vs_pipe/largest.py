"""The largest batch that fits, found as one would by hand: doubled until it does not fit, then bisected."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["largest_batch"]


def largest_batch(fits: Callable[[int], bool], *, step: int, most: int) -> tuple[int, int | None]:
    """The largest multiple of ``step`` up to ``most`` that fits, and the smallest that was tried and does not.

    No batch is tried twice. ``fits`` is taken to be true up to some batch and false beyond it.

    Returns (0, step) where nothing fits, and (that batch, None) where everything up to ``most`` does.
    """
    assert 0 < step <= most, (step, most)
    good, size, limit = 0, 1, most // step  # in steps
    while fits(size * step):
        good = size
        if size == limit:
            return good * step, None
        size = min(2 * size, limit)
    bad = size
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle * step) else (good, middle)
    return good * step, bad * step
