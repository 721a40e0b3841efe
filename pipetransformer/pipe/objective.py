"""The loss of a global batch, however it is cut, and the running figures that come from it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["IGNORED", "Objective"]

IGNORED = -100
"""Label of a padding copy: it weighs zero."""


class Objective:
    """Cross-entropy summed over a micro-batch and divided by the *global* count of real samples.

    Summed over micro-batches and replicas this is the mean over the global batch, for every (pp, dp, M) and for short
    batches; nothing else divides.

    Attributes:
        first_bad_step: the first step whose loss was not finite on this rank, or -1; on the device, so that looking can
            wait.
    """

    def __init__(self, *, label_smoothing: float, device: torch.device) -> None:
        self._label_smoothing = label_smoothing
        self._scale = 1.0
        self._device = device
        self._step = torch.zeros((), dtype=torch.int64, device=device)
        self.first_bad_step = torch.full((), -1, dtype=torch.int64, device=device)
        self.clear()

    def clear(self) -> None:
        """Starts the running figures anew: loss and correct answers summed over samples, and the samples."""
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=self._device)
        self.num_correct = torch.zeros((), dtype=torch.int64, device=self._device)
        self.num_samples = torch.zeros((), dtype=torch.int64, device=self._device)

    def begin(self, *, step: int, global_count: int) -> None:
        """Before optimizer step ``step`` (-1: an evaluation batch); ``global_count``: real samples of all replicas."""
        self._scale = 1.0 / global_count
        self._global_count = global_count
        self._step.fill_(step)

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Loss of one micro-batch: logits [rows, classes], labels [rows] with ``IGNORED`` for padding copies."""
        logits = logits if logits.dtype == torch.float64 else logits.float()
        loss = F.cross_entropy(
            logits, labels, ignore_index=IGNORED, reduction="sum", label_smoothing=self._label_smoothing
        )
        loss = loss * self._scale
        with torch.no_grad():
            is_first_bad = ~torch.isfinite(loss) & (self.first_bad_step < 0)
            self.first_bad_step = torch.where(is_first_bad, self._step, self.first_bad_step)
            self.loss_sum += loss * self._global_count
            self.num_correct += (logits.argmax(dim=-1) == labels).sum()
            self.num_samples += (labels != IGNORED).sum()
        return loss
