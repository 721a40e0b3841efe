"""SQuAD 1.1 (Rajpurkar et al., arXiv 1606.05250): the official JSON files, or the hub."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pipetransformer.data.reader import QuestionReader
from pipetransformer.data.reading import Question
from pipetransformer.errors import UserError


class SquadReader(QuestionReader):
    hub_id = "rajpurkar/squad"

    def read(self, split: str) -> Iterator[Question]:
        path = self.file(split)
        return self._hub_questions(split) if path is None else questions_of(path)

    def file(self, split: str) -> Path | None:
        """The one ``train*.json`` or ``dev*.json`` of a local folder."""
        folder = self.location
        if isinstance(folder, str):
            return None
        name = "train" if split == "train" else "dev"
        found = sorted(folder.glob(f"{name}*.json"))
        if len(found) != 1:
            raise UserError(f"data.path: {folder} holds {len(found)} files {name}*.json; one is needed")
        return found[0]

    def _hub_questions(self, split: str) -> Iterator[Question]:
        table = self.hub_table(split, ("id", "question", "context", "answers"))
        for number, row in enumerate(table.to_pylist()):
            try:
                answers = row["answers"]
                pairs = zip(answers["text"], answers["answer_start"])
                yield _question(row["id"], row["question"], row["context"], pairs)
            except (KeyError, TypeError) as error:
                raise UserError(f"{self.on_hub(split)}: row {number} is not as SQuAD has it ({error})") from error


def questions_of(path: Path) -> Iterator[Question]:
    """Those of an official file. Raises UserError."""
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
                    yield _question(
                        entry["id"],
                        entry["question"],
                        paragraph["context"],
                        [(answer["text"], answer["answer_start"]) for answer in entry["answers"]],
                    )
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path}: question {number} is not as SQuAD has it ({type(error).__name__}: {error})"
        ) from error


def _question(id_: Any, question: Any, context: Any, answers: Iterable[tuple[Any, Any]]) -> Question:
    """Raises TypeError where something is of another type. A whole number as id is taken as text."""
    pairs = tuple(dict.fromkeys(answers))
    id_ = str(id_) if isinstance(id_, int) and not isinstance(id_, bool) else id_
    for value in (id_, question, context, *(text for text, _ in pairs)):
        if not isinstance(value, str):
            raise TypeError(f"{value!r} is no text")
    for _, start in pairs:
        if not isinstance(start, int) or start < 0:
            raise TypeError(f"answer_start is {start!r}")
    return Question(id_, question, context, pairs)
