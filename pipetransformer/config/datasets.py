"""The registry of datasets: each name with its task, its labels, and its reader's class as text.

A reader is imported when it is used: reading a configuration imports none. ``docs/extending.md`` shows how to add one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pipetransformer.config.registry import Registry

Task = Literal["image_classification", "text_classification", "question_answering"]
Kind = Literal["classes", "scores", "spans"]
"""The kinds of labels: a class, a number, or the first and the last token of an answer."""


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


def _pictures(reader: str) -> DatasetEntry:
    return DatasetEntry("image_classification", "classes", f"pipetransformer.data.{reader}")


def _texts(reader: str, *, kind: Kind = "classes") -> DatasetEntry:
    return DatasetEntry("text_classification", kind, f"pipetransformer.data.{reader}")


def _questions(reader: str) -> DatasetEntry:
    return DatasetEntry("question_answering", "spans", f"pipetransformer.data.{reader}")


DATASETS: Registry[DatasetEntry] = Registry(
    {
        "digits": _pictures("digits:DigitsReader"),
        "cifar10": _pictures("cifar:CifarReader"),
        "cifar100": _pictures("cifar:CifarReader"),
        "image_folder": _pictures("image_folder:FolderReader"),
        "cola": _texts("glue:GlueReader"),
        "sst2": _texts("glue:GlueReader"),
        "mrpc": _texts("glue:GlueReader"),
        "stsb": _texts("glue:GlueReader", kind="scores"),
        "qqp": _texts("glue:GlueReader"),
        "mnli": _texts("glue:GlueReader"),
        "qnli": _texts("glue:GlueReader"),
        "rte": _texts("glue:GlueReader"),
        "wnli": _texts("glue:GlueReader"),
        "table": _texts("tables:TableReader"),
        "demo_text": _texts("demo:DemoTextReader"),
        "squad": _questions("squad:SquadReader"),
        "demo_qa": _questions("demo:DemoQuestionReader"),
    },
    key="data.name",
)
