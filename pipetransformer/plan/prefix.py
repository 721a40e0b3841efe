"""The work of the frozen prefix: the boundaries where a cache may hold it, and the forwards that each of them costs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PrefixWork:
    """Forwards of frozen units outside of training steps, for all samples of one padded length.

    Attributes:
        first: first unit of the forward.
        stop: the unit behind the last one of the forward.
        length: padded length of the samples.
        num_samples: number of samples of this length.
        times: number of forwards of each sample.
    """

    first: int
    stop: int
    length: int
    num_samples: int
    times: int = 1


def cached_choices(frozen: int, *, held: int | None) -> tuple[int | None, ...]:
    """Possible boundaries of the cache for n frozen blocks, in blocks: no cache (None), the present one, and n itself.

    None comes first, so that it wins among equally fast plans: it needs no cache.

    Args:
        held: the boundary of the activations that the cache holds now; None for an empty cache.
    """
    if frozen == 0:
        return (None,)
    return (None, frozen) if held is None or held >= frozen else (None, held, frozen)
