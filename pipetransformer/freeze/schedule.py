"""A schedule that looks at nothing but the number of intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from pipetransformer.config.types import OpenShare, Section
from pipetransformer.freeze.policy import ceiling


@dataclass(frozen=True, slots=True)
class SchedulePolicy:
    """n(T) = ceil(L (1 - (1 - alpha)^T)): what the code of PipeTransformer (arXiv 2102.03161) runs."""

    class Options(Section):
        alpha: OpenShare

    num_blocks: int
    options: Options
    needs_norms: ClassVar[bool] = False
    may_unfreeze: ClassVar[bool] = False

    def decide(
        self, interval: int, *, frozen: int, norms: Sequence[float] | None, before: Sequence[float] | None = None
    ) -> int:
        return scheduled(interval, num_blocks=self.num_blocks, alpha=self.options.alpha)


def scheduled(interval: int, *, num_blocks: int, alpha: float) -> int:
    """n after ``interval`` intervals; ``alpha`` 0 freezes nothing."""
    return ceiling(num_blocks * (1.0 - (1.0 - alpha) ** interval))
