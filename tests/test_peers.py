"""The benchmark beside other libraries: each trains the same job, and what is left out is left out of all."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median

import numpy as np
import pytest
from laws import REPOSITORY
from PIL import Image
from tiny import tiny_bert, tiny_squad, tiny_sst2, tiny_tokenizer
from transformers import EvalPrediction

sys.path.insert(0, str(REPOSITORY))

import benchmarks.peers.__main__ as peers
from benchmarks.elastic.processes import launch
from benchmarks.peers import contest
from benchmarks.peers.contest import HF, KEEPS, OURS, RUNS, Contest, Found, Task, run
from benchmarks.peers.hf_trainer import Texts
from benchmarks.peers.timm_train import arguments_of, curve_of, step_seconds, write_class_folders
from benchmarks.support import kept as kept_rows
from benchmarks.support import sst2
from benchmarks.support.kept import KeptRows
from benchmarks.support.measure import CONFIGS
from benchmarks.support.sst2 import hold_out
from pipetransformer.config import load_config
from pipetransformer.data import load_squad
from pipetransformer.errors import UserError

DIGITS = CONFIGS / "train_config_digits_no_freeze.yaml"


@pytest.mark.parametrize("name", [OURS, *(pytest.param(name, marks=pytest.mark.full) for name in (HF, HF + KEEPS))])
def test_both_train_the_same_epoch(name: str, tmp_path: Path) -> None:
    model, data = tiny_bert(tmp_path / "bert"), tiny_sst2(tmp_path / "SST-2", 96, num_eval_samples=8)
    task = peers.texts(data, model, "data.max_train_samples=96", "train.batch_size=8", "train.precision=float32")
    found = run(name, task, task.overrides, ranks=1, timm=None, workers=0)
    assert found.samples_per_s > 0 and found.step_s > 0 and found.accuracy is not None and found.peak_bytes
    assert found.accuracy * 8 == pytest.approx(round(found.accuracy * 8))
    assert 0.2 < found.samples_per_s * found.step_s / 8 < 5, "a step is a batch of 8"


@pytest.mark.full
def test_both_are_judged_alike(tmp_path: Path) -> None:
    """The same weights, which a rate of next to nothing leaves as they are, on texts of many lengths: what one answers,
    the other answers, whatever order it is judged in."""
    model = tiny_bert(tmp_path / "bert", initializer_range=2.0)
    data = tiny_sst2(tmp_path / "SST-2", 16, num_eval_samples=61)
    task = peers.texts(data, model, *("train.batch_size=8", "train.lr=1e-12", "train.precision=float32"))
    found = [run(name, task, task.overrides, ranks=1, timm=None, workers=0) for name in (OURS, HF)]
    assert found[0].accuracy == pytest.approx(found[1].accuracy)
    assert found[0].accuracy not in (0.0, 1.0)


def test_ratios_are_of_one_round() -> None:
    task = Task("task", DIGITS, (), HF)
    rates = {OURS: (2, 6, 8), HF: (1, 2, 16), HF + KEEPS: (2, 2, 16)}
    found = {name: [Found(rate, 8 / rate, None, None) for rate in of_one] for name, of_one in rates.items()}
    ours, theirs, keeping = peers.rows_of(task, found, ranks=2)
    assert (ours["over the peer's"], ours["least"], ours["most"]) == (2.0, 0.5, 3.0), "of 2, 3 and a half"
    assert ours["over it with freed memory kept"] == 1.0, "of 1, 3 and a half"
    assert (ours["samples/s"], theirs["samples/s"]) == (6, 2) and theirs["over the peer's"] is None
    assert keeping["over the peer's"] == 1.0 and keeping["over it with freed memory kept"] is None


def test_a_round_is_kept_until_code_or_settings_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever its files lie. The peer takes the faster number of processes, and turns change their order."""
    turns: list[tuple[str, int]] = []

    def counted(name: str, task: Task, overrides: tuple[str, ...], *, workers: int, **_: object) -> Found:
        turns.append((name, workers))
        return Found(10.0 + workers + len(turns), 1.0, None, 0.5)

    monkeypatch.setattr(contest, "run", counted)

    def done(data: str, precision: str = "float32") -> tuple[int, list[dict[str, Found]], list[tuple[str, int]]]:
        turns.clear()
        task = peers.texts(tmp_path / data, tmp_path / data / "model")
        one = Contest(task, 2, precision, None, KeptRows(tmp_path / RUNS))
        workers, _ = one.workers()
        return workers, [one.round(number, workers=workers) for number in range(2)], list(turns)

    workers, rounds, order = done("here")
    names = list(rounds[0])
    assert order == [*((HF, n) for n in (0, 1)), *((n, 1) for n in reversed(names)), *((n, 1) for n in names)]
    assert workers == 1 and names[0] == OURS and {HF, HF + KEEPS} < set(names)
    assert rounds[0][OURS] != rounds[1][OURS]
    assert done("there") == (1, rounds, [])
    assert len(done("here", "bfloat16")[2]) == len(order)
    assert done("here") == (1, rounds, []), "another precision has rows of its own"
    num_lines = len((tmp_path / RUNS).read_text().splitlines())
    monkeypatch.setattr(kept_rows, "sources", lambda code: {"trainer.py": "another"} if code else {})
    assert len(done("here")[2]) == len(order)
    assert len((tmp_path / RUNS).read_text().splitlines()) == num_lines, "in the place of the rows of other code"
    assert str(tmp_path) not in (tmp_path / RUNS).read_text()


