"""The place of a dataset's rows, a local folder or the hub, and the checks that readers share."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import pyarrow as pa

from pipetransformer.config import DataConfig
from pipetransformer.errors import UserError


@dataclass(frozen=True, slots=True)
class Texts:
    """A split of texts as read: one or two texts a sample (``second`` None), labels int64 of classes or float32."""

    first: list[str]
    second: list[str] | None
    labels: np.ndarray

    def head(self, num_samples: int | None) -> Texts:
        """The first ``num_samples`` samples; None: all."""
        second = None if self.second is None else self.second[:num_samples]
        return Texts(self.first[:num_samples], second, self.labels[:num_samples])

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


_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_LONGEST_REASON = 200


def locate(data: DataConfig, *, default_hub_id: str) -> Path | str:
    """The place that ``data.path`` names: a local folder (Path) or a dataset on the hub (its id, a str)."""
    if data.path is None:
        return default_hub_id
    folder = Path(data.path).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise UserError(f"data.path: {data.path} is a file; give the folder that holds it")
    if _HUB_ID.fullmatch(data.path):
        return data.path
    raise UserError(f"data.path: there is no folder {data.path}; give a local folder or a hub id such as owner/name")


def refuse_path(data: DataConfig) -> None:
    """For data that are embedded: there is nothing to read. Raises UserError."""
    if data.path is not None:
        raise UserError(f"data.path: {data.path} is not allowed; {data.name} needs no files, leave the path out")


def hub_table(
    hub_id: str, *, config_name: str | None, split: str, columns: Sequence[str], max_samples: int | None
) -> pa.Table:
    """The first ``max_samples`` rows of a dataset on the hub, pictures still encoded."""
    import datasets  # Costs a second, and only this function needs it.

    try:
        dataset = datasets.load_dataset(hub_id, config_name, split=split)
    except Exception as error:  # Three libraries raise here, each with exceptions of its own.
        raise UserError(
            f"data.path: {hub_id} is no local folder and its split {split} cannot be loaded from the hub"
            f" ({type(error).__name__}: {one_line(error)}); give data.path a local folder"
        ) from error
    require_columns(dataset.column_names, columns, source=f"{hub_id} ({split})")
    if not len(dataset):
        raise UserError(f"{hub_id} ({split}): holds no samples; at least 1 is needed")
    num_samples = len(dataset) if max_samples is None else min(len(dataset), max_samples)
    return dataset.select_columns(list(columns)).with_format("arrow")[:num_samples]


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
    texts: list[str | None] = column.to_pylist()
    if None in texts:
        raise UserError(f"{source}: row {texts.index(None)}: there is no text in column {name}")
    return cast(list[str], texts)


def one_line(error: Exception) -> str:
    """The first line of an exception's message, short enough to stand inside another."""
    return str(error).strip().partition("\n")[0][:_LONGEST_REASON]
