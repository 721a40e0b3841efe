"""The loss of a global batch, the same for every cut of the batch, and running figures of the training.

classes   outputs [rows, classes]    labels int64 [rows]      cross-entropy
scores    outputs [rows, 1]          labels float [rows]      squared error
spans     outputs [rows, length, 2]  labels int64 [rows, 2]   mean of the cross-entropies of first and last token
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pipetransformer.data import IGNORED, Kind


class Objective:
    """The loss of a micro-batch: the sum over its samples, divided by the *global* batch size of the job.

    The sum of these over micro-batches and replicas is the mean over the global batch, for every (pp, dp, M). A batch
    that is short, as a length's last one often is, counts by its share of that size: each sample of an epoch weighs the
    same. No other code divides the loss or the gradients.

    Args:
        kind: form of outputs and labels: ``classes``, ``scores`` or ``spans``.
        label_smoothing: share of the target that goes to all classes, 0 to 1.

    Attributes:
        first_bad_step: the first step with a loss on this rank that is not finite, or -1. It stays on the device, so
            that no step waits for it.
        loss_sum: sum of the losses of all samples since ``clear``, float64.
        num_correct: number of correct answers since ``clear``; 0 for ``scores``.
        num_samples: number of real samples since ``clear``.
    """

    def __init__(self, kind: Kind, *, label_smoothing: float, device: torch.device) -> None:
        self._kind = kind
        self._label_smoothing = label_smoothing
        self._batch_size = 1
        self._device = device
        self._step = torch.zeros((), dtype=torch.int64, device=device)
        self.first_bad_step = torch.full((), -1, dtype=torch.int64, device=device)
        self.clear()

    def clear(self) -> None:
        """Sets the running figures to zero."""
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=self._device)
        self.num_correct = torch.zeros((), dtype=torch.int64, device=self._device)
        self.num_samples = torch.zeros((), dtype=torch.int64, device=self._device)

    def begin(self, *, step: int, batch_size: int = 1) -> None:
        """Prepares for one global batch.

        Args:
            step: number of the optimizer step, from 0; -1 for an evaluation batch.
            batch_size: number of samples, over all replicas, of a batch that is not short; of no matter where no
                backward follows.
        """
        self._batch_size = batch_size
        self._step.fill_(step)

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """The loss of one micro-batch, one number. Padding copies, with the label ``IGNORED``, add nothing to it."""
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
        loss = loss / self._batch_size
        with torch.no_grad():
            is_first_bad = ~torch.isfinite(loss) & (self.first_bad_step < 0)
            self.first_bad_step = torch.where(is_first_bad, self._step, self.first_bad_step)
            self.loss_sum += loss * self._batch_size
            self.num_correct += correct.sum()
            self.num_samples += real.sum()
        return loss

    def _cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(
            logits, labels, ignore_index=IGNORED, reduction="sum", label_smoothing=self._label_smoothing
        )
