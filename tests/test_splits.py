"""Which file is which split, and which token an answer begins with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny import tiny_tokenizer

from pipetransformer.config import DataConfig
from pipetransformer.data import load_squad
from pipetransformer.data.info import describe
from pipetransformer.data.text import load_text_data

ENTAILMENT, NEUTRAL, CONTRADICTION = range(3)


def test_the_splits_of_mnli_have_their_own_files(tmp_path: Path) -> None:
    """On the hub they are validation_matched and validation_mismatched."""
    written = {
        "train.tsv": ["entailment", "neutral"],
        "dev_matched.tsv": ["neutral", "contradiction", "contradiction"],
        "dev_mismatched.tsv": ["entailment"],
    }
    for name, labels in written.items():
        rows = [f"{number}\tthe film\tthe plot\tneutral\t{label}" for number, label in enumerate(labels)]
        (tmp_path / name).write_text("\n".join(["index\tsentence1\tsentence2\tlabel1\tgold_label", *rows, ""]))
    data = DataConfig(name="mnli", path=str(tmp_path))
    found = load_text_data(data, info=describe(data), tokenizer=tiny_tokenizer())
    assert {split: dataset.labels.tolist() for split, dataset in found.items()} == {
        "train": [ENTAILMENT, NEUTRAL],
        "eval": [NEUTRAL, CONTRADICTION, CONTRADICTION],
        "mismatched": [ENTAILMENT],
    }


CONTEXT = "the film is dull and the plot is weak"


@pytest.mark.parametrize(
    ("answer", "start", "words"),
    [
        ("dull", 12, ["dull"]),
        ("ull", 13, ["dull"]),  # begins inside a word
        ("ull an", 13, ["dull", "and"]),  # and ends inside another
        ("eak", 34, ["weak"]),  # the last one
        ("he fil", 1, ["the", "film"]),
        ("l", 15, ["dull"]),
    ],
)
def test_an_answer_inside_a_word_has_the_whole_word(answer: str, start: int, words: list[str], tmp_path: Path) -> None:
    assert CONTEXT[start : start + len(answer)] == answer
    question = {"id": "q", "question": "the plot is", "answers": [{"text": answer, "answer_start": start}]}
    articles = [{"title": "t", "paragraphs": [{"context": CONTEXT, "qas": [question]}]}]
    for name in ("train-v1.1.json", "dev-v1.1.json"):
        (tmp_path / name).write_text(json.dumps({"version": "1.1", "data": articles}))
    data = DataConfig(name="squad", path=str(tmp_path), max_length=32, stride=4)
    tokenizer = tiny_tokenizer()
    dataset = load_squad(data, tokenizer=tokenizer)["train"]
    first, last = dataset.labels[0].tolist()
    ids = dataset.inputs([0], length=int(dataset.lengths[0]), epoch=0)["input_ids"][0]
    assert tokenizer.convert_ids_to_tokens(ids[first : last + 1].tolist()) == words
