"""The loss of a global batch, however it is cut, and the running figures that come from it.

classes   outputs [rows, classes]    labels int64 [rows]      cross-entropy
scores    outputs [rows, 1]          labels float [rows]      squared error
spans     outputs [rows, length, 2]  labels int64 [rows, 2]   mean of the cross-entropies of first and last token
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pipetransformer.data import IGNORED, Kind

__all__ = ["Objective"]


class Objective:
    """The loss summed over a micro-batch and divided by the *global* count of real samples.

    Summed over micro-batches and replicas this is the mean over the global batch, for every (pp, dp, M) and for short
    batches; nothing else divides.

    Attributes:
        first_bad_step: the first step whose loss was not finite on this rank, or -1; on the device, so that looking can
            wait.
    """

    def __init__(self, kind: Kind, *, label_smoothing: float, device: torch.device) -> None:
        self._kind = kind
        self._label_smoothing = label_smoothing
        self._scale = 1.0
        self._device = device
        self._step = torch.zeros((), dtype=torch.int64, device=device)
        self.first_bad_step = torch.full((), -1, dtype=torch.int64, device=device)
        self.clear()

    def clear(self) -> None:
        """Starts the running figures anew: loss and correct answers (none of scores) over samples, and the samples."""
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=self._device)
        self.num_correct = torch.zeros((), dtype=torch.int64, device=self._device)
        self.num_samples = torch.zeros((), dtype=torch.int64, device=self._device)

    def begin(self, *, step: int, global_count: int) -> None:
        """Before optimizer step ``step`` (-1: an evaluation batch); ``global_count``: real samples of all replicas."""
        self._scale = 1.0 / global_count
        self._global_count = global_count
        self._step.fill_(step)

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Loss of one micro-batch; the labels of padding copies are ``IGNORED``, they weigh zero."""
        outputs = outputs if outputs.dtype == torch.float64 else outputs.float()
        if self._kind == "scores":
            real = labels != IGNORED
            loss = torch.where(real, outputs[:, 0] - labels, 0.0).square().sum()
            correct = torch.zeros_like(real)
        elif self._kind == "spans":
            real = labels[:, 0] != IGNORED
            loss = (
                self._cross_entropy(outputs[..., 0], labels[:, 0]) + self._cross_entropy(outputs[..., 1], labels[:, 1])
            ) / 2
            correct = (outputs.argmax(dim=1) == labels).all(dim=1)
        else:
            real = labels != IGNORED
            loss = self._cross_entropy(outputs, labels)
            correct = outputs.argmax(dim=-1) == labels
        loss = loss * self._scale
        with torch.no_grad():
            is_first_bad = ~torch.isfinite(loss) & (self.first_bad_step < 0)
            self.first_bad_step = torch.where(is_first_bad, self._step, self.first_bad_step)
            self.loss_sum += loss * self._global_count
            self.num_correct += correct.sum()
            self.num_samples += real.sum()
        return loss

    def _cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(
            logits, labels, ignore_index=IGNORED, reduction="sum", label_smoothing=self._label_smoothing
        )
