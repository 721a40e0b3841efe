"""Scikit-learn's handwritten digits: 1,797 grey 8 x 8 pictures that come with the package, for the demo."""

from __future__ import annotations

import numpy as np

from pipetransformer.data.reader import PictureReader, PictureSplit
from pipetransformer.data.reading import refuse_path

DIGIT_NAMES = tuple("0123456789")
_NUM_TRAIN = 1437


class DigitsReader(PictureReader):
    names = DIGIT_NAMES
    channels = 1

    def read(self, wanted: PictureSplit) -> dict[str, np.ndarray]:
        refuse_path(self.data)
        pictures, labels = read_digits(train=wanted.split == "train")
        rows = wanted.rows(len(labels))
        return {"pictures": np.repeat(pictures[rows], wanted.channels, axis=1), "labels": labels[rows]}


def read_digits(*, train: bool) -> tuple[np.ndarray, np.ndarray]:
    """Pictures uint8 ``[num_samples, 1, 8, 8]`` and labels int64 of the training part (1,437) or the rest (360)."""
    from sklearn.datasets import load_digits  # Costs a second, and only this function needs it.

    digits = load_digits()
    # RandomState, because its stream is frozen for good: the split is the same under every version of numpy.
    order = np.random.RandomState(0).permutation(len(digits.target))
    ids = order[:_NUM_TRAIN] if train else order[_NUM_TRAIN:]
    pictures = np.rint(digits.images[ids] * (255 / 16)).astype(np.uint8)
    return pictures[:, None], digits.target[ids].astype(np.int64)
