"""The steps at which something other than a step is due: pure arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipetransformer.config import Config, Interval


@dataclass(frozen=True, slots=True)
class Calendar:
    """Steps count from 0; "at step s" is after s steps, before the next.

    Attributes:
        eval_every: the interval of evaluations.
        checkpoint_every: the interval of checkpoints; None for no checkpoint at all.
        verify_every: the interval of comparisons of the replicas' weights; None for none.
        max_steps: number of steps at most; None for those of all epochs.
    """

    batches_per_epoch: int
    epochs: int
    eval_every: Interval
    checkpoint_every: Interval | None
    verify_every: Interval | None = None
    max_steps: int | None = None

    @classmethod
    def of(cls, config: Config, *, batches_per_epoch: int) -> Calendar:
        train, run = config.train, config.run
        every = (train.eval_every, config.checkpoint.every, run.verify_every)
        return cls(batches_per_epoch, train.epochs, *every, max_steps=train.max_steps)

    @property
    def total_steps(self) -> int:
        steps = self.batches_per_epoch * self.epochs
        return steps if self.max_steps is None else min(steps, self.max_steps)

    def epoch(self, step: int) -> int:
        """The epoch that step ``step`` belongs to, from 0."""
        return step // self.batches_per_epoch

    def ends_epoch(self, step: int) -> bool:
        return step % self.batches_per_epoch == 0

    def evaluation_is_due(self, step: int) -> bool:
        return step == self.total_steps or step % self.eval_every.steps(self.batches_per_epoch) == 0

    def evaluations_from(self, step: int) -> int:
        """The number of evaluations still to come at step ``step``."""
        every = self.eval_every.steps(self.batches_per_epoch)
        return self.total_steps // every - step // every + (step < self.total_steps and self.total_steps % every > 0)

    def checkpoint_is_due(self, step: int) -> bool:
        if self.checkpoint_every is None:
            return False
        is_end = self.ends_epoch(step) or step == self.total_steps
        return is_end or step % self.checkpoint_every.steps(self.batches_per_epoch) == 0

    def verification_is_due(self, step: int) -> bool:
        return self.verify_every is not None and step % self.verify_every.steps(self.batches_per_epoch) == 0

    def next_pause(self, step: int, decision_is_due: Callable[[int], bool]) -> int:
        """The first step after ``step`` at which something may be due; at the latest the end of the epoch."""
        end = min((self.epoch(step) + 1) * self.batches_per_epoch, self.total_steps)
        due = (decision_is_due, self.evaluation_is_due, self.checkpoint_is_due, self.verification_is_due)
        pauses = range(step + 1, end + 1)
        return next(pause for pause in pauses if pause == end or any(is_due(pause) for is_due in due))
