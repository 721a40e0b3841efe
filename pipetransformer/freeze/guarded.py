"""The policy that starts with what a linear probe shows to be free, and goes on as far as the guard lets it."""

from __future__ import annotations

from pipetransformer.config.types import Section
from pipetransformer.freeze.policy import Policy, Signals
from pipetransformer.freeze.probe import STAGES, blocks_at_start, free_blocks

_LEAST_RETURN = 1.05  # seconds saved for a second spent


class GuardedPolicy(Policy):
    """Freezes from the first step on as many blocks as are free (``blocks_at_start``). Then a sixth more at a time,
    where the guard will judge it, where that is predicted to save more seconds over the rest of the run than it costs,
    and unless the probe shows that the blocks hold nothing of the task. A sixth of the blocks always trains.
    """

    class Options(Section):
        pass

    options: Options
    needs_probe = True

    def decide(self, signals: Signals) -> int:
        frozen, sixth = signals.frozen, -(-self.num_blocks // STAGES)
        first = blocks_at_start(signals.scores, num_blocks=self.num_blocks, is_pretrained=signals.is_pretrained)
        if signals.interval == 0 or frozen < first:
            return max(frozen, first)
        wanted = frozen + sixth
        if wanted > self.num_blocks - sixth or signals.payoff is None or not signals.is_watched:
            return frozen
        if signals.scores is not None and not free_blocks(signals.scores):
            return frozen
        payoff = signals.payoff(wanted)
        return wanted if payoff.saved > _LEAST_RETURN * payoff.spent else frozen
