"""A dataset's reader: one class in one file, an entry of ``config/datasets.py``. One kind of it for each task."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from pipetransformer.config import DataConfig
from pipetransformer.config.datasets import DATASETS
from pipetransformer.config.registry import resolve
from pipetransformer.data.reading import Question, Texts


class Reader:
    """A dataset before its samples are read; the kinds below read the samples.

    Attributes:
        data: the section of the configuration that names it.
        names: of the classes, as far as they are known without a file: none of scores and spans; None where files tell.
        channels: of pictures; None for texts.
    """

    names: tuple[str, ...] | None = None
    channels: int | None = None

    def __init__(self, data: DataConfig) -> None:
        self.data = data

    def label_names(self) -> tuple[str, ...]:
        """The names of the classes as the data have them; may read metadata, or labels. Raises UserError."""
        assert self.names is not None, f"{type(self).__name__} has neither names nor label_names"
        return self.names

    def tokenizer(self) -> str | None:
        """JSON of a tokenizer trained on the data's own texts; None where the model brings one."""
        return None


@dataclass(frozen=True, slots=True)
class PictureSplit:
    """The pictures that a model wants.

    Attributes:
        split: ``train`` or ``eval``.
        label_names: the classes, in the order of their numbers.
        max_samples: number of leading samples to read; None for all.
        channels: 1 (grey) or 3.
        size: height and width of the model's input in pixels, for a dataset whose pictures differ in size.
        interpolation: the way of resizing, for such a dataset.
    """

    split: str
    label_names: tuple[str, ...]
    max_samples: int | None
    channels: int
    size: int
    interpolation: str


class PictureReader(Reader, ABC):
    """Of task image_classification."""

    channels = 3

    @abstractmethod
    def read(self, wanted: PictureSplit) -> dict[str, np.ndarray]:
        """``pictures`` uint8 ``[num_samples, channels, height, width]`` and ``labels`` int64. Raises UserError."""

    def digest(self, wanted: PictureSplit) -> object:
        """Whatever tells in its ``repr`` what ``read`` depends on beside the name, ``split``, ``label_names``,
        ``max_samples`` and ``channels``: the content of the files. Here, what is read.
        """
        return [hashlib.sha256(array.tobytes()).hexdigest() for array in self.read(wanted).values()]


class TextReader(Reader, ABC):
    """Of task text_classification.

    Attributes:
        splits: ``train``, ``eval`` and further evaluation sets by their own names.
        metrics: names of ``METRICS``; the first ranks.
    """

    splits: tuple[str, ...] = ("train", "eval")
    metrics: tuple[str, ...] = ("accuracy",)

    @abstractmethod
    def read(self, split: str, *, label_names: tuple[str, ...], max_samples: int | None) -> Texts:
        """The first ``max_samples`` samples of a split. Raises UserError."""

    def digest(self, split: str) -> str | None:
        """SHA-256 of what ``read`` depends on, without reading the samples; None: what is read counts, each time anew.

        Two readers that make something else of one file must not give the same.
        """
        return None


class QuestionReader(Reader, ABC):
    """Of task question_answering."""

    names = ()

    @abstractmethod
    def read(self, split: str, *, max_samples: int | None) -> Iterable[Question]:
        """At least the first ``max_samples`` questions of a split. Raises UserError."""

    def place(self, split: str) -> str:
        """The place of a split, to begin a message with."""
        return self.data.name

    def digest(self, split: str) -> str | None:
        """As ``TextReader.digest``."""
        return None


def reader_of(data: DataConfig) -> Reader:
    """The reader of the dataset that ``data`` names."""
    reader: Reader = resolve(DATASETS[data.name].reader)(data)
    return reader
