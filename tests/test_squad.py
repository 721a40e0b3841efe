"""SQuAD: every answer lies in a window, and answers put together again score as the official scorer says."""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from laws import TWO_RANKS, Case, configuration, deviation, elastic_run, grow_biases, plain_outputs, reference
from ranks import RankPool
from tiny import tiny_tokenizer

from pipetransformer.config import DataConfig
from pipetransformer.data import alone, load_squad
from pipetransformer.data.questions import SquadDataset, best_span, read_squad
from pipetransformer.data.reading import Extent, Question
from pipetransformer.errors import UserError
from pipetransformer.process.world import World
from pipetransformer.run.job import build_job

CONTEXT = "the film is dull and the plot is weak , although the cast seems warm and funny and every joke feels clever ."


def article(*questions: tuple[str, str, str], context: str = CONTEXT) -> dict[str, object]:
    """One article of (id, question, answer)."""
    entries = [
        {"id": name, "question": question, "answers": [{"text": text, "answer_start": context.index(text)}]}
        for name, question, text in questions
    ]
    return {"title": "t", "paragraphs": [{"context": context, "qas": entries}]}


def write(folder: Path, train: object, dev: object | None = None) -> Path:
    for name, articles in (("train-v1.1.json", train), ("dev-v1.1.json", dev if dev is not None else train)):
        (folder / name).write_text(json.dumps({"version": "1.1", "data": articles}))
    return folder


def settings(folder: Path, **values: object) -> DataConfig:
    return DataConfig(**{"name": "squad", "path": str(folder), "max_length": 20, "stride": 4, **values})


def official_scores(predictions: Mapping[str, str], questions: list[Question]) -> dict[str, float]:
    """Exact match and F1 in per cent, written anew from the published definition."""

    def words(text: str) -> list[str]:
        text = "".join(character for character in text.lower() if character not in set(string.punctuation))
        return re.sub(r"\b(a|an|the)\b", " ", text).split()

    def overlap(said: list[str], true: list[str]) -> float:
        same = sum((Counter(said) & Counter(true)).values())
        return 2 * same / (len(said) + len(true)) if same else 0.0

    exact = f1 = 0.0
    for question in questions:
        said = words(predictions[question.id])
        exact += max(float(said == words(text)) for text, _ in question.answers)
        f1 += max(overlap(said, words(text)) for text, _ in question.answers)
    return {"exact_match": 100 * exact / len(questions), "f1": 100 * f1 / len(questions)}


QUESTIONS = (
    ("q1", "the plot is", "weak"),
    ("q2", "every joke feels", "clever"),
    ("q3", "the film is", "dull and the plot"),
)


