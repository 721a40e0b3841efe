"""What is known of a freeze policy's decisions before training."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Freezing:
    """What a freeze policy will do, as far as it is known before training.

    Attributes:
        never: whether it takes too few decisions to freeze anything.
        schedule: (step, frozen blocks) of each change; None where it is not known.
        is_watched: whether the guard may decide otherwise.
        lacks_guard: whether the configuration wants a guard, and the run has none.
        early: number of blocks that froze for the end of a shorter run, of which this one is the continuation; else 0.
        rests: whether nothing more will freeze, by what the probe has shown.
    """

    never: bool = False
    schedule: tuple[tuple[int, int], ...] | None = None
    is_watched: bool = False
    lacks_guard: bool = False
    early: int = 0
    rests: bool = False
