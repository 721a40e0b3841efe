"""A schedule that thaws: most blocks are frozen at first, and fewer and fewer, from the top to the bottom."""

from __future__ import annotations

from pipetransformer.config.types import CountOrZero, Section
from pipetransformer.freeze.policy import Policy, Signals
from pipetransformer.freeze.probe import STAGES


class TopDownPolicy(Policy):
    """Gradual unfreezing (ULMFiT, arXiv 1801.06146, section 3.3), a sixth of the blocks at a decision.

    n(T) = max(0, ``max_frozen`` - T ceil(L / 6)); ``max_frozen`` null begins with all but a sixth.
    """

    class Options(Section):
        max_frozen: CountOrZero | None

    options: Options
    is_schedule = True
    may_unfreeze = True

    def decide(self, signals: Signals) -> int:
        sixth = -(-self.num_blocks // STAGES)
        first = self.num_blocks - sixth if self.options.max_frozen is None else self.options.max_frozen
        return max(0, first - signals.interval * sixth)
