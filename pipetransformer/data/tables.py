"""A user's own texts: CSV, TSV, JSON, JSON lines or parquet, one file a split, columns named in the configuration."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet

from pipetransformer.config import DataConfig
from pipetransformer.data.reader import TextReader, parted
from pipetransformer.data.reading import (
    LABEL_MARK,
    Texts,
    count_lines,
    one_line,
    plain_values,
    require_columns,
    split_labels,
    table_texts,
)
from pipetransformer.errors import UserError

TABLES = (".csv", ".tsv", ".jsonl", ".json", ".parquet")
_LINES = (".csv", ".tsv", ".jsonl")  # of which a line is a row, but for texts of several lines
_MARKS = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}
_NAMES = {"train": ("train",), "eval": ("dev", "validation", "valid", "val", "eval")}
"""What a split's file may be called. A test set is none of them: what chooses the best weights is no test."""


_METRICS = {
    "classes": ("accuracy", "macro_f1"),
    "scores": ("pearson", "spearman", "r2"),
    "labels": ("micro_f1", "macro_f1", "subset_accuracy"),
}


class TableReader(TextReader):
    def __init__(self, data: DataConfig) -> None:
        super().__init__(data)
        self.metrics = _METRICS[data.kind]

    @property
    def location(self) -> Path | str:
        """As of all readers; or one file."""
        path = Path(self.data.path or "").expanduser()
        if path.suffix in TABLES and not path.exists():
            raise UserError(f"data.path: there is no file {path}")
        return path if self.data.path is not None and path.is_file() and path.suffix in TABLES else super().location

    def label_names(self) -> tuple[str, ...]:
        """The training split's labels, numbers in their order and names in the alphabet's; none of scores."""
        if self.data.kind == "scores":
            return ()
        found = self._labels(self._table("train"), "train")
        values = set(found) if self.data.kind == "classes" else {name for each in found for name in split_labels(each)}
        if len(values) < 2:
            column = self.data.label_column
            raise UserError(f"data.label_column: {column} has one label alone; at least 2 are needed")
        numeric = all(re.fullmatch(r"-?[0-9]+", value) for value in values)
        return tuple(sorted(values, key=lambda value: (int(value), value) if numeric else (0, value)))

    def read(self, split: str, *, label_names: tuple[str, ...]) -> Texts:
        """A message names the file and the row (from 0)."""
        table, source = self._table(split), self.place(split)
        if self._is_parted:
            table = table.take(parted(self._labels(table, split), fraction=self._fraction)[split])
        texts = [table_texts(table[column], name=column, source=source) for column in self.data.text_columns]
        if self.data.kind == "scores":
            labels = self._scores(table, split)
        else:
            labels = self._numbers(self._labels(table, split), label_names, source=source)
        path = self.file(split)
        lines = count_lines(path) if path is not None and path.suffix in _LINES and not self._is_parted else -1
        return Texts(labels, *texts, lines=lines)

    def _numbers(self, labels: Sequence[str], label_names: tuple[str, ...], *, source: str) -> np.ndarray:
        """The class of each sample, int64 [samples]; of several labels 1 for each, float32 [samples, labels]."""
        numbers, several = {name: number for number, name in enumerate(label_names)}, self.data.kind == "labels"
        found = np.zeros((len(labels), len(numbers)), np.float32) if several else np.zeros(len(labels), np.int64)
        for row, value in enumerate(labels):
            for name in split_labels(value) if several else [value]:
                if name not in numbers:
                    raise UserError(f"{source}: row {row}: label {name!r} is not in the training split")
                found[(row, numbers[name]) if several else row] = 1 if several else numbers[name]
        return found

    def _scores(self, table: pa.Table, split: str) -> np.ndarray:
        """float32 [samples]."""
        name, source = self.data.label_column, self.place(split)
        column = table[name]
        if not (pa.types.is_floating(column.type) or pa.types.is_integer(column.type)):
            raise UserError(f"{source}: column {name} is {column.type}; numbers are needed for data.label_kind scores")
        found: np.ndarray = column.cast(pa.float64(), safe=False).fill_null(float("nan")).to_numpy().astype(np.float32)
        if len(bad := np.flatnonzero(~np.isfinite(found))):
            raise UserError(f"{source}: row {bad[0]}: there is no number in column {name}")
        return found

    def file(self, split: str) -> Path | None:
        """None where ``data.path`` is a hub id. Raises UserError where there is no file or two."""
        if self.data.path is None:
            raise UserError("data.path: missing; give the folder of your train and validation files, or a hub id")
        place, apart = self.location, self.data.eval_fraction is None
        if isinstance(place, str):
            return None
        if place.is_file():
            if apart:
                raise UserError(
                    f"data.path: {place} is one file; give data.eval_fraction=0.2 to keep a fifth of it to evaluate "
                    "on, or a folder with a train and a dev file"
                )
            return place
        found = self._found(place, split)
        if found is None and split == "eval" and not apart:
            return self._found(place, "train")
        if found is None:
            raise self._nothing(place, split)
        if split == "eval" and not apart:
            raise UserError(f"data.eval_fraction: {found} is there to evaluate on; leave the fraction out, or the file")
        return found

    def _found(self, folder: Path, split: str) -> Path | None:
        names = [self.data.splits[split]] if split in self.data.splits else _NAMES[split]
        paths = [folder / f"{name}{suffix}" for name in names for suffix in TABLES]
        there = [path for path in paths if path.is_file()]
        if len(there) > 1:
            raise UserError(f"data.path: {folder} holds both {there[0].name} and {there[1].name}; leave one")
        return there[0] if there else None

    def _nothing(self, folder: Path, split: str) -> UserError:
        if split in self.data.splits:
            return UserError(f"data.splits: {folder} holds no file {self.data.splits[split]}.csv, .tsv, .jsonl ...")
        names = " or ".join(_NAMES[split])
        if split == "train":
            return UserError(f"data.path: {folder} holds no {names} file; give one in csv, tsv, jsonl, json or parquet")
        has_test = any((folder / f"test{suffix}").is_file() for suffix in TABLES)
        test = ", or data.splits={eval: test} to choose the best weights by the test set" if has_test else ""
        return UserError(
            f"data.path: {folder} holds no {names} file; give one, or data.eval_fraction=0.1 to keep a tenth of the "
            f"training data{test}"
        )

    @property
    def _fraction(self) -> float:
        fraction = self.data.eval_fraction
        assert fraction is not None
        return fraction

    @property
    def _is_parted(self) -> bool:
        """Whether both splits are of one file."""
        return self.data.eval_fraction is not None and not isinstance(self.location, str)

    def digest(self, split: str) -> str | None:
        found = super().digest(split)
        return f"{found} {split} {self._fraction}" if self._is_parted else found

    def _table(self, split: str) -> pa.Table:
        """The columns that are needed."""
        columns, path = (*self.data.text_columns, self.data.label_column), self.file(split)
        remedy = "; name them with data.text_columns and data.label_column"
        return self.hub_table(split, columns) if path is None else read_table(path, columns, remedy=remedy)

    def _labels(self, table: pa.Table, split: str) -> list[str]:
        name, source = self.data.label_column, self.place(split)
        column, kind = table[name], self.data.kind
        if kind == "scores":
            return [str(value) for value in column.to_pylist()]
        kinds = (pa.types.is_integer, pa.types.is_string, pa.types.is_large_string, pa.types.is_boolean)
        several = (pa.types.is_list, pa.types.is_large_list, pa.types.is_null) if kind == "labels" else ()
        if not any(fits(column.type) for fits in (*kinds, *several)):
            is_number = pa.types.is_floating(column.type)
            remedy = "; if they are to be predicted, give data.label_kind=scores" if is_number else ""
            raise UserError(f"{source}: column {name} is {column.type}; names or whole numbers are needed{remedy}")
        values = plain_values(column, name=name, source=source)
        if kind == "labels":
            return [LABEL_MARK.join(split_labels(value)) for value in values]
        for row, value in enumerate(values):
            if value in (None, ""):
                raise UserError(f"{source}: row {row}: there is no label in column {name}")
        return [str(value) for value in values]


