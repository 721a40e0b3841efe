"""The policy that starts with what a linear probe shows to be free, and freezes most once little is left to learn."""

from __future__ import annotations

from pipetransformer.config.types import Section
from pipetransformer.freeze.policy import Policy, Signals
from pipetransformer.freeze.probe import NOISE, STAGES, blocks_at_start, transfer

_LEAST_RETURN = 1.05  # seconds saved for a second spent
_LATE = 0.1  # of the sum of all learning rates


class GuardedPolicy(Policy):
    """Freezes from the first step on as many blocks as are free (``blocks_at_start``), and then a sixth more at a time.
    Where none are free at first, it waits until no more than a tenth of the sum of the learning rates is to come, and
    then freezes all at once but a sixth, which always trains; after each freeze that was undone, half as many.

    It proposes no more than the guard will judge, than is predicted to save more seconds over the rest of the run than
    it costs, and nothing where the probe shows that the blocks hold nothing of the task.

    Where the blocks hold little of it, the cost of a freeze shows later than the guard can look: on split CIFAR-100's
    tuning rows, ten of twelve blocks frozen for the last tenth cost half a point, a sixth of them from the first step
    on two points.
    """

    class Options(Section):
        pass

    options: Options
    needs_probe = True

    def decide(self, signals: Signals) -> int:
        frozen, scores, sixth = signals.frozen, signals.scores, -(-self.num_blocks // STAGES)
        first = blocks_at_start(scores, num_blocks=self.num_blocks, is_pretrained=signals.is_pretrained)
        if signals.interval == 0 or frozen < first:
            return max(frozen, first)
        left = self.num_blocks - sixth - frozen
        if left <= 0 or signals.payoff is None or not signals.is_watched:
            return frozen
        if scores is not None and transfer(scores) < NOISE:
            return frozen
        if first == 0 and signals.to_come > _LATE:
            return frozen
        wanted = frozen + min(left, sixth if first else max(sixth, left >> signals.undone))
        payoff = signals.payoff(wanted)
        return wanted if payoff.saved > _LEAST_RETURN * payoff.spent else frozen
