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
    """

    batches_per_epoch: int
    epochs: int
    eval_every: Interval
    checkpoint_every: Interval | None

    @classmethod
    def of(cls, config: Config, *, batches_per_epoch: int) -> Calendar:
        return cls(batches_per_epoch, config.train.epochs, config.train.eval_every, config.checkpoint.every)

    @property
    def total_steps(self) -> int:
        return self.batches_per_epoch * self.epochs

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
        return self.total_steps // every - step // every + (self.total_steps % every > 0)

    def checkpoint_is_due(self, step: int) -> bool:
        if self.checkpoint_every is None:
            return False
        return self.ends_epoch(step) or step % self.checkpoint_every.steps(self.batches_per_epoch) == 0

    def next_pause(self, step: int, decision_is_due: Callable[[int], bool]) -> int:
        """The first step after ``step`` at which something may be due; at the latest the end of the epoch."""
        end = (self.epoch(step) + 1) * self.batches_per_epoch
        return next(
            pause
            for pause in range(step + 1, end + 1)
            if pause == end or decision_is_due(pause) or self.evaluation_is_due(pause) or self.checkpoint_is_due(pause)
        )