def test_windows_overlap_and_hold_the_answers(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    train = load_squad(settings(write(tmp_path, [article(*QUESTIONS)])), tokenizer=tokenizer)["train"]
    assert isinstance(train, SquadDataset)
    assert len(train) > len(QUESTIONS) and train.num_tokens.max() <= 20
    found: dict[int, set[str]] = {0: set(), 1: set(), 2: set()}
    for window in range(len(train)):
        row = train.inputs(np.array([window]), length=int(train.lengths[window]), epoch=0)
        ids, types = row["input_ids"][0].tolist(), row["token_type_ids"][0].tolist()
        assert (
            ids[0] == tokenizer.cls_token_id
            and sorted(types[: train.num_tokens[window]]) == types[: train.num_tokens[window]]
        )
        first, last = train.labels[window].tolist()
        if first:
            found[int(train._question[window])].add(tokenizer.decode(ids[first : last + 1]))
    assert found == {0: {"weak"}, 1: {"clever"}, 2: {"dull and the plot"}}


def predicted(dataset: SquadDataset, outputs: Sequence[np.ndarray]) -> np.ndarray:
    """As from batches of one window each."""
    return np.concatenate([dataset.predict(np.array([i]), row[None]) for i, row in enumerate(outputs)])


def perfect_outputs(dataset: SquadDataset) -> list[np.ndarray]:
    """Logits that are sure of every label; of no token where the window does not hold the answer."""
    outputs = []
    for window in range(len(dataset)):
        logits = np.full((int(dataset.lengths[window]), 2), -5.0, dtype=np.float32)
        first, last = dataset.labels[window].tolist()
        if first:
            logits[first, 0] = logits[last, 1] = 5.0
        outputs.append(logits)
    return outputs


def test_answers_are_put_together_from_all_windows(tmp_path: Path) -> None:
    dataset = load_squad(settings(write(tmp_path, [article(*QUESTIONS)])), tokenizer=tiny_tokenizer())["eval"]
    assert dataset.measure(predicted(dataset, perfect_outputs(dataset))) == {"f1": 100.0, "exact_match": 100.0}
    assert dataset.predictions == {"q1": "weak", "q2": "clever", "q3": "dull and the plot"}


@pytest.mark.parametrize("seed", range(5))
def test_scores_are_those_of_the_official_scorer(tmp_path: Path, seed: int) -> None:
    data = settings(write(tmp_path, [article(*QUESTIONS)]))
    dataset = load_squad(data, tokenizer=tiny_tokenizer())["eval"]
    random = np.random.default_rng(seed)
    outputs = [row + random.normal(0, 5, row.shape).astype(np.float32) for row in perfect_outputs(dataset)]
    scores = dataset.measure(predicted(dataset, outputs))
    questions = read_squad(data, split="eval", max_samples=None).questions
    assert scores == pytest.approx(official_scores(dataset.predictions, questions), abs=1e-4)


def test_an_answer_is_a_span_of_the_context_alone() -> None:
    offsets = np.array([[-1, -1], [-1, -1], [0, 3], [4, 8], [9, 11], [-1, -1]])
    logits = np.zeros((8, 2))
    logits[1] = logits[5] = logits[7] = 9.0  # the question, the separator and padding
    logits[4, 0], logits[2, 1] = 5.0, 5.0  # backwards: no span
    logits[3, 0], logits[4, 1] = 6.0, 3.5
    assert best_span(logits, offsets) == (9.5, 4, 11)
    assert best_span(logits[:2], offsets[:2])[0] == -np.inf


def test_questions_are_counted_not_windows(tmp_path: Path) -> None:
    data = settings(write(tmp_path, [article(*QUESTIONS)]), max_train_samples=1, max_eval_samples=2)
    splits = load_squad(data, tokenizer=tiny_tokenizer())
    assert [len(set(splits[name]._question.tolist())) for name in ("train", "eval")] == [1, 2]


def test_real_squad(shared: Path) -> None:
    from transformers import AutoTokenizer

    data = settings(shared / "data" / "squad", max_length=384, stride=128)
    splits = load_squad(data, tokenizer=AutoTokenizer.from_pretrained(shared / "models" / "minilm-l6"))
    assert [len(set(splits[name]._question.tolist())) for name in ("train", "eval")] == [925, 265]
    dataset = splits["eval"]
    scores = dataset.measure(predicted(dataset, perfect_outputs(dataset)))
    assert scores["f1"] > 99 and scores["exact_match"] > 98, "some answers begin inside a word"
    questions = read_squad(data, split="eval", max_samples=None).questions
    assert scores == pytest.approx(official_scores(dataset.predictions, questions), abs=1e-3)


@dataclass(frozen=True)
class RealCase(Case):
    def overrides(self, data: str) -> list[str]:
        lengths = ("data.max_length=128", "data.stride=32", "data.max_train_samples=64", "data.max_eval_samples=48")
        return [*super().overrides(data), *lengths]


def save_with_a_head(source: Path, folder: Path) -> None:
    """A pre-trained encoder as a model of questions none of whose biases is zero."""
    from transformers import AutoModelForQuestionAnswering, AutoTokenizer

    torch.manual_seed(0)
    network = AutoModelForQuestionAnswering.from_pretrained(source)
    grow_biases(network)
    network.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)


@pytest.mark.full
def test_an_elastic_run_answers_as_the_plain_loop(shared: Path, ranks: RankPool, tmp_path: Path) -> None:
    """Real questions, a real pre-trained model: the same answers, hence the same scores, by the official scorer.

    The model is saved with a head of its own first: a new one has a bias of zero whose true gradient is zero too, so
    that training leaves rounding noise in it (1e-11), of which no relative difference tells anything.
    """
    save_with_a_head(shared / "models" / "minilm-l6", tmp_path / "minilm-qa")
    (tmp_path / "squad").symlink_to(shared / "data" / "squad")
    case = RealCase("minilm-qa", 2, TWO_RANKS, 4, cached=True)
    weights, _ = reference(case, str(tmp_path))
    answers = ranks.run(2, elastic_run, case, str(tmp_path), str(tmp_path), timeout=600)
    assert deviation(answers[0][0], weights) < 1e-10

    config = configuration(case.model, case.overrides(str(tmp_path)))
    job = build_job(config, World(0, 1, 0, 1, torch.device("cpu")), lead=alone)
    plain, data = job.whole_model(), job.datasets["eval"]
    assert isinstance(data, SquadDataset)
    plain.double().load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()})
    outputs = []
    with torch.no_grad():
        for window, length in enumerate(data.lengths.tolist()):
            inputs = data.inputs(np.array([window]), length=length, epoch=0)
            told = plain_outputs(plain.eval(), inputs, torch.float64)
            outputs.append(torch.stack(told, dim=-1)[0].float().numpy())
    data.measure(predicted(data, outputs))
    folder = tmp_path / "elastic"
    predictions = json.loads((folder / "predictions.json").read_text())
    assert predictions == data.predictions
    questions = read_squad(config.data, split="eval", max_samples=48).questions
    metrics = json.loads((folder / "summary.json").read_text())["metrics"]
    expected = official_scores(predictions, questions)
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, abs=1e-3)


