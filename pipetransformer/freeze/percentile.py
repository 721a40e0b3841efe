"""The policy of AutoFreeze's paper."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pipetransformer.config.types import Percent, Section
from pipetransformer.freeze.policy import Policy, Signals


class PercentilePolicy(Policy):
    """Freezes the blocks in front of the first active one that still changes: AutoFreeze, arXiv 2102.01386, section 4.

    A block changes by |norm - norm before| / norm before. It still changes where that is at or above the
    ``percentile``-th percentile (linear interpolation) of all active blocks' changes, so that never all freeze at once.
    """

    class Options(Section):
        percentile: Percent

    options: Options
    needs_norms = True
    fewest_norms = 2

    def decide(self, signals: Signals) -> int:
        frozen, norms, before = signals.frozen, signals.norms, signals.before
        if norms is None or before is None or frozen == self.num_blocks:
            return frozen
        changes = [
            abs(now - then) / then if then > 0 else math.inf for now, then in zip(norms[frozen:], before[frozen:])
        ]
        threshold = _percentile(changes, self.options.percentile)
        return frozen + next(index for index, change in enumerate(changes) if change >= threshold)


def _percentile(values: Sequence[float], percent: float) -> float:
    """The ``percent``-th percentile of ``values``, linearly between neighbours."""
    ordered = sorted(values)
    position = percent / 100 * (len(ordered) - 1)
    low, high = ordered[math.floor(position)], ordered[math.ceil(position)]
    return low if low == high else low + (high - low) * (position - math.floor(position))
