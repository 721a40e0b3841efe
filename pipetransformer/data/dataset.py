"""A dataset as the rest of the code sees it: one split, read by sample id."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection

import numpy as np
import torch

from pipetransformer.config.datasets import Kind
from pipetransformer.data.metrics import METRICS
from pipetransformer.data.reading import Extent

__all__ = ["IGNORED", "SET_ASIDE", "TRAINING", "Dataset", "Kind"]

SET_ASIDE = "set_aside"
"""Name of the split of ``data/set_aside.py``: neither trained on nor evaluated for a metric."""

TRAINING = ("train", SET_ASIDE)
"""Splits that training needs; all others are evaluated."""

IGNORED = -100
"""Label of a padding copy: it weighs zero."""


class Dataset(ABC):
    """One split of a labelled dataset. Sample ids are 0 .. len(dataset) - 1.

    Attributes:
        kind: what the labels are.
        labels: int64 ``[num_samples]`` of classes, float32 ``[num_samples]`` of scores, float32 ``[num_samples,
            labels]``, 0 or 1, of labels, int64 ``[num_samples, 2]`` of spans.
        metric_names: what ``measure`` gives; the first is the one that the best weights are kept by. More is better.
        lengths: padded length of each sample ``[num_samples]``: a text's bucket edge in tokens, a picture's side in
            pixels.
        num_tokens: real tokens of each text ``[num_samples]``; None for images, whose rows the model decides.
        predictions: what the model said of each sample at the last ``measure``, in words, by the sample's name in the
            data; None where that is not kept.
        groups: number of the group of each sample ``[num_samples]``, whose samples tell of each other; None where each
            is alone.
        views: number of different inputs of each sample, which the epochs take in turn; 1 without augmentation, None
            for new ones at each epoch.
        fingerprint: SHA-256, in hex, of everything that the samples' inputs and labels depend on.
        extent: how much of its source was read.
        place: its source, in words.
    """

    kind: Kind
    labels: torch.Tensor
    metric_names: tuple[str, ...]
    lengths: np.ndarray
    num_tokens: np.ndarray | None
    fingerprint: str
    views: int | None = 1
    predictions: dict[str, str] | None = None
    groups: np.ndarray | None = None
    extent: Extent | None = None
    place: str = ""

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def inputs(
        self, ids: np.ndarray, *, length: int, epoch: int | None, keys: Collection[str] | None = None
    ) -> dict[str, torch.Tensor]:
        """The model's inputs for these samples, by argument name, each ``[len(ids), ...]``; with ``keys``, these alone.

        A row depends on (sample, length, epoch) alone, never on the other rows. ``epoch`` matters only to augmentation;
        None for none.
        Images: ``pixel_values`` float32 ``[batch, channels, height, width]``. Texts: ``input_ids``, ``attention_mask``
        and ``token_type_ids``, int64 ``[batch, length]``.
        """

    def predict(self, ids: np.ndarray, outputs: np.ndarray) -> np.ndarray:
        """The predictions for these samples, a few numbers each: their class or their score [len(ids)], or 1 for each
        label that is more probable than not [len(ids), labels].

        Args:
            outputs: the model's outputs for them, a row each.
        """
        if self.kind == "labels":
            return (outputs > 0).astype(np.int64)
        predictions: np.ndarray = outputs.argmax(axis=1) if self.kind == "classes" else outputs[:, 0]
        return predictions

    def measure(self, predictions: np.ndarray) -> dict[str, float]:
        """The metrics of the ``predict``-ions for every sample, in the order of the ids."""
        labels = self.labels.numpy()
        return {name: METRICS[name](predictions, labels) for name in self.metric_names}
