"""The embedded demo texts: always the same, labelled as they read, and trained on with no file and no network."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from entries import EntryServer
from laws import REPOSITORY

from pipetransformer.data.demo import demo_questions, demo_reviews, demo_tokenizer

DENIALS = ("not", "never", "hardly")


def test_a_review_is_as_its_main_clause_says() -> None:
    good = {"warm", "bright", "funny", "moving", "clever", "fresh", "graceful", "tender", "daring", "honest"}
    for split in ("train", "eval"):
        reviews = demo_reviews(split)
        for text, label in zip(reviews.first, reviews.labels.tolist(), strict=True):
            main = text.removesuffix(" .")
            if main.startswith("although "):
                main = main.partition(" , ")[2]
            main = main.partition(" , even if ")[0].rpartition(" , but ")[2]
            words = main.split()
            assert label == ((words[-1] in good) != any(word in DENIALS for word in words)), text


def test_splits_share_no_review_and_are_balanced() -> None:
    train, held_out = demo_reviews("train"), demo_reviews("eval")
    assert not set(train.first) & set(held_out.first)
    assert 0.45 < train.labels.mean() < 0.55 and 0.45 < held_out.labels.mean() < 0.55


def test_every_answer_is_where_it_says_and_is_the_only_one() -> None:
    for split in ("train", "eval"):
        for question in demo_questions(split):
            ((text, start),) = question.answers
            assert question.context[start : start + len(text)] == text
            who = who_of(question.question)
            (sentence,) = (s for s in question.context.split(" .") if text in s and who in s.split())
            assert text in sentence


def who_of(question: str) -> str:
    return next(word for word in question.split() if word in QUESTIONED)


QUESTIONED = {"anna", "boris", "clara", "david", "emil", "freya", "george", "hanna", "ivan", "julia", "karl", "lena"}


def test_every_process_trains_the_same_tokenizer() -> None:
    code = "from pipetransformer.data.demo import *; print(demo_tokenizer(demo_reviews('train').first))"
    ended = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=REPOSITORY)
    assert ended.stdout.strip() == demo_tokenizer(demo_reviews("train").first)


@pytest.fixture(scope="module")
def entries() -> EntryServer:
    return EntryServer()


@pytest.mark.parametrize(
    ("task", "config", "metric"),
    [("text_classification", "demo_text", "accuracy"), ("question_answering", "demo_qa", "f1")],
)
def test_demos_train_without_files_and_load_with_transformers(
    task: str, config: str, metric: str, entries: EntryServer, tmp_path: Path
) -> None:
    from transformers import AutoModel, AutoTokenizer

    short = ("train.epochs=1", "data.max_train_samples=256", "data.max_eval_samples=64", "log.wandb=disabled")
    path = REPOSITORY / "config" / f"train_config_{config}.yaml"
    ended = entries.run(task, path, *short, f"run.dir={tmp_path}", "run.id=demo")
    assert ended.exit_code == 0, ended
    assert metric in json.loads((tmp_path / "demo" / "summary.json").read_text())["metrics"]
    folder = tmp_path / "demo" / "model" / "final"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(["the plot is dull ."], ["anna lives in oslo ."], return_tensors="pt")
    assert batch["token_type_ids"].tolist()[0] == [0] * 7 + [1] * 6
    AutoModel.from_pretrained(folder)(**batch)


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["model.pretrained=true"], "model.name: bert could not be loaded"),
        (["data.path=somewhere"], "data.path: somewhere is not allowed; demo_text needs no files, leave the path out"),
        (["data.name=sst2"], "model.name: bert could not be loaded"),
        (["model.kwargs={hidden_sizes: 8}"], "model.kwargs: hidden_sizes is nothing that the configuration of bert"),
        (["data.max_length=65"], "data.max_length: 65 is more than bert can read; give at most 64"),
    ],
)
def test_a_type_of_model_needs_what_the_demo_brings(
    overrides: list[str], line: str, entries: EntryServer, tmp_path: Path
) -> None:
    path = REPOSITORY / "config" / "train_config_demo_text.yaml"
    ended = entries.run("text_classification", path, *overrides, f"run.dir={tmp_path}")
    assert ended.exit_code == 2
    assert ended.err[-1].startswith(f"error: {line}"), ended.err
    if "could not be loaded" in line:
        assert ended.err[-1].endswith("can be drawn at random for the demo texts, by model.pretrained=false")
