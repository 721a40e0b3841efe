"""Stops a job whose loss or weights are no longer finite, at the first such step and on every rank."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from pipetransformer.engine import Engine, NotFinite, Objective
from pipetransformer.errors import UserError
from pipetransformer.process.collectives import first_of_ranks
from pipetransformer.run.checkpoint import CheckpointStore

__all__ = ["Guards"]


class Guards:
    """Looks at ``objective`` and at weights; what it finds is a UserError that names step, rank and remedy."""

    def __init__(self, objective: Objective, *, rank: int, checkpoints: CheckpointStore) -> None:
        self._objective, self._rank, self._checkpoints = objective, rank, checkpoints

    def check_loss(self) -> None:
        """Stops this rank at the first step whose loss was not finite here."""
        bad = int(self._objective.first_bad_step)
        if bad >= 0:
            raise self._diverged(bad, rank=self._rank, what="the loss is not finite")

    def check_losses(self) -> None:
        """Collective. Stops at the first step whose loss was not finite on any rank: gradients carry it to all."""
        bad = int(self._objective.first_bad_step)
        if (found := first_of_ranks(bad if bad >= 0 else None)) is not None:
            raise self._diverged(found[0], rank=found[1], what="the loss is not finite")

    def check_weights(self, parameters: Iterable[Tensor], *, last_step: int) -> None:
        """Collective. Stops before weights are used or saved that the last update drove out of range."""
        finite = torch.stack([p.detach().isfinite().all() for p in parameters]).all()
        if (found := first_of_ranks(None if finite else last_step)) is not None:
            raise self._diverged(found[0], rank=found[1], what="the update made weights that are not finite")

    def evaluate(self, engine: Engine, *, last_step: int) -> dict[str, float]:
        """Collective. The metrics of an evaluation; stops where a loss is not finite."""
        try:
            return engine.evaluate()
        except NotFinite as error:
            raise self._diverged(last_step, rank=error.rank, what="the evaluation loss is not finite") from None

    def _diverged(self, step: int, *, rank: int, what: str) -> UserError:
        latest = self._checkpoints.latest()
        good = f"the last good checkpoint is {latest}" if latest else "there is no checkpoint"
        return UserError(f"step {step}, rank {rank}: {what}; {good}; lower train.lr, or set train.max_grad_norm")
