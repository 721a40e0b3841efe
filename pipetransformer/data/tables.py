"""A user's own texts: CSV, TSV, JSON, JSON lines or parquet, one file a split, columns named in the configuration."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet

from pipetransformer.config import DataConfig
from pipetransformer.data.prepared import file_digest
from pipetransformer.data.reader import TextReader
from pipetransformer.data.reading import Texts, hub_table, locate, one_line, require_columns, table_texts
from pipetransformer.errors import UserError

_SUFFIXES = (".csv", ".tsv", ".jsonl", ".json", ".parquet")
_NAMES = {"train": (("train",),), "eval": (("dev", "validation", "valid", "eval"), ("test",))}
"""What a split's file may be called; the first group that has a file counts."""


class TableReader(TextReader):
    def label_names(self) -> tuple[str, ...]:
        return table_label_names(self.data)

    def read(self, split: str, *, label_names: tuple[str, ...], max_samples: int | None) -> Texts:
        return read_table_texts(self.data, split=split, label_names=label_names, max_samples=max_samples)

    def digest(self, split: str) -> str | None:
        path = table_file(self.data, split)
        return None if path is None else file_digest(path)


def table_label_names(data: DataConfig) -> tuple[str, ...]:
    """The classes: the training split's labels, numbers in their order and names in the alphabet's."""
    values = set(_label_texts(*_table(data, "train"), data))
    if len(values) < 2:
        raise UserError(f"data.label_column: {data.label_column} has one label alone; at least 2 are needed")
    numeric = all(re.fullmatch(r"-?[0-9]+", value) for value in values)
    return tuple(sorted(values, key=lambda value: (int(value), value) if numeric else (0, value)))


def read_table_texts(data: DataConfig, *, split: str, label_names: tuple[str, ...], max_samples: int | None) -> Texts:
    """The first ``max_samples`` samples of a split. Raises UserError, naming the file and the row (from 0)."""
    table, source = _table(data, split)
    table = table.slice(0, max_samples)
    if not len(table):
        raise UserError(f"{source}: holds no samples; at least 1 is needed")
    texts = [table_texts(table[column], name=column, source=source) for column in data.text_columns]
    numbers = {name: number for number, name in enumerate(label_names)}
    labels = []
    for row, value in enumerate(_label_texts(table, source, data)):
        if value not in numbers:
            raise UserError(f"{source}: row {row}: label {value!r} is not in the training split")
        labels.append(numbers[value])
    return Texts(texts[0], texts[1] if len(texts) > 1 else None, np.array(labels, dtype=np.int64))


def _table(data: DataConfig, split: str) -> tuple[pa.Table, str]:
    """A split's columns that are needed, and how to name it in messages."""
    columns = (*data.text_columns, data.label_column)
    path = table_file(data, split)
    if path is None:
        location, hub_split = str(data.path), "train" if split == "train" else "validation"
        table = hub_table(location, config_name=None, split=hub_split, columns=columns, max_samples=None)
        return table, f"{location} ({hub_split})"
    try:
        table = _read(path)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as {path.suffix[1:]} ({one_line(error)})") from error
    require_columns(table.column_names, columns, source=path)
    if not len(table):
        raise UserError(f"{path}: holds no samples; at least 1 is needed")
    if twice := [name for name in columns if table.column_names.count(name) > 1]:
        raise UserError(f"{path}: two columns are called {twice[0]}; rename one")
    return table.select(list(dict.fromkeys(columns))), str(path)


def table_file(data: DataConfig, split: str) -> Path | None:
    """The local file of a split; None where ``data.path`` is a hub id. Raises UserError where there is none or two."""
    if data.path is None:
        raise UserError("data.path: missing; give the folder of your train and validation files, or a hub id")
    folder = locate(data, default_hub_id="")
    if isinstance(folder, str):
        return None
    groups = [[folder / f"{name}{suffix}" for name in names for suffix in _SUFFIXES] for names in _NAMES[split]]
    found = next((there for group in groups if (there := [path for path in group if path.is_file()])), [])
    if not found:
        names = " or ".join(name for group in _NAMES[split] for name in group)
        raise UserError(f"data.path: {folder} holds no {names} file; give one in csv, tsv, jsonl, json or parquet")
    if len(found) > 1:
        raise UserError(f"data.path: {folder} holds both {found[0].name} and {found[1].name}; leave one")
    return found[0]


def _read(path: Path) -> pa.Table:
    if path.suffix == ".parquet":
        return pa.parquet.read_table(path)
    if path.suffix == ".jsonl":
        return pa.json.read_json(path, parse_options=pa.json.ParseOptions(newlines_in_values=False))
    if path.suffix == ".json":
        rows = json.loads(path.read_text(encoding="utf-8"))
        if not (isinstance(rows, list) and all(isinstance(row, dict) for row in rows)):
            raise ValueError("a list of objects is needed")
        return pa.Table.from_pylist(rows)
    delimiter = "\t" if path.suffix == ".tsv" else ","
    options = pa.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
    return pa.csv.read_csv(path, parse_options=options)


def _label_texts(table: pa.Table, source: str, data: DataConfig) -> list[str]:
    column, name = table[data.label_column], data.label_column
    kinds = (pa.types.is_integer, pa.types.is_string, pa.types.is_large_string, pa.types.is_boolean)
    if not any(fits(column.type) for fits in kinds):
        raise UserError(f"{source}: column {name} is {column.type}; names or whole numbers are needed")
    values = column.to_pylist()
    if None in values or "" in values:
        row = next(row for row, value in enumerate(values) if value in (None, ""))
        raise UserError(f"{source}: row {row}: there is no label in column {name}")
    return [str(value) for value in values]
