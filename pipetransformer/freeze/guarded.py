"""The policy that freezes what a linear probe shows to be free, and most once little is left to learn."""

from __future__ import annotations

from pipetransformer.config.types import Section
from pipetransformer.freeze.policy import Policy, Signals
from pipetransformer.freeze.probe import LATE, NOISE, SOME, STAGES, free_blocks, transfer

_LEAST_RETURN = 1.05  # seconds saved for a second spent


class GuardedPolicy(Policy):
    """Freezes as many blocks as are free (``free_blocks``), at first and once little is to be learnt, and no others.
    Where none are, it waits until no more than a twentieth of the sum of the learning rates is to come, and proposes
    for the guard to judge: a third where they hold a tenth of the task or nothing is known of a pre-trained model,
    nothing where they hold nothing of it, else all but a sixth, which always trains; and after each freeze that was
    undone, half as many.

    After the first decision it asks for nothing that is not predicted to save more seconds over the rest of the run
    than it costs.

    The cost of a freeze may show later than the guard can look. In runs beside the benchmarks, on pictures of split
    CIFAR-100 that the table does not use, blocks frozen for the last tenth of the sum raised the loss on other
    pictures, however many they were; for the last twentieth, with the average of their weights, a quarter as much.
    """

    class Options(Section):
        pass

    options: Options
    needs_probe = True

    @property
    def most(self) -> int:
        return self.num_blocks - -(-self.num_blocks // STAGES)

    def may_freeze_later(self, signals: Signals) -> bool:
        holds_none = signals.scores is not None and transfer(signals.scores) < NOISE
        return self._free(signals, to_come=1.0) > 0 or (signals.is_watched and not holds_none)

    def decide(self, signals: Signals) -> int:
        frozen, first = signals.frozen, self._free(signals, to_come=1.0)
        if signals.interval == 0:
            return max(frozen, first)
        wanted = self._free(signals, to_come=signals.to_come) if first else self._proposed(signals)
        if wanted <= frozen or signals.payoff is None:
            return frozen
        payoff = signals.payoff(wanted)
        return wanted if payoff.saved > _LEAST_RETURN * payoff.spent else frozen

    def _free(self, signals: Signals, *, to_come: float) -> int:
        num_blocks, is_pretrained = self.num_blocks, signals.is_pretrained
        return free_blocks(signals.scores, num_blocks=num_blocks, is_pretrained=is_pretrained, to_come=to_come)

    def _proposed(self, signals: Signals) -> int:
        """The number to be frozen where none are free, for the guard to judge."""
        frozen, scores = signals.frozen, signals.scores
        held = None if scores is None else transfer(scores)
        if not signals.is_watched or signals.to_come > LATE or (held is not None and held < NOISE):
            return frozen
        is_shallow = signals.is_pretrained and (held is None or held >= SOME)
        left = (-(-2 * self.num_blocks // STAGES) if is_shallow else self.most) - frozen
        return frozen + max(0, min(left, max(self.num_blocks - self.most, left >> signals.undone)))
