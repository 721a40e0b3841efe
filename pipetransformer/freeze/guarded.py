"""The policy that freezes what a linear probe shows to be free, and most once little is left to learn."""

from __future__ import annotations

from pipetransformer.config.types import Section
from pipetransformer.freeze.policy import Policy, Signals
from pipetransformer.freeze.probe import NOISE, STAGES, free_blocks, transfer

_LEAST_RETURN = 1.05  # seconds saved for a second spent
_LATE = 0.05  # of the sum of all learning rates is to come


class GuardedPolicy(Policy):
    """Freezes as many blocks as are free (``free_blocks``): more as less is to be learnt, and no others. Where none
    ever are, it waits until no more than a twentieth of the sum of the learning rates is to come; then it freezes all
    at once but a sixth, which always trains, and after each freeze that was undone, half as many.

    After the first step it proposes nothing that is not predicted to save more seconds over the rest of the run than it
    costs, beyond free blocks nothing that the guard will not judge, and nothing where the probe shows that the blocks
    hold nothing of the task.

    The cost of a freeze may show later than the guard can look: on SST-2's tuning rows, eight of e5-small's twelve
    blocks frozen when 0.4 of the sum was to come cost a point against six. In runs beside the benchmarks, on pictures
    of split CIFAR-100 that the table does not use, blocks frozen for the last tenth of the sum raised the loss on other
    pictures, however many they were; for the last twentieth, with the average of their weights, a quarter as much.
    """

    class Options(Section):
        pass

    options: Options
    needs_probe = True

    @property
    def most(self) -> int:
        return self.num_blocks - -(-self.num_blocks // STAGES)

    def decide(self, signals: Signals) -> int:
        frozen, first = signals.frozen, self._free(signals, to_come=1.0)
        if signals.interval == 0 or frozen < first:
            return max(frozen, first)
        is_ever_free = self._free(signals, to_come=0.0) > 0
        wanted = self._free(signals, to_come=signals.to_come) if is_ever_free else self._proposed(signals)
        if wanted <= frozen or signals.payoff is None:
            return frozen
        payoff = signals.payoff(wanted)
        return wanted if payoff.saved > _LEAST_RETURN * payoff.spent else frozen

    def _free(self, signals: Signals, *, to_come: float) -> int:
        num_blocks, is_pretrained = self.num_blocks, signals.is_pretrained
        return free_blocks(signals.scores, num_blocks=num_blocks, is_pretrained=is_pretrained, to_come=to_come)

    def _proposed(self, signals: Signals) -> int:
        """The number to be frozen where none are free, for the guard to judge."""
        scores, left = signals.scores, self.most - signals.frozen
        if left <= 0 or not signals.is_watched or signals.to_come > _LATE:
            return signals.frozen
        if scores is not None and transfer(scores) < NOISE:
            return signals.frozen
        sixth = self.num_blocks - self.most
        return signals.frozen + min(left, max(sixth, left >> signals.undone))
