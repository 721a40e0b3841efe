"""Mixup (Zhang et al., arXiv 1710.09412) and CutMix (Yun et al., arXiv 1905.04899) of training pictures, by timm.

Partners are drawn from all samples of a global batch, and one weight for all of it, by (seed, epoch, batch) alone:
each rank mixes its own rows, and no cut of the batch changes one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipetransformer.config import TrainConfig
from pipetransformer.data.batches import Batch
from pipetransformer.errors import UserError


class Mixing:
    """The mixing of a job.

    Args:
        num_classes: number of the model's outputs.

    Raises:
        UserError: the model does not say how many classes it has.
    """

    def __init__(self, train: TrainConfig, *, num_classes: int) -> None:
        from timm.data.mixup import Mixup

        if num_classes < 2:
            raise UserError("train.mixup: the model does not say how many classes it has; leave mixup and cutmix out")
        settings = {"label_smoothing": train.label_smoothing, "num_classes": num_classes}
        self._mix: Any = Mixup(train.mixup, train.cutmix, **settings)  # type: ignore[no-untyped-call]
        self._seed = train.seed

    def partners(self, ids: np.ndarray, batch: Batch, *, epoch: int) -> np.ndarray:
        """The sample that each of ``ids``, which are of ``batch``, is mixed with [ids]."""
        everyone = batch.ids
        drawn = np.random.default_rng([self._seed, epoch, batch.index]).permutation(everyone)
        order = np.argsort(everyone)
        found: np.ndarray = drawn[order[np.searchsorted(everyone, ids, sorter=order)]]
        return found

    def mixed(
        self, inputs: tuple[Tensor, Tensor], labels: tuple[Tensor, Tensor], *, epoch: int, index: int
    ) -> tuple[Tensor, Tensor]:
        """The rows of a batch, mixed with their partners.

        Args:
            inputs: the rows and their partners, each [rows, channels, height, width]; of type meta where only targets
                are wanted.
            labels: likewise, each int64 [rows].
            epoch, index: the epoch, and the number of the batch in it.

        Returns:
            The mixed inputs, and targets float32 [rows, classes], smoothed as ``train.label_smoothing`` says.
        """
        rows = len(labels[0])
        # Note: timm mixes the first row with the last, the second with the last but one.
        both, labels_of_both = (torch.cat((own, others.flip(0))) for own, others in (inputs, labels))
        with _numpy_drawn_from(self._seed, epoch, index):
            both, targets = self._mix(both, labels_of_both)
        return both[:rows], targets[:rows]


@contextmanager
def _numpy_drawn_from(*numbers: int) -> Iterator[None]:
    """Note: timm draws from numpy's own generator."""
    before = np.random.get_state()
    np.random.seed(np.random.SeedSequence(numbers).generate_state(1)[0])
    try:
        yield
    finally:
        np.random.set_state(before)
