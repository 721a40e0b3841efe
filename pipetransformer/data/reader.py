"""A dataset's reader: one class in one file, an entry of ``config/datasets.py``. One kind of it for each task."""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from pipetransformer.config import DataConfig
from pipetransformer.config.datasets import DATASETS
from pipetransformer.config.registry import resolve
from pipetransformer.data.pictures import ArrayPictures, Pictures
from pipetransformer.data.prepared import file_digest
from pipetransformer.data.reading import Question, Texts, drawn, one_line, require_columns
from pipetransformer.errors import UserError

_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


class Reader:
    """A dataset before its samples are read; the kinds below read the samples.

    Attributes:
        data: the section of the configuration that names it.
        names: of the classes, as far as they are known without a file: none of scores and spans; None where files tell.
        channels: of pictures; None for texts.
        splits: ``train``, ``eval`` and further evaluation sets by their own names.
        hub_id: its place where ``data.path`` is null; none if empty.
        hub_splits: names of the splits on the hub.
    """

    names: tuple[str, ...] | None = None
    channels: int | None = None
    splits: tuple[str, ...] = ("train", "eval")
    hub_id: str = ""
    hub_splits: Mapping[str, str] = {"train": "train", "eval": "validation"}

    def __init__(self, data: DataConfig) -> None:
        self.data = data
        self.hub_splits = {**self.hub_splits, **data.splits}

    def label_names(self) -> tuple[str, ...]:
        """The names of the classes as the data have them; may read metadata, or labels. Raises UserError."""
        assert self.names is not None, f"{type(self).__name__} has neither names nor label_names"
        return self.names

    def tokenizer(self) -> str | None:
        """JSON of a tokenizer trained on the data's own texts; None where the model brings one."""
        return None

    def max_samples(self, split: str) -> int | None:
        """The number of samples of a split to draw; None for all."""
        return self.data.max_train_samples if split == "train" else self.data.max_eval_samples

    @property
    def location(self) -> Path | str:
        """The place that ``data.path`` names: a local folder (Path) or a dataset on the hub (its id, a str)."""
        path = self.data.path
        if path is None:
            return self.hub_id
        folder = Path(path).expanduser()
        if folder.is_dir():
            return folder
        if folder.exists():
            raise UserError(f"data.path: {path} is a file; give the folder that holds it")
        if _HUB_ID.fullmatch(path):
            return path
        raise UserError(f"data.path: there is no folder {path}; give a local folder or a hub id such as owner/name")

    def on_hub(self, split: str) -> str:
        """A split on the hub, to begin a message with."""
        return f"{self.location or self.data.name} ({self.hub_splits[split]})"

    def hub_table(self, split: str, columns: Sequence[str], *, config_name: str | None = None) -> pa.Table:
        """A split on the hub, pictures still encoded."""
        import datasets  # Costs a second, and only this method needs it.

        try:
            dataset = datasets.load_dataset(self.location, config_name, split=self.hub_splits[split])
        except Exception as error:  # Three libraries raise here, each with exceptions of its own.
            raise UserError(
                f"data.path: {self.location} is no local folder and its split {self.hub_splits[split]} cannot be "
                f"loaded from the hub ({type(error).__name__}: {one_line(error)}); give data.path a local folder, or "
                f"data.splits={{{split}: NAME}} if the split has another name there"
            ) from error
        require_columns(dataset.column_names, columns, source=self.on_hub(split))
        if not len(dataset):
            raise UserError(f"{self.on_hub(split)}: holds no samples; at least 1 is needed")
        return dataset.select_columns(list(columns)).with_format("arrow")[:]


