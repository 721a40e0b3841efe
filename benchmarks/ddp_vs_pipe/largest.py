"""The largest batch that fits, found along the line that memory follows: nearly straight in the batch."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["largest_batch"]

_MOST_GROWTH = 4  # one try is no more than so many times what fits
_TRIES_BY_LINE = 8  # then halves, as where memory runs out without a figure: the line misleads


def largest_batch(peak: Callable[[int], int | None], *, limit: int, step: int, most: int) -> tuple[int, int | None]:
    """The largest multiple of ``step`` up to ``most`` that fits, and the smallest that was tried and does not.

    Args:
        peak: bytes that a batch takes, or None where it ran out of memory; taken to grow with the batch.
        limit: bytes beyond which a batch does not fit. No batch is tried twice.

    Returns (0, step) where nothing fits, and (that batch, None) where everything up to ``most`` does.
    """
    assert 0 < step <= most, (step, most)
    good, bad, last, size = 0, None, most // step, 1  # in steps
    known: list[tuple[int, int]] = []
    tells = True
    for number in range(last):
        found = peak(size * step)
        if found is None:
            bad, tells = size, False
        else:
            known.append((size, found))
            good, bad = (size, bad) if found <= limit else (good, size)
        if good == last or bad == good + 1:
            break
        highest = bad - 1 if bad is not None else min(_MOST_GROWTH * good, last)
        guess = _on_line(known, limit) if tells and number < _TRIES_BY_LINE else None
        size = min(max(guess or (good + highest + 1) // 2, good + 1), highest)
    return good * step, None if bad is None else bad * step


def _on_line(known: list[tuple[int, int]], limit: int) -> int | None:
    """The last size below ``limit`` on the line through the last two points; None without such a line."""
    if len(known) < 2:
        return None
    (size, low), (other, high) = sorted(known[-2:])
    return size + (limit - low) * (other - size) // (high - low) if high > low else None