@pytest.mark.full
def test_failures_are_one_line(tmp_path: Path) -> None:
    task = peers.texts(tmp_path / "nothing", tiny_bert(tmp_path / "bert"))
    with pytest.raises(UserError, match="^ours: SST-2, bert failed: "):
        run(OURS, task, task.overrides, ranks=1, timm=None, workers=0)


# ---- timm's script ---------------------------------------------------------------------------------------------------


def test_timm_is_given_the_same_job() -> None:
    overrides = (*peers.PICTURES, "train.max_grad_norm=0.5", "train.precision=bfloat16")
    config = load_config(CONFIGS / "train_config_cifar100_no_freeze.yaml", overrides)
    given = arguments_of(config, data=Path("pictures"), ranks=2, output=Path("out"), workers=1)
    told = dict(zip(given, given[1:]))
    assert (told["--data-dir"], told["--batch-size"], told["--img-size"], told["--workers"]) == (
        *("pictures", "32", "32", "1"),
    )
    assert (told["--lr"], told["--clip-grad"], told["--amp-dtype"]) == ("0.001", "0.5", "bfloat16")
    assert given[given.index("--model-kwargs") + 1 :][:5] == [
        *("patch_size=4", "embed_dim=192", "depth=12", "num_heads=3", "img_size=32"),
    ]


def test_timm_is_given_a_saved_model(tmp_path: Path) -> None:
    own = (f"model.name={tmp_path}", "data.image_size=8")
    config = load_config(DIGITS, (*own, "model.pretrained=true"))
    given = arguments_of(config, data=Path("pictures"), ranks=1, output=Path("out"), workers=0, by_step=True)
    told = dict(zip(given, given[1:]))
    assert (told["--model"], told["--num-classes"]) == (f"local-dir:{tmp_path}", "10")
    assert {"--pretrained", "--sched-on-updates"} <= set(given)
    given = arguments_of(load_config(DIGITS, own), data=Path("pictures"), ranks=1, output=Path("out"), workers=0)
    assert {"--pretrained", "--sched-on-updates"}.isdisjoint(given)


PRINTED = """
Train: 0 [   0/39 (  3%)]  Loss: 4.67 (4.67)  Time: 1.250s,   51.20/s  (1.250s,   51.20/s)  LR: 1e-3  Data: 0.1 (0.1)
Train: 0 [  38/39 (100%)]  Loss: 4.63 (4.65)  Time: 0.750s,   85.33/s  (1.000s,   64.00/s)  LR: 1e-3  Data: 0.1 (0.1)
Train: 1 [   0/39 (  3%)]  Loss: 4.57 (4.57)  Time: 0.850s,   51.20/s  (0.850s,   51.20/s)  LR: 1e-3  Data: 0.1 (0.1)
Train: 1 [  38/39 (100%)]  Loss: 4.53 (4.55)  Time: 0.750s,   85.33/s  (0.900s,   64.00/s)  LR: 1e-3  Data: 0.1 (0.1)
Test: [   0/3]  Time: 0.107 (0.107)  Loss:   4.612 ( 4.612)  Acc@1:   1.562 (  1.562)
"""


def test_its_steps_are_read_from_what_it_prints() -> None:
    assert (step_seconds(PRINTED, epoch=0), step_seconds(PRINTED, epoch=1)) == (1.0, 0.9)
    for other in ("usage: train.py [--config FILE]", PRINTED.splitlines()[1]):
        with pytest.raises(UserError, match="^--timm-train: "):
            step_seconds(other, epoch=0)