@dataclass(frozen=True, slots=True)
class PictureSplit:
    """The pictures that a model wants.

    Attributes:
        split: ``train`` or ``eval``.
        label_names: the classes, in the order of their numbers.
        max_samples: number of samples to draw; None for all.
        channels: 1 (grey) or 3.
        size: height and width of the model's input in pixels, for a dataset whose pictures differ in size.
        interpolation: the way of resizing, likewise.
        found: numbers of all samples that ``rows`` was asked for.
    """

    split: str
    label_names: tuple[str, ...]
    max_samples: int | None
    channels: int
    size: int
    interpolation: str
    found: list[int] = field(default_factory=list, compare=False)

    def rows(self, num_samples: int) -> np.ndarray:
        """The rows to read of all, int64, ascending. The only draw of pictures: a reader reads no others."""
        self.found.append(num_samples)
        return drawn(num_samples, max_samples=self.max_samples)


class PictureReader(Reader, ABC):
    """Of task image_classification; ``metrics`` are names of ``METRICS``, of which the first ranks."""

    channels = 3
    metrics: tuple[str, ...] = ("accuracy",)

    @abstractmethod
    def read(self, wanted: PictureSplit) -> dict[str, np.ndarray]:
        """``labels`` int64 of ``wanted.rows``, and ``pictures`` uint8 ``[num_samples, channels, height, width]`` of
        them, or whatever ``opened`` takes in their place. Raises UserError.
        """

    def opened(self, arrays: Mapping[str, np.ndarray], wanted: PictureSplit) -> Pictures:
        """The pictures that ``read`` has read, or found."""
        return ArrayPictures(arrays["pictures"])

    def digest(self, wanted: PictureSplit) -> object:
        """Whatever tells in its ``repr`` what ``read`` depends on beside the name, ``split``, ``label_names``,
        ``max_samples`` and ``channels``: the content of the files. Here, what is read.
        """
        return [hashlib.sha256(array.tobytes()).hexdigest() for array in self.read(wanted).values()]


class TokenReader(Reader, ABC):
    """Of texts or questions, a file a split.

    Attributes:
        metrics: the names of the metrics; the first ranks.
    """

    metrics: tuple[str, ...]

    def file(self, split: str) -> Path | None:
        """The local file that a split is read from; None where there is none. Raises UserError where one is missing."""
        return None

    def place(self, split: str) -> str:
        """The place of a split, to begin a message with."""
        file = self.file(split)
        if file is not None:
            return str(file)
        return self.on_hub(split) if self.hub_id else self.data.name

    def digest(self, split: str) -> str | None:
        """SHA-256 of what ``read`` depends on, without reading the samples; None: what is read counts, each time anew.

        Two readers that make something else of one file must not give the same.
        """
        file = self.file(split)
        return None if file is None else file_digest(file)


class TextReader(TokenReader):
    """Of task text_classification; ``metrics`` are names of ``METRICS``."""

    metrics: tuple[str, ...] = ("accuracy",)

    @abstractmethod
    def read(self, split: str, *, label_names: tuple[str, ...]) -> Texts:
        """All samples of a split. Raises UserError."""


class QuestionReader(TokenReader):
    """Of task question_answering."""

    names = ()
    metrics = ("f1", "exact_match")

    @abstractmethod
    def read(self, split: str) -> Iterable[Question]:
        """All questions of a split. Raises UserError."""


def parted(labels: Sequence[object], *, fraction: float) -> dict[str, np.ndarray]:
    """The rows of one source that train and that evaluate, int64, ascending: of each label its share, as far as there
    are enough; the same in every run."""
    from sklearn.model_selection import train_test_split

    rows = np.arange(len(labels))
    try:
        train, kept = train_test_split(rows, test_size=fraction, stratify=np.array(labels), random_state=0)
    except ValueError:  # a class of one sample, or more classes than are kept
        train, kept = train_test_split(rows, test_size=max(1, round(fraction * len(rows))), random_state=0)
    return {"train": np.sort(train), "eval": np.sort(kept)}


def reader_of(data: DataConfig) -> Any:
    """The reader of the dataset that ``data`` names: of the kind of its task."""
    return resolve(DATASETS[data.name].reader)(data)