WRONG = {"id": "q9", "question": "the plot is", "answers": [{"text": "bright", "answer_start": 4}]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[", r"train-v1.1.json: is no SQuAD file \(JSONDecodeError"),
        ("[]", r"train-v1.1.json: is no SQuAD file \(TypeError"),
        ({"data": []}, r"train-v1.1.json: holds no questions; at least 1 is needed"),
        ({"data": [{"paragraphs": [{"context": "c", "qas": [{"id": 1}]}]}]}, r"question 1 is not as SQuAD has it"),
        (
            {"data": [{"paragraphs": [{"context": CONTEXT, "qas": [WRONG]}]}]},
            r"question q9: the answer 'bright' is not at character 4 of its context",
        ),
        (
            {"data": [article(("q9", "the plot is", "weak")), article(("q9", "the film is", "dull"))]},
            r"two questions have the id q9; give each its own",
        ),
        (
            {"data": [{"paragraphs": [{"context": CONTEXT, "qas": [{**WRONG, "question": 9}]}]}]},
            r"question 1 is not as SQuAD has it \(TypeError: 9 is no text\)",
        ),
        (
            {
                "data": [
                    {
                        "paragraphs": [
                            {"context": CONTEXT, "qas": [{**WRONG, "answers": [{"text": "x", "answer_start": "4"}]}]}
                        ]
                    }
                ]
            },
            r"question 1 is not as SQuAD has it \(TypeError: answer_start is '4'\)",
        ),
        (
            {"data": [{"paragraphs": [{"context": CONTEXT, "qas": [{**WRONG, "answers": []}]}]}]},
            r"question q9 has no answer; give SQuAD 1.1",
        ),
    ],
)
def test_bad_squad_files(tmp_path: Path, content: object, message: str) -> None:
    write(tmp_path, [article(*QUESTIONS)])
    (tmp_path / "train-v1.1.json").write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(UserError, match=message):
        load_squad(settings(tmp_path), tokenizer=tiny_tokenizer())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"stride": 10}, r"data.stride: 10 is not allowed; give at least 1 and less than half of data.max_length"),
        ({"max_length": 200, "stride": 8}, r"data.max_length: 200 is not allowed; the model's texts have at most 128"),
        ({"path": "tests"}, r"data.path: tests holds 0 files train\*.json; one is needed"),
    ],
)
def test_bad_squad_settings(tmp_path: Path, values: dict[str, object], message: str) -> None:
    write(tmp_path, [article(*QUESTIONS)])
    with pytest.raises(UserError, match=message):
        load_squad(settings(tmp_path, **values), tokenizer=tiny_tokenizer())


def test_an_answer_that_is_off_by_a_few_characters_is_moved(tmp_path: Path) -> None:
    start = CONTEXT.index("plot is weak")
    answers = [{"text": "plot is weak", "answer_start": start + off} for off in (0, 3, -9)]
    content = {
        "data": [{"paragraphs": [{"context": CONTEXT, "qas": [{"id": 7, "question": "how", "answers": answers}]}]}]
    }
    (tmp_path / "train-v1.1.json").write_text(json.dumps(content))
    data = DataConfig(name="squad", path=str(tmp_path))
    (question,) = read_squad(data, split="train", max_samples=None).questions
    assert question.id == "7" and set(question.answers) == {("plot is weak", start)}
    assert str(Extent(1, 1, mended=1)) == "1 (1 with an answer moved to where it stands)"


def test_an_answer_that_is_further_off_is_left_out_and_counted(tmp_path: Path) -> None:
    start = CONTEXT.index("weak")
    qas = [
        {"id": name, "question": "how", "answers": [{"text": "weak", "answer_start": start + off} for off in offs]}
        for name, offs in (("far", (11, -11)), ("near", (4, 11)), ("right", (0,)))
    ]

    def wrote(questions: list[dict[str, object]]) -> None:
        content = {"data": [{"paragraphs": [{"context": CONTEXT, "qas": questions}]}]}
        (tmp_path / "train-v1.1.json").write_text(json.dumps(content))

    wrote(qas)
    data = DataConfig(name="squad", path=str(tmp_path))
    asked = read_squad(data, split="train", max_samples=None)
    assert [(question.id, question.answers) for question in asked.questions] == [
        ("near", (("weak", start),)),
        ("right", (("weak", start),)),
    ]
    assert asked.extent == Extent(2, 3, left_out=1, mended=1)
    wrote(qas[:1])
    with pytest.raises(UserError, match="question far: the answer 'weak' is not at character .*, nor within 10"):
        read_squad(data, split="train", max_samples=None)
