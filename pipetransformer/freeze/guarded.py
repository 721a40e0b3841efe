"""The policy that starts with what a linear probe shows to be free, and freezes most once little is left to learn."""

from __future__ import annotations

from pipetransformer.config.types import Section
from pipetransformer.freeze.policy import Policy, Signals
from pipetransformer.freeze.probe import NOISE, STAGES, blocks_at_start, transfer

_LEAST_RETURN = 1.05  # seconds saved for a second spent
_LATE = 0.1  # of the sum of all learning rates


class GuardedPolicy(Policy):
    """Freezes from the first step on as many blocks as are free (``blocks_at_start``).

    Once no more than a tenth of the sum of the learning rates is to come, it proposes to freeze all blocks but a sixth,
    which always trains: where the guard will judge that, where it is predicted to save more seconds over the rest of
    the run than it costs, and unless the probe shows that the blocks hold nothing of the task. After each freeze that
    was undone it proposes half as many, down to a sixth.

    What freezing costs shows later than the guard can look: on split CIFAR-100's tuning rows, ten of twelve blocks from
    that moment on cost half a point, and a sixth from the first step on two points.
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
        if left <= 0 or signals.to_come > _LATE or signals.payoff is None or not signals.is_watched:
            return frozen
        if scores is not None and transfer(scores) < NOISE:
            return frozen
        wanted = frozen + min(left, max(sixth, left >> signals.undone))
        payoff = signals.payoff(wanted)
        return wanted if payoff.saved > _LEAST_RETURN * payoff.spent else frozen
