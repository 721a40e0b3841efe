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

from pipetransformer.data.reader import TextReader
from pipetransformer.data.reading import Texts, count_lines, one_line, plain_values, require_columns, table_texts
from pipetransformer.errors import UserError

_SUFFIXES = (".csv", ".tsv", ".jsonl", ".json", ".parquet")
_LINES = (".csv", ".tsv", ".jsonl")  # of which a line is a row, but for texts of several lines
_MARKS = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}
_NAMES = {"train": (("train",),), "eval": (("dev", "validation", "valid", "eval"), ("test",))}
"""What a split's file may be called; the first group that has a file counts."""


class TableReader(TextReader):
    def label_names(self) -> tuple[str, ...]:
        """The training split's labels, numbers in their order and names in the alphabet's."""
        values = set(self._labels(self._table("train"), "train"))
        if len(values) < 2:
            column = self.data.label_column
            raise UserError(f"data.label_column: {column} has one label alone; at least 2 are needed")
        numeric = all(re.fullmatch(r"-?[0-9]+", value) for value in values)
        return tuple(sorted(values, key=lambda value: (int(value), value) if numeric else (0, value)))

    def read(self, split: str, *, label_names: tuple[str, ...]) -> Texts:
        """A message names the file and the row (from 0)."""
        table, source = self._table(split), self.place(split)
        texts = [table_texts(table[column], name=column, source=source) for column in self.data.text_columns]
        numbers = {name: number for number, name in enumerate(label_names)}
        labels = []
        for row, value in enumerate(self._labels(table, split)):
            if value not in numbers:
                raise UserError(f"{source}: row {row}: label {value!r} is not in the training split")
            labels.append(numbers[value])
        path = self.file(split)
        lines = count_lines(path) if path is not None and path.suffix in _LINES else -1
        return Texts(np.array(labels, dtype=np.int64), *texts, lines=lines)

    def file(self, split: str) -> Path | None:
        """None where ``data.path`` is a hub id. Raises UserError where there is no file or two."""
        if self.data.path is None:
            raise UserError("data.path: missing; give the folder of your train and validation files, or a hub id")
        folder = self.location
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

    def _table(self, split: str) -> pa.Table:
        """The columns that are needed."""
        columns, path = (*self.data.text_columns, self.data.label_column), self.file(split)
        if path is None:
            return self.hub_table(split, columns)
        try:
            _check_encoding(path)
            table = _read(path)
        except (pa.ArrowException, OSError, ValueError, RecursionError) as error:
            raise UserError(f"{path}: cannot be read as {path.suffix[1:]} ({one_line(error)})") from error
        if (only := table.column_names)[1:] == [] and only and ";" in only[0] and columns[0] not in only:
            raise UserError(
                f"{path}: its columns are separated by semicolons ({only[0]}); save it with commas, or tabs"
            )
        require_columns(table.column_names, columns, source=path)
        if not len(table):
            raise UserError(f"{path}: holds no samples; at least 1 is needed")
        if twice := [name for name in columns if table.column_names.count(name) > 1]:
            raise UserError(f"{path}: two columns are called {twice[0]}; rename one")
        return table.select(list(dict.fromkeys(columns)))

    def _labels(self, table: pa.Table, split: str) -> list[str]:
        name, source = self.data.label_column, self.place(split)
        column = table[name]
        kinds = (pa.types.is_integer, pa.types.is_string, pa.types.is_large_string, pa.types.is_boolean)
        if not any(fits(column.type) for fits in kinds):
            raise UserError(f"{source}: column {name} is {column.type}; names or whole numbers are needed")
        values = plain_values(column, name=name, source=source)
        for row, value in enumerate(values):
            if value in (None, ""):
                raise UserError(f"{source}: row {row}: there is no label in column {name}")
        return [str(value) for value in values]


def _check_encoding(path: Path) -> None:
    """Raises UserError for a file of text in another encoding than UTF-8."""
    if path.suffix == ".parquet":
        return
    number = 0
    with path.open("rb") as file:
        known = _MARKS.get(file.read(2))
        file.seek(0)
        try:
            for line in file:
                number += 1
                line.decode("utf-8")
        except UnicodeDecodeError as error:
            found = f"it is {known}" if known else f"line {number} is not ({error.reason}); it may be Latin-1"
            raise UserError(f"{path}: is no UTF-8 text: {found}; save it as UTF-8") from error


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
    if path.suffix == ".csv":
        return pa.csv.read_csv(path, parse_options=pa.csv.ParseOptions(newlines_in_values=True))
    return _tabbed(path)


def _tabbed(path: Path) -> pa.Table:
    """Between tabs, a quotation mark is text, unless all that begin a field end it too: a text that merely begins with
    one would swallow the lines up to the next."""
    with path.open(encoding="utf-8", errors="replace") as file:
        begun = (field for line in file for field in line.rstrip("\r\n").split("\t") if field.startswith('"'))
        encloses = all(len(field) > 1 and field.endswith('"') for field in begun)
    options = pa.csv.ParseOptions(delimiter="\t", quote_char='"' if encloses else False)
    return pa.csv.read_csv(path, parse_options=options)
