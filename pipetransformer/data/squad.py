"""SQuAD 1.1 (Rajpurkar et al., arXiv 1606.05250): the official JSON files, or the hub."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipetransformer.data.prepared import file_digest
from pipetransformer.data.reader import QuestionReader
from pipetransformer.data.reading import Question, hub_table, locate
from pipetransformer.errors import UserError

SQUAD_HUB_ID = "rajpurkar/squad"
_HUB_SPLITS = {"train": "train", "eval": "validation"}


class SquadReader(QuestionReader):
    def read(self, split: str, *, max_samples: int | None) -> Iterator[Question]:
        source = self._source(split)
        if isinstance(source, Path):
            return _json_questions(source)
        return _hub_questions(source, _HUB_SPLITS[split], max_samples)

    def place(self, split: str) -> str:
        source = self._source(split)
        return str(source) if isinstance(source, Path) else f"{source} ({_HUB_SPLITS[split]})"

    def digest(self, split: str) -> str | None:
        source = self._source(split)
        return file_digest(source) if isinstance(source, Path) else None

    def _source(self, split: str) -> Path | str:
        """The one ``train*.json`` or ``dev*.json`` of a local folder, or a hub id."""
        folder = locate(self.data, default_hub_id=SQUAD_HUB_ID)
        if isinstance(folder, str):
            return folder
        name = "train" if split == "train" else "dev"
        found = sorted(folder.glob(f"{name}*.json"))
        if len(found) != 1:
            raise UserError(f"data.path: {folder} holds {len(found)} files {name}*.json; one is needed")
        return found[0]


def _json_questions(path: Path) -> Iterator[Question]:
    try:
        articles = json.loads(path.read_text(encoding="utf-8"))["data"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: is no SQuAD file ({type(error).__name__}: {error})") from error
    number = 0
    try:
        for article in articles:
            for paragraph in article["paragraphs"]:
                for entry in paragraph["qas"]:
                    number += 1
                    yield _question(entry["id"], entry["question"], paragraph["context"], entry["answers"])
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path}: question {number} is not as SQuAD has it ({type(error).__name__}: {error})"
        ) from error


def _question(id_: Any, question: Any, context: Any, answers: Any) -> Question:
    """Raises KeyError or TypeError where something is missing or of another type."""
    pairs = tuple(dict.fromkeys((answer["text"], answer["answer_start"]) for answer in answers))
    for value, kind in ((id_, str), (question, str), (context, str), *((t, str) for t, _ in pairs)):
        if not isinstance(value, kind):
            raise TypeError(f"{value!r} is no text")
    for _, start in pairs:
        if not isinstance(start, int) or start < 0:
            raise TypeError(f"answer_start is {start!r}")
    return Question(id_, question, context, pairs)


def _hub_questions(location: str, split: str, max_samples: int | None) -> Iterator[Question]:
    columns = ("id", "question", "context", "answers")
    table = hub_table(location, config_name=None, split=split, columns=columns, max_samples=max_samples)
    for number, row in enumerate(table.to_pylist()):
        try:
            answers = row["answers"]
            pairs = [{"text": t, "answer_start": s} for t, s in zip(answers["text"], answers["answer_start"])]
            yield _question(row["id"], row["question"], row["context"], pairs)
        except (KeyError, TypeError) as error:
            raise UserError(f"{location} ({split}): row {number} is not as SQuAD has it ({error})") from error
