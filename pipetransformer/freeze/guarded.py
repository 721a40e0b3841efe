"""The policy that freezes what a linear probe shows to be free, and most once little is left to learn."""

from __future__ import annotations

from pipetransformer.config.types import Section
from pipetransformer.freeze.policy import Policy, Signals
from pipetransformer.freeze.probe import MUCH, NOISE, STAGES, free_blocks, transfer

_LEAST_RETURN = 1.05  # seconds saved for a second spent
_LATE = 0.05  # of the sum of all learning rates


class GuardedPolicy(Policy):
    """Freezes from the first step on as many blocks as are free (``free_blocks``). Where the blocks hold much of the
    task, more as they become free, and no others. Elsewhere it waits until no more than a twentieth of the sum of the
    learning rates is to come. Then, where the blocks hold some of the task, or nothing is known, it freezes a sixth
    more at a time; where none are free, all at once but a sixth, which always trains, and after each freeze that was
    undone, half as many.

    It proposes nothing that is not predicted to save more seconds over the rest of the run than it costs, beyond free
    blocks no more than the guard will judge, and nothing where the probe shows that the blocks hold nothing of the
    task.

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
        frozen, scores = signals.frozen, signals.scores
        first, free = self._free(signals), self._free(signals, to_come=signals.to_come)
        if signals.interval == 0 or frozen < first:
            return max(frozen, first)
        holds_much = first > 0 and scores is not None and transfer(scores) >= MUCH
        wanted = free if holds_much else self._proposed(signals, first=first)
        if wanted <= frozen or signals.payoff is None:
            return frozen
        payoff = signals.payoff(wanted)
        return wanted if payoff.saved > _LEAST_RETURN * payoff.spent else frozen

    def _free(self, signals: Signals, *, to_come: float = 1.0) -> int:
        num_blocks, is_pretrained = self.num_blocks, signals.is_pretrained
        return free_blocks(signals.scores, num_blocks=num_blocks, is_pretrained=is_pretrained, to_come=to_come)

    def _proposed(self, signals: Signals, *, first: int) -> int:
        """The number to be frozen beyond what is free, for the guard to judge."""
        frozen, scores, sixth = signals.frozen, signals.scores, -(-self.num_blocks // STAGES)
        left = self.num_blocks - sixth - frozen
        if left <= 0 or not signals.is_watched or signals.to_come > _LATE:
            return frozen
        if scores is not None and transfer(scores) < NOISE:
            return frozen
        return frozen + min(left, sixth if first else max(sixth, left >> signals.undone))
