"""The policy of PipeTransformer's paper."""

from __future__ import annotations

from pipetransformer.config.types import OpenShare, Section
from pipetransformer.freeze.policy import Policy, Signals, ceiling


class PaperPolicy(Policy):
    """n_T = min(ceil(n_{T-1} + alpha (L - n_{T-1})), argmin over l >= n_{T-1} of ||g_l||): arXiv 2102.03161, eq. 2.

    Blocks count from 0, so l = n_{T-1} is the first active block, and the blocks in front of the one with the smallest
    gradient are frozen. The cap is rounded up, as the schedule is: rounded down, it would stall before L.
    """

    class Options(Section):
        alpha: OpenShare

    options: Options
    needs_norms = True
    first_interval = 1

    def decide(self, signals: Signals) -> int:
        frozen, norms = signals.frozen, signals.norms
        # Note: a run that goes on with this policy, and had another, has no norms yet.
        if signals.interval == 0 or frozen == self.num_blocks or norms is None:
            return frozen
        assert len(norms) == self.num_blocks
        cap = ceiling(frozen + self.options.alpha * (self.num_blocks - frozen))
        smallest = min(range(frozen, self.num_blocks), key=lambda block: (norms[block], block))
        return min(cap, smallest)
