"""The loss of a global batch, the same for every cut of the batch, and running figures of the training.

classes   outputs [rows, classes]    labels int64 [rows]      cross-entropy; also of targets float [rows, classes]
labels    outputs [rows, labels]     labels float [rows, labels], 0 or 1    mean of the binary cross-entropies
scores    outputs [rows, 1]          labels float [rows]      squared error
spans     outputs [rows, length, 2]  labels int64 [rows, 2]   mean of the cross-entropies of first and last token
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pipetransformer.data import IGNORED, Dataset, Kind
from pipetransformer.errors import UserError

Loss = Callable[[Tensor, Tensor], Tensor]
_MOST_SEEN = 256  # micro-batches whose figures wait to be added up


class Objective:
    """The loss of a micro-batch: the sum over its samples, divided by the *global* batch size of the job.

    The sum of these over micro-batches and replicas is the mean over the global batch, for every (pp, dp, M). A batch
    that is short, as a length's last one often is, counts by its share of that size: each sample of an epoch weighs the
    same. No other code divides the loss or the gradients.

    Running figures are summed when they are asked for: a step of a small model is short enough to feel them, and on a
    GPU no step waits for them.

    Args:
        kind: form of outputs and labels, as above.
        label_smoothing: share of the target that goes to all classes, 0 to 1.
        class_weights: weight of each class [classes]; None where all weigh 1.
        of_each: ``(outputs [rows, ...], labels [rows]) -> losses [rows]``, in the place of the losses above.
    """

    def __init__(
        self,
        kind: Kind,
        *,
        label_smoothing: float,
        device: torch.device,
        class_weights: Tensor | None = None,
        of_each: Loss | None = None,
    ) -> None:
        self._kind, self._of_each = kind, of_each
        self._class_weights = None if class_weights is None else class_weights.to(device)
        self._label_smoothing = label_smoothing
        self._batch_size = 1
        self._factor: float | None = None
        self._device = device
        self._step = 0
        self._first_bad_step = -1
        self._unchecked: list[tuple[int, Tensor]] = []  # steps with their losses
        self.clear()

    def clear(self) -> None:
        """Sets the running figures to zero."""
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=self._device)
        self._num_correct = torch.zeros((), dtype=torch.int64, device=self._device)
        self._num_samples = torch.zeros((), dtype=torch.int64, device=self._device)
        # Of each micro-batch that is not in the sums: loss, batch size, answers, labels.
        self._seen: list[tuple[Tensor, int, Tensor | None, Tensor]] = []
        self._before = 0, 0  # of these lists and of the losses to be checked, at the last ``begin``

    @property
    def loss_sum(self) -> Tensor:
        """Sum of the losses of all samples since ``clear``, float64."""
        self._add_up()
        return self._loss_sum

    @property
    def num_correct(self) -> Tensor:
        """Number of correct answers since ``clear``; 0 for ``scores``."""
        self._add_up()
        return self._num_correct

    @property
    def num_samples(self) -> Tensor:
        """Number of real samples since ``clear``."""
        self._add_up()
        return self._num_samples

    @property
    def first_bad_step(self) -> int:
        """The first step with a loss on this rank that is not finite, or -1. Waits for the device."""
        if self._unchecked and self._first_bad_step < 0:
            losses = torch.stack([loss for _, loss in self._unchecked]).tolist()
            bad = (step for (step, _), loss in zip(self._unchecked, losses) if not math.isfinite(loss))
            self._first_bad_step = next(bad, -1)
        self._unchecked.clear()
        return self._first_bad_step

    def begin(self, *, step: int, batch_size: int = 1, factor: float | None = None) -> None:
        """Prepares for one global batch.

        Args:
            step: number of the optimizer step, from 0; -1 for an evaluation batch.
            batch_size: number of samples, over all replicas, of a batch that is not short; of no matter where no
                backward follows.
            factor: multiplies what the backward begins with, and no figure; None for 1.
        """
        if len(self._seen) >= _MOST_SEEN:
            self._add_up()
        self._batch_size, self._step, self._factor = batch_size, step, factor
        self._before = len(self._seen), len(self._unchecked)

    def is_finite(self) -> bool:
        """Whether all losses since ``begin`` are finite. Waits for the device."""
        losses = [loss for loss, *_ in self._seen[self._before[0] :]]
        return not losses or bool(torch.stack(losses).isfinite().all())

    def drop(self) -> None:
        """Deletes all figures since ``begin``."""
        del self._seen[self._before[0] :], self._unchecked[self._before[1] :]

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """The loss of one micro-batch, one number. Padding copies, with the label ``IGNORED``, add nothing to it."""
        outputs = outputs if outputs.dtype == torch.float64 else outputs.float()
        answers = None
        if self._of_each is not None:
            real = labels != IGNORED
            loss = self._of_each(outputs[real], labels[real]).sum()
            answers = outputs.detach().argmax(dim=-1) if self._kind == "classes" else None
        elif self._kind == "scores":
            loss = torch.where(labels != IGNORED, outputs[:, 0] - labels, 0.0).square().sum()
        elif self._kind == "spans":
            loss = (
                self._cross_entropy(outputs[..., 0], labels[:, 0]) + self._cross_entropy(outputs[..., 1], labels[:, 1])
            ) / 2
            answers = outputs.detach().argmax(dim=1)
        elif self._kind == "labels":
            of_rows = F.binary_cross_entropy_with_logits(outputs, labels.to(outputs.dtype), reduction="none").mean(1)
            loss = torch.where(labels[:, 0] != IGNORED, of_rows, 0.0).sum()
        elif labels.is_floating_point():  # mixed, and smoothed already; of a padding copy zeros
            weights = self._weights_like(outputs)
            loss = F.cross_entropy(outputs, labels.to(outputs.dtype), weight=weights, reduction="sum")
            answers = outputs.detach().argmax(dim=-1)
            labels = torch.where(labels.any(dim=1), labels.argmax(dim=1), IGNORED)
        else:
            loss = self._cross_entropy(outputs, labels)
            answers = outputs.detach().argmax(dim=-1)
        loss = loss / self._batch_size
        told = loss.detach()
        if self._step >= 0:
            self._unchecked.append((self._step, told))
        self._seen.append((told, self._batch_size, answers, labels))
        return loss if self._factor is None else loss * self._factor

    def of_samples(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """The loss of each sample [rows], float64, beside all running figures."""
        if self._of_each is not None:  # in the type that it trains in: a user's own weights may have no other
            return self._of_each(outputs if outputs.dtype == torch.float64 else outputs.float(), labels).double()
        outputs = outputs.double()
        if self._kind == "scores":
            return (outputs[:, 0] - labels).square()
        if self._kind == "labels":
            return F.binary_cross_entropy_with_logits(outputs, labels.double(), reduction="none").mean(1)
        of_each = partial(
            F.cross_entropy, weight=self._weights_like(outputs), reduction="none", label_smoothing=self._label_smoothing
        )
        if self._kind == "spans":
            return (of_each(outputs[..., 0], labels[:, 0]) + of_each(outputs[..., 1], labels[:, 1])) / 2
        return of_each(outputs, labels)

    @torch.no_grad()
    def _add_up(self) -> None:
        for loss, batch_size, answers, labels in self._seen:
            first = labels[:, 0] if labels.ndim > 1 else labels
            self._loss_sum += loss * batch_size
            self._num_samples += (first != IGNORED).sum()
            if answers is not None:
                right = answers == labels
                self._num_correct += (right.all(dim=1) if right.ndim > 1 else right).sum()
        self._seen.clear()

    def _cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(
            logits,
            labels,
            weight=self._weights_like(logits),
            ignore_index=IGNORED,
            reduction="sum",
            label_smoothing=self._label_smoothing,
        )

    def _weights_like(self, logits: Tensor) -> Tensor | None:
        return None if self._class_weights is None else self._class_weights.to(logits.dtype)


def num_outputs(model: Any) -> int:
    """Numbers that a model of timm or transformers gives for a sample: the classes, where there are some; 0 where it
    does not say."""
    settings = getattr(model, "config", None)
    return int(model.num_classes if hasattr(model, "num_classes") else getattr(settings, "num_labels", 0))


def weights_of_classes(wanted: str | Sequence[float] | None, dataset: Dataset, *, num_classes: int) -> Tensor | None:
    """``train.class_weights`` as float64 [classes]; ``balanced``: N / (classes x samples of the class), as in
    scikit-learn, so that the mean sample weighs 1.

    Raises:
        UserError: the data have no classes, or another number of them.
    """
    if wanted is None:
        return None
    if dataset.kind != "classes":
        raise UserError(f"train.class_weights: the data have {dataset.kind}, no classes; give null")
    num_classes = num_classes or int(dataset.labels.max()) + 1
    if not isinstance(wanted, str):
        if len(wanted) != num_classes:
            raise UserError(f"train.class_weights: {len(wanted)} weights, and there are {num_classes} classes")
        return torch.tensor([*wanted], dtype=torch.float64)
    counts = torch.bincount(dataset.labels, minlength=num_classes).double()
    present = counts > 0
    return torch.where(present, len(dataset) / (int(present.sum()) * counts.clamp(min=1)), 1.0)
