"""GLUE SST-2, sentences and their sentiment, from the official TSV files or the hub."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa

from pipetransformer.data.sources import checked_labels, hub_table, require_columns
from pipetransformer.errors import UserError

__all__ = ["SST2_HUB_ID", "SST2_NAMES", "read_sst2"]

SST2_HUB_ID = "nyu-mll/glue"
SST2_NAMES = ("negative", "positive")
_COLUMNS = ("sentence", "label")


def read_sst2(location: Path | str, *, train: bool, max_samples: int | None) -> tuple[list[str], np.ndarray]:
    """The first ``max_samples`` sentences and their labels int64; the training file is shuffled already.

    Args:
        location: the local folder of train.tsv and dev.tsv, or a hub id.
    """
    if isinstance(location, Path):
        return _read_tsv(location / ("train.tsv" if train else "dev.tsv"), max_samples=max_samples)
    split = "train" if train else "validation"
    # GLUE is many datasets under one id; an id of its own needs no configuration.
    config_name = "sst2" if location == SST2_HUB_ID else None
    table = hub_table(location, config_name=config_name, split=split, columns=_COLUMNS, max_samples=max_samples)
    return _checked(table, source=f"{location} ({split})")


def _read_tsv(path: Path, *, max_samples: int | None) -> tuple[list[str], np.ndarray]:
    """GLUE quotes nothing: a line is a row, a tab is a column. Lines are counted from 1 in messages, as editors do."""
    if not path.is_file():
        raise UserError(f"data.path: {path.parent} holds no {path.name}")
    sentences: list[str] = []
    labels: list[int] = []
    with path.open("rb") as lines:
        header = _fields(next(lines, b""), source=f"{path}:1")
        require_columns(header, _COLUMNS, source=f"{path}:1")
        sentence_column, label_column = map(header.index, _COLUMNS)
        for number, line in enumerate(lines, start=2):
            if len(sentences) == max_samples:
                break
            fields = _fields(line, source=f"{path}:{number}")
            if len(fields) != len(header):
                raise UserError(f"{path}:{number}: {len(fields)} columns between tabs; the header has {len(header)}")
            label = fields[label_column].strip()
            if label not in ("0", "1"):
                raise UserError(f"{path}:{number}: label {label!r} is not allowed; give 0 or 1")
            sentences.append(fields[sentence_column])
            labels.append(int(label))
    if not sentences:
        raise UserError(f"{path}: holds no samples; at least 1 is needed")
    return sentences, np.array(labels, dtype=np.int64)


def _fields(line: bytes, *, source: str) -> list[str]:
    try:
        return line.decode("utf-8").rstrip("\r\n").split("\t")
    except UnicodeDecodeError as error:
        raise UserError(f"{source}: not UTF-8 text ({error.reason})") from error


def _checked(table: pa.Table, *, source: str) -> tuple[list[str], np.ndarray]:
    column = table["sentence"]
    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        raise UserError(f"{source}: column sentence is {column.type}; strings are needed")
    sentences = column.to_pylist()
    if None in sentences:
        raise UserError(f"{source}: row {sentences.index(None)}: there is no sentence")
    return sentences, checked_labels(table["label"], name="label", num_labels=len(SST2_NAMES), source=source)
