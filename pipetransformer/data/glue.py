"""The nine GLUE tasks (Wang et al., arXiv 1804.07461) from their official TSV files or from the hub.

Class numbers are those of the hub's ``nyu-mll/glue``, so that a model trained from files fits data from the hub.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from pipetransformer.config import DataConfig
from pipetransformer.data.reader import TextReader
from pipetransformer.data.reading import Texts, count_lines, require_columns, table_labels, table_texts
from pipetransformer.errors import UserError

_SPLITS = {"train": ("train.tsv", "train"), "eval": ("dev.tsv", "validation")}
_ENTAILMENT = ("entailment", "not_entailment")


@dataclass(frozen=True, slots=True)
class GlueTask:
    """The storage and the metrics of one task.

    Attributes:
        names: names of the classes; none where the label is a score.
        columns: the files' columns of the texts, one or two.
        label: the files' column of the label.
        values: a class's label in the files, by its number; none for scores.
        metrics: the metrics of GLUE; the first ranks models.
        splits: file, and split of the hub, by split.
        header: the columns of files without a header line.
        hub_columns: columns of the texts on the hub, where they have other names.
        may_skip: the official file is known to hold lines that lack columns; they are left out.
    """

    names: tuple[str, ...]
    columns: tuple[str, ...]
    label: str = "label"
    values: tuple[str, ...] = ("0", "1")
    metrics: tuple[str, ...] = ("accuracy",)
    splits: Mapping[str, tuple[str, str]] = field(default_factory=lambda: _SPLITS)
    header: tuple[str, ...] = ()
    hub_columns: tuple[str, ...] = ()
    may_skip: bool = False


_PAIR = ("sentence1", "sentence2")
GLUE: Mapping[str, GlueTask] = {
    "cola": GlueTask(
        names=("unacceptable", "acceptable"),
        columns=("sentence",),
        metrics=("matthews_correlation",),
        header=("source", "label", "star", "sentence"),
    ),
    "sst2": GlueTask(names=("negative", "positive"), columns=("sentence",)),
    "mrpc": GlueTask(
        names=("not_equivalent", "equivalent"),
        columns=("#1 String", "#2 String"),
        label="Quality",
        metrics=("f1", "accuracy"),
        hub_columns=_PAIR,
    ),
    "stsb": GlueTask(names=(), columns=_PAIR, label="score", values=(), metrics=("pearson", "spearman")),
    "qqp": GlueTask(
        names=("not_duplicate", "duplicate"),
        columns=("question1", "question2"),
        label="is_duplicate",
        metrics=("f1", "accuracy"),
        may_skip=True,
    ),
    "mnli": GlueTask(
        names=(mnli := ("entailment", "neutral", "contradiction")),
        columns=_PAIR,
        label="gold_label",
        values=mnli,
        splits={
            "train": _SPLITS["train"],
            "eval": ("dev_matched.tsv", "validation_matched"),
            "mismatched": ("dev_mismatched.tsv", "validation_mismatched"),
        },
    ),
    "qnli": GlueTask(names=_ENTAILMENT, columns=("question", "sentence"), values=_ENTAILMENT),
    "rte": GlueTask(names=_ENTAILMENT, columns=_PAIR, values=_ENTAILMENT),
    "wnli": GlueTask(names=("not_entailment", "entailment"), columns=_PAIR),
}


class GlueReader(TextReader):
    hub_id = "nyu-mll/glue"

    def __init__(self, data: DataConfig) -> None:
        super().__init__(data)
        self._task = GLUE[data.name]
        self.names, self.metrics, self.splits = self._task.names, self._task.metrics, tuple(self._task.splits)
        self.hub_splits = {**{split: on_hub for split, (_, on_hub) in self._task.splits.items()}, **data.splits}

    def file(self, split: str) -> Path | None:
        folder, name = self.location, self._task.splits[split][0]
        if isinstance(folder, str):
            return None
        if not (folder / name).is_file():
            below = next((path.parent for path in sorted(folder.glob(f"*/{name}"))), None)
            there = f"give {below}, if it is the task" if below else "give the folder that holds the task's files"
            raise UserError(f"data.path: {folder} holds no {name}; {there}")
        return folder / name

    def read(self, split: str, *, label_names: tuple[str, ...]) -> Texts:
        """A message names the file and the line."""
        task, path = self._task, self.file(split)
        if path is not None:
            return _read_tsv(path, task)
        # GLUE is many datasets under one id; an id of its own needs no configuration.
        config_name = self.data.name if self.location == self.hub_id else None
        columns, source = task.hub_columns or task.columns, self.on_hub(split)
        table = self.hub_table(split, (*columns, "label"), config_name=config_name)
        texts = [table_texts(table[column], name=column, source=source) for column in columns]
        labels = table_labels(table["label"], name="label", num_labels=len(task.names), source=source)
        return Texts(labels, *texts)


def _read_tsv(path: Path, task: GlueTask) -> Texts:
    """GLUE quotes nothing: a line is a row, a tab is a column. Lines are counted from 1 in messages, as editors do."""
    texts: list[list[str]] = [[] for _ in task.columns]
    labels: list[float] = []
    torn: list[str] = []
    for source, fields in _rows(path, task, torn=torn):
        labels.append(_label(fields[task.label].strip(), task, source=source))
        for column, values in zip(task.columns, texts):
            values.append(fields[column])
    if not labels:
        raise UserError(f"{path}: holds no samples; at least 1 is needed")
    numbers = np.array(labels, dtype=np.int64 if task.names else np.float32)
    return Texts(numbers, *texts, lines=count_lines(path), left_out=len(torn))


def _rows(path: Path, task: GlueTask, *, torn: list[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """The lines of a file, each with where it stands and its fields by column. The places of those that are known to
    lack columns go to ``torn``."""
    with path.open("rb") as lines:
        header = list(task.header) or _fields(next(lines, b""), source=f"{path}:1")
        require_columns(header, (*task.columns, task.label), source=f"{path}:1")
        for number, line in enumerate(lines, start=1 if task.header else 2):
            source = f"{path}:{number}"
            fields = _fields(line, source=source)
            if len(fields) != len(header):
                if task.may_skip and len(fields) < len(header):
                    torn.append(source)
                    continue
                raise UserError(f"{source}: {len(fields)} columns between tabs; the header has {len(header)}")
            yield source, dict(zip(header, fields))


def _label(text: str, task: GlueTask, *, source: str) -> float:
    if task.names:
        if text not in task.values:
            *others, last = task.values
            raise UserError(f"{source}: label {text!r} is not allowed; give {', '.join(others)} or {last}")
        return task.values.index(text)
    try:
        score = float(text)
    except ValueError:
        score = math.nan
    if not math.isfinite(score):
        raise UserError(f"{source}: score {text!r} is not allowed; give a number")
    return score


def _fields(line: bytes, *, source: str) -> list[str]:
    try:
        return line.decode("utf-8-sig").rstrip("\r\n").split("\t")
    except UnicodeDecodeError as error:
        raise UserError(f"{source}: not UTF-8 text ({error.reason})") from error
