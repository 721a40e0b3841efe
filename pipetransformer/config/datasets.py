"""The registry of datasets: each name with its task, its labels, and its reader's class as text.

A reader is imported when it is used: reading a configuration imports none. ``docs/extending.md`` shows how to add one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pipetransformer.config.registry import Registry

Task = Literal["image_classification", "text_classification", "question_answering", "own"]
"""``own``: a module and datasets that are given from Python (``launch/python.py``)."""
Kind = Literal["classes", "scores", "labels", "spans"]
"""The kinds of labels: a class, a number, any of several labels, or the first and the last token of an answer."""


@dataclass(frozen=True, slots=True)
class DatasetEntry:
    """The facts that a configuration is checked against before anything is read.

    Attributes:
        task: the task that it is for.
        kind: the kind of its labels.
        reader: the class that reads it, a ``Reader`` (``data/reader.py``), as ``package.module:Class``.
    """

    task: Task
    kind: Kind
    reader: str


def _ours(task: Task, reader: str, *, kind: Kind = "classes") -> DatasetEntry:
    return DatasetEntry(task, kind, f"pipetransformer.data.{reader}")


_GLUE = _ours("text_classification", "glue:GlueReader")
DATASETS: Registry[DatasetEntry] = Registry(
    {
        "digits": _ours("image_classification", "digits:DigitsReader"),
        "cifar10": _ours("image_classification", "cifar:CifarReader"),
        "cifar100": _ours("image_classification", "cifar:Cifar100Reader"),
        "image_folder": _ours("image_classification", "image_folder:FolderReader"),
        **dict.fromkeys(("cola", "sst2", "mrpc"), _GLUE),
        "stsb": _ours("text_classification", "glue:GlueReader", kind="scores"),
        **dict.fromkeys(("qqp", "mnli", "qnli", "rte", "wnli"), _GLUE),
        "table": _ours("text_classification", "tables:TableReader"),
        "demo_text": _ours("text_classification", "demo:DemoTextReader"),
        "squad": _ours("question_answering", "squad:SquadReader", kind="spans"),
        "demo_qa": _ours("question_answering", "demo:DemoQuestionReader", kind="spans"),
    },
    key="data.name",
)