def column_names(path: Path) -> list[str]:
    """Raises UserError as ``read_table`` does."""
    return list(_whole_table(path).column_names)


def read_table(path: Path, columns: Sequence[str], *, remedy: str = "") -> pa.Table:
    """These columns of a file in csv, tsv, jsonl, json or parquet.

    Args:
        remedy: the end of the message for one that is missing.

    Raises:
        UserError: naming the file, and the mistake in it.
    """
    table = _whole_table(path)
    if (only := table.column_names)[1:] == [] and only and ";" in only[0] and columns[0] not in only:
        raise UserError(f"{path}: its columns are separated by semicolons ({only[0]}); save it with commas, or tabs")
    require_columns(table.column_names, columns, source=path, remedy=remedy)
    if not len(table):
        raise UserError(f"{path}: holds no samples; at least 1 is needed")
    if twice := [name for name in columns if table.column_names.count(name) > 1]:
        raise UserError(f"{path}: two columns are called {twice[0]}; rename one")
    return table.select(list(dict.fromkeys(columns)))


def _whole_table(path: Path) -> pa.Table:
    try:
        _check_encoding(path)
        return _read(path)
    except (pa.ArrowException, OSError, ValueError, RecursionError) as error:
        if path.suffix == ".csv" and path.is_file():
            header = path.open(encoding="utf-8", errors="replace").readline()
            if header.count(";") > header.count(","):
                told = header.strip()[:80]
                raise UserError(
                    f"{path}: its columns are separated by semicolons ({told}); save it with commas, or tabs"
                ) from error
        raise UserError(f"{path}: cannot be read as {path.suffix[1:]} ({one_line(error)})") from error


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
