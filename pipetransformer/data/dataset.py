"""What the rest of the code may know of a dataset: one split, held in memory, read by sample id."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch

__all__ = ["Dataset"]


class Dataset(ABC):
    """One split of a labelled dataset. Sample ids are 0 .. len(dataset) - 1.

    Attributes:
        labels: int64 ``[num_samples]``.
        label_names: name of each class.
        lengths: padded length of each sample ``[num_samples]``: a text's bucket edge in tokens, a picture's side in
            pixels.
        num_tokens: real tokens of each text ``[num_samples]``; None for images, whose rows the model decides.
        augmented: whether ``inputs`` differ from epoch to epoch.
    """

    labels: torch.Tensor
    label_names: tuple[str, ...]
    lengths: np.ndarray
    num_tokens: np.ndarray | None
    augmented: bool

    def __len__(self) -> int:
        return len(self.labels)

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """SHA-256, in hex, of everything that the samples' inputs depend on: raw contents and preprocessing."""

    @abstractmethod
    def inputs(self, ids: np.ndarray, *, length: int, epoch: int) -> dict[str, torch.Tensor]:
        """The model's inputs for these samples, by argument name, each ``[len(ids), ...]``.

        A row depends on (sample, length, epoch) alone, never on the other rows. ``epoch`` matters only to augmentation.
        Images: ``pixel_values`` float32 ``[batch, channels, height, width]``. Texts: ``input_ids``, ``attention_mask``
        and ``token_type_ids``, int64 ``[batch, length]``.
        """
