"""The frozen prefix as work: the boundaries that it may be read at, and the forwards that each of them costs."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PrefixWork", "cached_choices"]


@dataclass(frozen=True, slots=True)
class PrefixWork:
    """Forwards of frozen units, outside of training steps.

    Attributes:
        first: the first unit that runs.
        stop: the unit behind the last that runs.
        length: padded length of the samples.
        num_samples: samples of this length.
        times: how often all of them run.
    """

    first: int
    stop: int
    length: int
    num_samples: int
    times: int = 1


def cached_choices(frozen: int, *, held: int | None) -> tuple[int | None, ...]:
    """Boundaries that ``frozen`` blocks could be read at: none, the one that the cache holds, and n itself.

    None, where the prefix is computed, comes first: of equally fast plans it needs no cache.
    """
    if frozen == 0:
        return (None,)
    return (None, frozen) if held is None or held >= frozen else (None, held, frozen)