def test_its_curve_is_read_from_what_it_prints_and_writes(tmp_path: Path) -> None:
    summary = tmp_path / "20261123-vit-32" / "summary.csv"
    summary.parent.mkdir()
    header = "epoch,train_loss,eval_loss,eval_top1,eval_top5,lr"
    summary.write_text(f"{header}\n0,4.6,4.5,12.5,30.0,0.001\n1,4.4,4.3,25.0,50.0,0.0005\n")
    seconds, accuracy = zip(*curve_of(PRINTED, output=tmp_path))
    assert seconds == pytest.approx((39.0, 39.0 + 0.9 * 39)) and accuracy == (0.125, 0.25)
    spoilt = (header, f"{header}\n2,4.6,4.5,12.5,30.0,0.001\n", "epoch,train_loss\n0,4.6\n", f"{header}\n0,4.6\n")
    for text in spoilt:
        summary.write_text(text)
        with pytest.raises(UserError, match="^--timm-train: "):
            curve_of(PRINTED, output=tmp_path)
    summary.unlink()
    with pytest.raises(UserError, match="^--timm-train: "):
        curve_of(PRINTED, output=tmp_path)


def test_its_pictures_are_the_job_s(tmp_path: Path) -> None:
    config = load_config(DIGITS, ["data.max_train_samples=30", "data.max_eval_samples=10", "data.image_size=8"])
    write_class_folders(config, tmp_path)
    assert len(list(tmp_path.glob("train/*/*.png"))) == 30 and len(list(tmp_path.glob("validation/*/*.png"))) == 10
    for path in tmp_path.glob("train/*/*.png"):
        picture = np.asarray(Image.open(path))
        assert picture.shape == (8, 8, 3) and picture.max() > 128, "not normalised"
    names = {path.parent.name for path in tmp_path.glob("*/*/*.png")}
    assert names <= {f"{label:03d}" for label in range(10)}


# ---- more to judge by ------------------------------------------------------------------------------------------------


def test_no_phrase_of_a_held_out_sentence_is_trained_on(tmp_path: Path) -> None:
    tiny_sst2(tmp_path / "SST-2", 60, num_eval_samples=4)
    source = tmp_path / "SST-2" / "train.tsv"
    header, *lines = source.read_text().splitlines()
    sentences = [line.split("\t")[0] for line in lines]
    phrases = [f"{' '.join(sentence.split()[:3])}\t1" for sentence in sentences]
    source.write_text("\n".join([header, *lines, *phrases]) + "\n")
    hold_out(tmp_path / "SST-2", tmp_path / "held", num_train=40, num_held_out=10)
    train, dev = ((tmp_path / "held" / f"{name}.tsv").read_text().splitlines()[1:] for name in ("train", "dev"))
    assert (len(train), len(dev)) == (40, 4 + 10)
    held = [f" {line.split(chr(9))[0]} " for line in dev[4:]]
    assert all(text.strip() in sentences for text in held)
    trained = [line.split("\t")[0] for line in train]
    assert not any(f" {phrase} " in sentence for phrase in trained for sentence in held)
    assert median(len(phrase.split()) for phrase in trained) >= 3
    with pytest.raises(UserError, match="^--sst2: .* full sentences; hold out fewer than 1000"):
        hold_out(tmp_path / "SST-2", tmp_path / "held", num_train=40, num_held_out=1000)


def test_recipes_are_chosen_by_other_lines_than_they_are_judged_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_sst2(tmp_path / "SST-2", 120, num_eval_samples=4)
    monkeypatch.setattr(sst2, "_TUNED_FROM", 60)
    read = {}
    for part, count in (("judged", 20), ("tuned", 10)):
        hold_out(tmp_path / "SST-2", tmp_path / part, num_train=count, num_held_out=40, part=part)  # type: ignore[arg-type]
        read[part] = [set((tmp_path / part / f"{name}.tsv").read_text().splitlines()[1:]) for name in ("train", "dev")]
    lines = (tmp_path / "SST-2" / "train.tsv").read_text().splitlines()[1:]
    assert read["judged"][0] <= set(lines[:60]) and read["tuned"][0] <= set(lines[60:])
    assert not read["judged"][1] & (read["tuned"][0] | read["tuned"][1]) and not read["tuned"][0] & read["tuned"][1]
    assert len(read["judged"][1]) == 44 and 30 <= len(read["tuned"][1]) <= 40


