"""The policy that starts with what a linear probe shows to be free, and goes on as far as the guard lets it."""

from __future__ import annotations

from pipetransformer.config.types import Section
from pipetransformer.freeze.guard import TENTATIVE_INTERVALS
from pipetransformer.freeze.policy import Policy, Signals
from pipetransformer.freeze.probe import STAGES, free_blocks

_LEAST_RETURN = 1.05  # seconds saved for a second spent


class GuardedPolicy(Policy):
    """Freezes from the first step on as large a share of the blocks as they compute of the task (``free_blocks``), a
    sixth at least; of a model that is not pre-trained nothing. Then a sixth more at a time, where that is predicted to
    save more seconds over the rest of the run than it costs, and time is left for the guard to judge it. A sixth of the
    blocks always trains.
    """

    class Options(Section):
        pass

    options: Options
    needs_probe = True

    def decide(self, signals: Signals) -> int:
        stage = -(-self.num_blocks // STAGES)
        most = self.num_blocks - stage
        if signals.interval == 0:
            free = 0 if signals.scores is None else free_blocks(signals.scores)
            return min(max(free, stage), most) if signals.is_pretrained else 0
        wanted = signals.frozen + stage
        if wanted > most or signals.remaining_intervals <= TENTATIVE_INTERVALS or signals.payoff is None:
            return signals.frozen
        payoff = signals.payoff(wanted)
        return wanted if payoff.saved > _LEAST_RETURN * payoff.spent else signals.frozen
