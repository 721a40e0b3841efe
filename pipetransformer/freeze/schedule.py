"""A schedule that looks at nothing but the number of intervals."""

from __future__ import annotations

from pipetransformer.config.types import OpenShare, Section
from pipetransformer.freeze.policy import Policy, Signals, ceiling


class SchedulePolicy(Policy):
    """n(T) = ceil(L (1 - (1 - alpha)^T)): what the code of PipeTransformer (arXiv 2102.03161) runs."""

    class Options(Section):
        alpha: OpenShare

    options: Options
    is_schedule = True
    first_interval = 1

    def decide(self, signals: Signals) -> int:
        return scheduled(signals.interval, num_blocks=self.num_blocks, alpha=self.options.alpha)


def scheduled(interval: int, *, num_blocks: int, alpha: float) -> int:
    """n after ``interval`` intervals; ``alpha`` 0 freezes nothing."""
    return ceiling(num_blocks * (1.0 - (1.0 - alpha) ** interval))
