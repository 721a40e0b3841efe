"""SST-2 with more to judge by: full sentences of its training file held out, and phrases of all other sentences.

The training file holds phrases: spans of about 6,900 sentences. A phrase of a held-out sentence may not be trained on.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from pipetransformer.errors import UserError

__all__ = ["hold_out"]

Row = tuple[str, str]
Part = Literal["all", "judged", "tuned"]
_TUNED_FROM = 30_000  # lines of the training file: recipes are chosen by the later ones


def hold_out(
    source: Path, target: Path, *, num_train: int, num_held_out: int, part: Part = "all", seed: int = 0
) -> None:
    """Writes ``target/train.tsv`` and ``target/dev.tsv`` from the files of ``source``.

    ``dev.tsv`` gets the original's own lines and ``num_held_out`` full sentences of its training file; ``train.tsv``
    gets ``num_train`` phrases that are spans of none of these sentences.

    Args:
        part: the lines of the training file that phrases come from: ``judged``, the first 30,000; ``tuned``, all
            others. For ``tuned``, ``dev.tsv`` gets half of the other full sentences alone, and ``train.tsv`` phrases of
            the other half, so that nothing is chosen by what it is judged by. Sentences, not phrases of theirs: what
            costs accuracy on sentences may gain it on phrases, which are what is trained on.
        seed: of ``tuned``: draws the halves, and the phrases. What ``judged`` judges by is the same for all.

    Raises:
        UserError: if the files cannot be read, or hold too few sentences or phrases.
    """
    train, dev = (_rows(source / name) for name in ("train.tsv", "dev.tsv"))
    sentences = _full_sentences(train)
    if len(sentences) < num_held_out:
        raise UserError(f"--sst2: {source} has {len(sentences)} full sentences; hold out fewer than {num_held_out}")
    random = np.random.default_rng(0)
    order = [sentences[int(i)] for i in random.permutation(len(sentences))]
    held_out, others = order[:num_held_out], order[num_held_out:]
    judged = [*dev, *held_out]
    away = _all_spans(held_out)
    lines = {"all": train, "judged": train[:_TUNED_FROM], "tuned": train[_TUNED_FROM:]}[part]
    if part == "tuned":
        random = np.random.default_rng(1 + seed)
        half = [others[int(i)] for i in random.permutation(len(others))[: len(others) // 2]]
        lines = [row for row in lines if hash(row[0].strip()) not in away]
        judged, away = half, _all_spans(half)
    rest = [row for row in lines if hash(row[0].strip()) not in away]
    if len(rest) < num_train:
        raise UserError(f"--sst2: {source} leaves {len(rest)} phrases to train on; train on fewer than {num_train}")
    target.mkdir(parents=True, exist_ok=True)
    _write(target / "train.tsv", [rest[int(i)] for i in random.permutation(len(rest))[:num_train]])
    _write(target / "dev.tsv", judged)


def _full_sentences(rows: Sequence[Row]) -> list[Row]:
    """Phrases that are a span of no longer one, in the order of the file."""
    spans: set[int] = set()
    full: set[str] = set()
    for text, _ in sorted(rows, key=lambda row: -len(row[0].split())):
        if hash(text.strip()) not in spans:
            full.add(text)
            spans.update(_spans(text))
    return [row for row in dict(rows).items() if row[0] in full]


def _all_spans(rows: Sequence[Row]) -> set[int]:
    return {span for text, _ in rows for span in _spans(text)}


def _spans(text: str) -> Iterator[int]:
    """Hashes of all runs of words."""
    words = text.split()
    for first in range(len(words)):
        for stop in range(first + 1, len(words) + 1):
            yield hash(" ".join(words[first:stop]))


def _rows(path: Path) -> list[Row]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            lines = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    except OSError as error:
        raise UserError(f"--sst2: {path} cannot be read ({error.strerror}); give the task's folder") from error
    return [(text, label) for text, label in lines[1:]]


def _write(path: Path, rows: Sequence[Row]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        file.write("sentence\tlabel\n")
        file.writelines(f"{text}\t{label}\n" for text, label in rows)
