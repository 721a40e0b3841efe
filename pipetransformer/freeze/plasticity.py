"""The policy of Egeria, by the change of what blocks compute."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipetransformer.config.types import OpenShare, Section
from pipetransformer.freeze.policy import Policy, Signals

_DROP = 0.1  # of the learning rate, after which what is frozen is looked at anew


class PlasticityPolicy(Policy):
    """Freezes the leading blocks that have settled: whose plasticity is below ``settled`` of the most that it was. All
    thaw once the learning rate has fallen to a tenth of what it was when they froze.

    After Egeria (Wang et al., arXiv 2201.06227). There a copy of the model is the reference; here it is the run itself,
    one decision ago, and no share of a slope but of the plasticity itself is the threshold.
    """

    class Options(Section):
        settled: OpenShare

    options: Options
    needs_plasticity = True
    may_unfreeze = True
    first_interval = 2

    def decide(self, signals: Signals) -> int:
        frozen = signals.frozen
        if frozen and signals.rate <= _DROP * signals.rate_frozen:
            return 0
        for now, most in list(zip(signals.plasticity or (), signals.most_plastic or ()))[frozen:]:
            if now is None or most is None or now >= self.options.settled * most:
                break
            frozen += 1
        return frozen


def plasticity(now: Sequence[Sequence[float]], before: Sequence[Sequence[float]]) -> list[float | None]:
    """The mean squared change of the samples' similarity behind each block [blocks]; None where there is nothing to
    compare.

    Args:
        now: similarity of every pair of samples behind each block [blocks, pairs], zeros where a block did not run.
        before: the same, some steps ago.
    """
    pairs = zip(np.asarray(now), np.asarray(before))
    return [float(np.mean((new - old) ** 2)) if new.any() and old.any() else None for new, old in pairs]
