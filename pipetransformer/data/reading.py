"""The samples that readers give, and the checks that they share."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import numpy as np
import pyarrow as pa
from PIL import Image

from pipetransformer.config import DataConfig
from pipetransformer.errors import UserError


class Extent(NamedTuple):
    """How much of a split was read.

    Attributes:
        taken: number of samples that the job takes (of SQuAD: questions).
        found: number of samples of the source.
        lines: number of lines of its file; -1 where a sample is no line.
        left_out: number of samples that cannot be used.
        mended: number of samples that were put right.
    """

    taken: int
    found: int
    lines: int = -1
    left_out: int = 0
    mended: int = 0

    def __str__(self) -> str:
        told = f"{self.taken:,}" if self.taken == self.found else f"{self.taken:,} of {self.found:,}"
        notes = [f"{self.lines:,} lines"] if self.lines >= 0 else []
        notes += [f"{self.left_out:,} left out"] if self.left_out else []
        notes += [f"{self.mended:,} with an answer moved to where it stands"] if self.mended else []
        return f"{told} ({', '.join(notes)})" if notes else told


@dataclass(frozen=True, slots=True)
class Texts:
    """A split of texts as read: labels int64 of classes or float32, one or two texts a sample (``second`` None).

    Attributes:
        lines: number of lines of the file; -1 where there is none.
        left_out: number of lines that are known to be torn, and are no samples.
        found: number of samples before some were drawn; None for all of these.
    """

    labels: np.ndarray
    first: list[str]
    second: list[str] | None = None
    _: KW_ONLY
    lines: int = -1
    left_out: int = 0
    found: int | None = None

    def rows(self, rows: np.ndarray) -> Texts:
        """Some of the samples."""
        first, second = (None if texts is None else [texts[row] for row in rows] for texts in (self.first, self.second))
        assert first is not None
        return replace(self, labels=self.labels[rows], first=first, second=second, found=len(self.labels))

    @property
    def extent(self) -> Extent:
        taken = len(self.labels)
        return Extent(taken, taken if self.found is None else self.found, self.lines, self.left_out)

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


def require_columns(present: Sequence[str], wanted: Sequence[str], *, source: object, remedy: str = "") -> None:
    missing = [name for name in wanted if name not in present]
    if missing:
        raise UserError(f"{source}: no column {', '.join(missing)}; there are {', '.join(present) or 'none'}{remedy}")


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


LABEL_MARK = ";"
"""Stands between the labels of a sample."""


def split_labels(value: object) -> list[str]:
    """The labels of a sample: of a list, or of a text with semicolons between them; none of a gap."""
    found = value if isinstance(value, (list, tuple)) else str(value).split(LABEL_MARK) if value is not None else []
    return [name for name in (str(each).strip() for each in found) if name]


def count_lines(path: Path) -> int:
    """The lines of a file, an unfinished last one too."""
    count, last = 0, b""
    with path.open("rb") as file:
        while block := file.read(2**22):
            count += block.count(b"\n")
            last = block[-1:]
    return count + (last not in (b"", b"\n"))


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
