"""Batch normalisation under micro-batches: each is normalised by its own statistics, the running ones see the whole.

As GPipe has it (arXiv 1811.06965, section 2): a micro-batch's activations are normalised with its own mean and
variance, and evaluation uses the moving average of statistics over the mini-batch. The layer keeps the mean and
variance that the forward computes anyway; at the end of the mini-batch ``commit`` merges those of all micro-batches
(squared deviations within them plus those of their means) and makes the one update that a layer makes which sees all
rows at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, nn
from torch.nn import functional

_is_recomputing: ContextVar[bool] = ContextVar("is_recomputing", default=False)


@contextmanager
def recomputing() -> Iterator[None]:
    """Marks a forward that repeats an earlier one: no statistics are taken from it (``adapter.Recompute``)."""
    token = _is_recomputing.set(True)
    try:
        yield
    finally:
        _is_recomputing.reset(token)


class MiniBatchNorm(nn.Module):
    """The layer in the place of one ``batch_norm`` call: statistics of the mini-batch so far, no parameter, no buffer.

    Args:
        momentum: weight of a mini-batch in the running statistics.
        eps: term added to the variance.
    """

    def __init__(self, *, momentum: float, eps: float) -> None:
        super().__init__()
        self._momentum = momentum
        self._eps = eps
        self._taken: list[tuple[int, Tensor, Tensor]] = []  # by micro-batch: rows, mean, unbiased variance

    def forward(
        self, rows: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor, running_var: Tensor
    ) -> Tensor:
        """Normalises ``rows`` [batch, channels, ...]; in eval mode by the running statistics."""
        if not self.training:
            return functional.batch_norm(rows, running_mean, running_var, weight, bias, False, 0.0, self._eps)
        # Note: with momentum 1 the layer writes its batch's mean and unbiased variance: no second pass over the rows,
        # whatever implementation the device has.
        mean, variance = torch.zeros_like(running_mean), torch.zeros_like(running_var)
        normalised = functional.batch_norm(rows, mean, variance, weight, bias, True, 1.0, self._eps)
        if not _is_recomputing.get():
            self._taken.append((rows.numel() // rows.shape[1], mean, variance))
        return normalised

    @torch.no_grad()
    def commit(self, running_mean: Tensor, running_var: Tensor, counter: Tensor | None) -> None:
        """Moves the running statistics by those of the mini-batch; nothing where no forward was taken."""
        if not self._taken:
            return
        counts = torch.tensor([count for count, _, _ in self._taken], dtype=running_mean.dtype)
        counts = counts.to(running_mean.device)[:, None]
        means, variances = (torch.stack(column) for column in list(zip(*self._taken))[1:])
        total = counts.sum()
        mean = (counts * means).sum(0) / total
        squares = ((counts - 1) * variances + counts * (means - mean).square()).sum(0)
        running_mean.lerp_(mean, self._momentum)
        running_var.lerp_(squares / (total - 1), self._momentum)
        if counter is not None:
            counter += 1
        self.discard()

    def discard(self) -> None:
        """Forgets the mini-batch so far."""
        self._taken.clear()
