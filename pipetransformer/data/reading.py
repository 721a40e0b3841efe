"""The samples that readers give, and the checks that they share."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import pyarrow as pa
from PIL import Image

from pipetransformer.config import DataConfig
from pipetransformer.errors import UserError


@dataclass(frozen=True, slots=True)
class Texts:
    """A split of texts as read: labels int64 of classes or float32, one or two texts a sample (``second`` None)."""

    labels: np.ndarray
    first: list[str]
    second: list[str] | None = None

    def rows(self, rows: np.ndarray) -> Texts:
        """Some of the samples."""
        first, second = (None if texts is None else [texts[row] for row in rows] for texts in (self.first, self.second))
        assert first is not None
        return Texts(self.labels[rows], first, second)

    def digest(self) -> str:
        """SHA-256 of everything, in hex."""
        content = json.dumps([self.first, self.second]).encode() + self.labels.tobytes()
        return hashlib.sha256(content).hexdigest()


@dataclass(frozen=True, slots=True)
class Question:
    """``answers``: texts and the character of the context that each begins at; at least one."""

    id: str
    question: str
    context: str
    answers: tuple[tuple[str, int], ...]


_LONGEST_REASON = 200


def drawn(num_samples: int, *, max_samples: int | None) -> np.ndarray:
    """The rows of a split that a job takes, int64, ascending: all, or the first ``max_samples`` of a permutation that
    is the same in every run, since a file's leading rows may be of one kind.

    A larger draw holds the smaller one.
    """
    if max_samples is None or max_samples >= num_samples:
        return np.arange(num_samples)
    # RandomState, because its stream is frozen for good: the draw is the same under every version of numpy.
    return np.sort(np.random.RandomState(0).permutation(num_samples)[:max_samples])


def refuse_path(data: DataConfig) -> None:
    """For data that are embedded: there is nothing to read. Raises UserError."""
    if data.path is not None:
        raise UserError(f"data.path: {data.path} is not allowed; {data.name} needs no files, leave the path out")


def require_columns(present: Sequence[str], wanted: Sequence[str], *, source: object) -> None:
    missing = [name for name in wanted if name not in present]
    if missing:
        raise UserError(f"{source}: no column {', '.join(missing)}; there are {', '.join(present) or 'none'}")


def table_labels(column: pa.ChunkedArray, *, name: str, num_labels: int, source: object) -> np.ndarray:
    """A label column as int64 ``[num_samples]``, or as float32 scores where there are no classes (``num_labels`` 0).

    Raises UserError for the first row (from 0) that is out of range.
    """
    if not num_labels:
        if not pa.types.is_floating(column.type) or column.null_count:
            raise UserError(f"{source}: column {name} is {column.type} with {column.null_count} gaps; give numbers")
        scores: np.ndarray = column.to_numpy().astype(np.float32)
        return scores
    if not pa.types.is_integer(column.type):
        raise UserError(f"{source}: column {name} is {column.type}; whole numbers are needed")
    labels: np.ndarray = column.cast(pa.int64(), safe=False).fill_null(-1).to_numpy().copy()
    wrong = np.flatnonzero((labels < 0) | (labels >= num_labels))
    if len(wrong):
        row = int(wrong[0])
        raise UserError(f"{source}: row {row}: label {column[row].as_py()} is not allowed; give 0 to {num_labels - 1}")
    return labels


def table_texts(column: pa.ChunkedArray, *, name: str, source: object) -> list[str]:
    """A column of texts. Raises UserError for another type and for a gap."""
    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        raise UserError(f"{source}: column {name} is {column.type}; texts are needed")
    texts: list[str | None] = plain_values(column, name=name, source=source)
    if None in texts:
        raise UserError(f"{source}: row {texts.index(None)}: there is no text in column {name}")
    return cast(list[str], texts)


def plain_values(column: pa.ChunkedArray, *, name: str, source: object) -> list[Any]:
    """The values of a column. Raises UserError for texts that are not UTF-8."""
    try:
        values: list[Any] = column.to_pylist()
    except UnicodeDecodeError as error:
        raise UserError(f"{source}: column {name} holds a text that is not UTF-8 ({error.reason}); mend it") from error
    return values


def decoded(file: Path | IO[bytes], *, channels: int, source: object) -> Image.Image:
    """One picture, grey for one channel. Raises UserError, beginning with ``source``."""
    try:
        with Image.open(file) as opened:
            picture: Image.Image = opened.convert("L" if channels == 1 else "RGB")
    except Exception as error:  # Pillow's decoders raise whatever their formats' parsers meet.
        raise UserError(f"{source}: the picture cannot be decoded ({one_line(error)})") from error
    return picture


def channels_first(picture: Image.Image) -> np.ndarray:
    """Its pixels, uint8 ``[channels, height, width]``."""
    pixels: np.ndarray = np.atleast_3d(np.asarray(picture)).transpose(2, 0, 1)
    return pixels


def one_line(error: Exception) -> str:
    """The first line of an exception's message, short enough to stand inside another."""
    return str(error).strip().partition("\n")[0][:_LONGEST_REASON]