def test_each_seed_chooses_by_other_sentences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_sst2(tmp_path / "SST-2", 120, num_eval_samples=4)
    source = tmp_path / "SST-2" / "train.tsv"
    header, *lines = source.read_text().splitlines()
    words = [line.split("\t")[0].split() for line in lines]
    shorter = [f"{' '.join(each[:count])}\t1" for each in words for count in (2, len(each) - 1)]
    source.write_text("\n".join([header, *lines, *shorter]) + "\n")
    monkeypatch.setattr(sst2, "_TUNED_FROM", 20)
    read = []
    for seed in (0, 1):
        hold_out(tmp_path / "SST-2", tmp_path / str(seed), num_train=10, num_held_out=40, part="tuned", seed=seed)
        texts = [(tmp_path / str(seed) / f"{name}.tsv").read_text().splitlines()[1:] for name in ("train", "dev")]
        read.append([[line.split("\t")[0] for line in part] for part in texts])
    hold_out(tmp_path / "SST-2", tmp_path / "judged", num_train=10, num_held_out=40, part="judged")
    table = (tmp_path / "judged" / "dev.tsv").read_text().splitlines()[5:]
    held_out = [f" {line.split(chr(9))[0]} " for line in table]
    assert len(held_out) == 40
    for train, judged in read:
        phrases = [text for text in judged if any(f" {text} " in f" {other} " and text != other for other in judged)]
        assert judged and not phrases, "sentences alone are judged"
        assert not any(f" {phrase} " in f" {text} " for phrase in train for text in judged)
        assert not any(f" {text} " in other for text in (*train, *judged) for other in held_out)
    assert set(read[0][1]) != set(read[1][1]) and set(read[0][0]) != set(read[1][0])


def test_answers_are_judged_in_the_order_of_the_windows(tmp_path: Path) -> None:
    """``Trainer`` is given windows by length; an answer is the best of all windows of its question."""
    folder = tiny_squad(tmp_path / "squad", 2, num_eval_questions=40)
    config = load_config(CONFIGS / "train_config_squad_no_freeze.yaml", [f"data.path={folder}", "data.max_length=48"])
    data = load_squad(config.data.model_copy(update={"stride": 8}), tokenizer=tiny_tokenizer())["eval"]
    by_length = Texts(data, label_names=("start_positions", "end_positions"), by_length=True)
    shown = by_length[0]
    assert len(shown["input_ids"]) == max(by_length.lengths) > min(by_length.lengths)
    assert isinstance(shown["start_positions"], int) and isinstance(shown["end_positions"], int)

    def logits(token_ids: list[int]) -> np.ndarray:
        return np.random.default_rng(token_ids).normal(size=(48, 2))

    outputs = np.stack([logits(by_length[number]["input_ids"]) for number in range(len(by_length))])
    labels = tuple(np.array(by_length.labels).T)
    told = by_length.measure(EvalPrediction(predictions=(outputs[..., 0], outputs[..., 1]), label_ids=labels))
    lengths = data.num_tokens.tolist()
    ids = [data.inputs(np.array([n]), length=lengths[n], epoch=0)["input_ids"][0].tolist() for n in range(len(data))]
    in_turn = np.stack([logits(each) for each in ids])
    assert told == data.measure(data.predict(np.arange(len(data)), in_turn)) and told["f1"] > 0


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2])
def test_trainer_answers_questions(ranks: int, tmp_path: Path) -> None:
    model, data = tiny_bert(tmp_path / "bert"), tiny_squad(tmp_path / "squad", 24, num_eval_questions=40)
    recipe = ("data.max_length=48", "data.stride=8", "train.epochs=2", "train.batch_size=8", "train.eval_every=3 steps")
    keys = (f"data.path={data}", f"model.name={model}", *recipe, "train.precision=float32", "train.head_lr_scale=10")
    result, config = tmp_path / "result.json", CONFIGS / "train_config_squad_no_freeze.yaml"
    script = ["-m", "benchmarks.peers.hf_trainer", "0", str(config), str(result), *keys]
    launch(script, ranks=ranks, name="Trainer")
    told = json.loads(result.read_text())
    assert 0 < told["f1"] <= 100 and told["curve"][-1][1] == told["f1"] and len(told["steps"]) % 2 == 0
