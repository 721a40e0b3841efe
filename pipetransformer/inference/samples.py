"""New data to predict: a file or a folder, or lines on standard input; with labels, to judge."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pipetransformer.config.datasets import DATASETS
from pipetransformer.data.glue import GLUE
from pipetransformer.data.image_folder import SUFFIXES
from pipetransformer.data.reading import LABEL_MARK, plain_values, split_labels, table_texts
from pipetransformer.data.squad import questions_of
from pipetransformer.data.tables import TABLES, column_names, read_table
from pipetransformer.errors import UserError
from pipetransformer.inference.saved import Saved

STDIN = "-"


@dataclass(frozen=True, slots=True)
class Samples:
    """Samples in their order.

    Attributes:
        names: one a sample, for the reader of the predictions: its path, its id, or its row from 1.
        samples: as ``open_predictor`` says.
        labels: the class or the score of each, or all right answers, as their source says; empty where it says nothing.
        kept: columns of a table to be given back beside the predictions, by name.
    """

    names: list[str]
    samples: list[Any]
    labels: list[Any]
    kept: dict[str, list[Any]] = field(default_factory=dict)


def read_samples(
    place: str,
    saved: Saved,
    *,
    columns: Sequence[str] = (),
    label: str | None = None,
    labelled: bool = False,
    kept: Sequence[str] = (),
) -> Samples:
    """Reads what ``saved`` can predict.

    Args:
        place: a file or a folder; ``-`` for lines on standard input, one text each, two with a tab between them.
        columns: the columns of a table's texts; by default those of the model's run.
        label: the column of a table's labels, likewise.
        labelled: whether labels are needed.
        kept: further columns of a table.

    Raises:
        UserError: naming the file.
    """
    if kept and Path(place).suffix not in TABLES:
        raise UserError(f"--keep: {place} is no table, and has no columns; leave it out")
    if saved.task == "image_classification":
        return _pictures(Path(place).expanduser(), labelled=labelled)
    if labelled and (place == STDIN or Path(place).suffix not in (*TABLES, ".json")):
        raise UserError(f"{place}: holds no labels to judge by; give a table that has a column of them")
    if place == STDIN:
        lines = [line.rstrip("\n") for line in sys.stdin if line.strip()]
        return _numbered([tuple(line.split("\t")) for line in lines], [], width=_width(saved))
    path = Path(place).expanduser()
    if not path.is_file():
        raise UserError(f"{place}: there is no such file; give a table, a text file, or - for standard input")
    if saved.task == "question_answering" and path.suffix == ".json":
        asked = list(questions_of(path))
        answers = [[text for text, _ in question.answers] for question in asked]
        return Samples([q.id for q in asked], [(q.question, q.context) for q in asked], answers)
    if path.suffix not in TABLES:
        try:
            lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{path}: is no UTF-8 text ({error}); save it as UTF-8, or give a table") from error
        return _numbered([tuple(line.split("\t")) for line in lines], [], width=_width(saved))
    found = _table(path, saved, columns=columns, label=label, labelled=labelled)
    if not kept:
        return found
    others = read_table(path, list(kept))
    return replace(found, kept={name: plain_values(others[name], name=name, source=path) for name in kept})


def _table(path: Path, saved: Saved, *, columns: Sequence[str], label: str | None, labelled: bool) -> Samples:
    there = column_names(path)
    wanted = tuple(columns) or text_columns(saved)
    label = label or label_column(saved)
    if not all(name in there for name in wanted):
        told = f"{path}: no column {', '.join(name for name in wanted if name not in there)}; there are"
        raise UserError(f"{told} {', '.join(there)}; name the texts with --columns")
    if labelled and label not in there:
        raise UserError(f"{path}: no column {label}; there are {', '.join(there)}; name the labels with --label")
    table = read_table(path, [*wanted, *([label] if label in there else [])])
    texts = [table_texts(table[name], name=name, source=path) for name in wanted]
    labels = plain_values(table[label], name=label, source=path) if label in there else []
    return _numbered(list(zip(*texts)), _named(labels, saved), width=len(wanted))


def _numbered(samples: list[tuple[str, ...]], labels: list[str], *, width: int) -> Samples:
    if not samples:
        raise UserError("there is nothing to predict: the input is empty")
    for row, sample in enumerate(samples, start=1):
        if len(sample) != width:
            raise UserError(f"row {row}: {len(sample)} texts between tabs, and the model takes {width}")
    return Samples([str(row) for row in range(1, len(samples) + 1)], samples, labels)


def _width(saved: Saved) -> int:
    """The number of texts of a sample."""
    return 2 if saved.task == "question_answering" else len(text_columns(saved))


def text_columns(saved: Saved) -> tuple[str, ...]:
    """The columns of the texts that the model was trained on."""
    if saved.task == "question_answering":
        return ("question", "context")
    data = saved.config.data if saved.config is not None else None
    if data is None:
        return tuple(saved.settings.get("text_columns", ("text",)))  # of a folder that export made
    return GLUE[data.name].columns if data.name in GLUE else data.text_columns


def label_column(saved: Saved) -> str:
    """The column of the labels that the model was trained on."""
    data = saved.config.data if saved.config is not None else None
    if data is None:
        return str(saved.settings.get("label_column", "label"))
    return GLUE[data.name].label if data.name in GLUE else data.label_column


def _named(labels: Sequence[object], saved: Saved) -> list[str]:
    """Labels as the model calls its classes: of GLUE's files, which may number them, by their names."""
    data = saved.config.data if saved.config is not None else None
    if data is None or data.name not in GLUE or DATASETS[data.name].kind != "classes":
        return [_as_text(label) for label in labels]
    names = dict(zip(GLUE[data.name].values, GLUE[data.name].names))
    return [names.get(str(label), str(label)) for label in labels]


def _as_text(label: object) -> str:
    """A label, or several with semicolons between them; empty where there is a gap."""
    if isinstance(label, list):
        return LABEL_MARK.join(split_labels(label))
    return "" if label is None else str(label)


def _pictures(place: Path, *, labelled: bool) -> Samples:
    """One picture, or all of a folder and its folders; a folder's name is the class."""
    if place.is_file():
        if labelled:
            raise UserError(f"{place}: is one picture, without a class; give a folder with a folder for each class")
        files = [place]
    elif place.is_dir():
        files = sorted(path for path in place.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
    else:
        raise UserError(f"{place}: there is no such file or folder; give a picture, or a folder of them")
    if not files:
        raise UserError(f"{place}: holds no pictures; at least 1 is needed")
    if labelled and any(path.parent == place for path in files):
        raise UserError(f"{place}: its pictures lie in no folder that names a class; give PLACE/CLASS/*.png")
    labels = [path.relative_to(place).parts[0] for path in files] if labelled else []
    return Samples([str(path) for path in files], list(files), labels)
