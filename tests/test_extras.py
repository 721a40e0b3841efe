"""What other trainers have too: moving averages, mixed pictures, more optimizers and schedules, each equal to a plain
loop through plans that cut, freeze and thaw; timm's transforms; compiled blocks; float16's scaled loss."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import get_args
from unittest import mock

import pytest
import torch
from laws import TWO_RANKS, Case, deviation, elastic_run, gradient_deviation
from ranks import RankPool
from safetensors.torch import load_file
from test_exactness import reference
from tiny import tiny_bert, tiny_sst2
from torch import nn

from benchmarks.soak.forked import ForkedJob, running
from pipetransformer import commands
from pipetransformer.adapter import scaled_step
from pipetransformer.config import Config, TrainConfig, load_config
from pipetransformer.config.learning_rate import learning_rate, share_to_come
from pipetransformer.dp.optimizer_state import empty_state, make_optimizer, state_factor, state_keys, take_state
from pipetransformer.engine.loss_scale import LossScale
from pipetransformer.errors import UserError
from pipetransformer.inference.saved import find_saved
from pipetransformer.run.tracking import read_events


def train_config(**changes: object) -> TrainConfig:
    return TrainConfig.model_validate({"epochs": 4, "batch_size": 8, "lr": 1.0, **changes})


def config_with(train: TrainConfig, *overrides: str) -> Config:
    return load_config("digits", ["freeze.policy=none", *overrides]).model_copy(update={"train": train})


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("texts")
    tiny_bert(folder / "bert", layers=6)
    tiny_sst2(folder / "sst2", 150, num_eval_samples=40)
    return str(folder)


_FREEZES_LATER = ((0, 0, 2), (6, 2, 1), (10, 1, 2), (15, 4, 1))  # what moved, thawed and waited freezes


# ---- law 1 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "without"),
    [
        (Case("vit", 2, TWO_RANKS, cached=True, ema=0.8), {"ema": None}),
        (Case("bert", 2, TWO_RANKS, cached=True, ema=0.8, optimizer="sgd", clip=None), {"ema": None}),
        (Case("vit", 2, TWO_RANKS, cached=True, averaged=True), {"averaged": False}),
        (Case("bert", 2, TWO_RANKS, cached=True, averaged=True, ema=0.8, optimizer="sgd"), {"averaged": False}),
        (Case("vit", 2, TWO_RANKS, averaged=True, shard="full"), {"averaged": False}),
        (Case("vit", 2, _FREEZES_LATER, cached=True, averaged=True, ema=0.7), {"averaged": False}),
        (
            Case("vit", 2, ((0, 0, 1), (6, 2, 1), (10, 1, 2), (15, 4, 1)), averaged=True, shard="optimizer"),
            {"averaged": False},
        ),
        (Case("vit", 2, TWO_RANKS, averaged=True, units="half"), {"averaged": False}),
        (Case("vit", 2, TWO_RANKS, num_microbatches=4, mixup=0.5, cutmix=1.0), {"mixup": 0.0, "cutmix": 0.0}),
        (Case("vit", 2, TWO_RANKS, cached=True, optimizer="radam"), {"optimizer": "adamw"}),
        (Case("bert", 2, TWO_RANKS, cached=True, optimizer="nadamw", ema=0.5), {"optimizer": "adamw"}),
    ],
    ids=lambda value: "" if isinstance(value, dict) else f"{value.model}-{value.optimizer}-{value.ema}-{value.mixup}",
)
def test_they_are_plain(case: Case, without: dict[str, object], ranks: RankPool, texts: str, tmp_path: Path) -> None:
    weights, gradients = reference(case, texts)
    answers = ranks.run(2, elastic_run, case, texts, str(tmp_path))
    assert gradient_deviation([g for _, g in answers], gradients) < 1e-10
    assert deviation(answers[0][0], weights) < 1e-10
    other, _ = reference(replace(case, **without), texts)  # type: ignore[arg-type]
    assert deviation(answers[0][0], other) > 1e-4, "it makes a difference"


# ---- optimizers and schedules ----------------------------------------------------------------------------------------


def stepped(name: str, parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        random = torch.Generator().manual_seed(step)
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=random)
        optimizer.step()


@pytest.mark.parametrize("name", get_args(TrainConfig.model_fields["optimizer"].annotation))
def test_the_state_of_every_optimizer_moves_with_its_parameters(name: str) -> None:
    """Two steps, all that is kept taken to another optimizer by name, two more: as four steps of one."""
    train, shapes = train_config(optimizer=name, lr=0.01), ((40, 36), (6,))

    def parameters() -> list[nn.Parameter]:
        random = torch.Generator().manual_seed(9)
        return [nn.Parameter(torch.randn(shape, generator=random)) for shape in shapes]

    def optimizer(of: list[nn.Parameter]) -> torch.optim.Optimizer:
        return make_optimizer(train, [{"params": of, "weight_decay": 0.0}])

    whole, moved = parameters(), parameters()
    stepped(name, whole, optimizer(whole), range(4))
    first = optimizer(moved)
    stepped(name, moved, first, range(2))
    named = dict(zip("ab", moved))
    state = take_state(first, named)
    second = optimizer(moved)
    for key, parameter in named.items():
        empty = empty_state(config_with(train), parameter, device=torch.device("cpu"))
        assert {k: (v.shape, v.dtype) for k, v in empty.items()} == {
            k: (v.shape, v.dtype) for k, v in state[key].items()
        }
        assert state_keys(config_with(train), parameter) == tuple(state[key])
        second.state[parameter] = state[key]
    stepped(name, moved, second, range(2, 4))
    assert all(torch.equal(one, other) for one, other in zip(whole, moved))


def test_the_bytes_of_an_optimizer() -> None:
    def factor(*overrides: str, **changes: object) -> float:
        return state_factor(config_with(train_config(**changes), *overrides))

    assert [factor(optimizer=name) for name in ("adamw", "sgd", "lion", "adam")] == [2, 1, 1, 2]
    assert factor(optimizer="sgd", momentum=0.0) == 0
    assert factor(optimizer="lion", ema=0.9) == 2
    assert factor("freeze.policy=guarded", optimizer="lion", ema=0.9) == 3, "blocks freeze with an average"
    assert factor("freeze.policy=schedule", optimizer="lion") == 1, "not as published"
    assert factor("freeze.policy=schedule", "freeze.averaged=true", optimizer="lion") == 2


def test_options_that_an_optimizer_does_not_take() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    for name in ("adamw", "lion"):
        with pytest.raises(UserError, match=f"^train.optimizer_options: {name} does not take them .*warmth"):
            make_optimizer(train_config(optimizer=name, optimizer_options={"warmth": 1}), [{"params": [parameter]}])
    made = make_optimizer(train_config(optimizer="lion", optimizer_options={"betas": [0.5, 0.6]}), [{"params": []}])
    assert made.defaults["betas"] == (0.5, 0.6)


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("polynomial", {"power": 2.0, "lr_end": 0.0}, [1.0, 0.81, 0.64]),
        ("cosine_with_restarts", {"num_cycles": 2}, [1.0, 0.904508, 0.654508]),
        ("cosine_with_min_lr", {}, [1.0, 0.977975, 0.914058]),
        ("inverse_sqrt", {"timescale": 4}, [1.0, 0.894427, 0.816497]),
        ("warmup_stable_decay", {}, [1.0, 1.0, 1.0]),
        ("step", {"decay_epochs": 1, "decay_rate": 0.5}, [1.0, 1.0, 1.0, 0.5]),
        ("multistep", {"decay_milestones": [2], "decay_rate": 0.1}, [1.0] * 5 + [0.1]),
        ("tanh", {}, [0.999999]),
    ],
)
def test_schedules_of_transformers_and_timm(name: str, options: dict[str, object], expected: list[float]) -> None:
    """Ten steps of four epochs behind no warm-up; then behind one of two steps."""
    train = train_config(lr_schedule=name, lr_options=options)
    rates = [learning_rate(train, step=step, total_steps=10) for step in range(10)]
    assert rates[: len(expected)] == pytest.approx(expected, abs=1e-6)
    shares = [share_to_come(train, step=step, total_steps=10) for step in range(11)]
    assert shares[0] == 1.0 and shares[10] == pytest.approx(0.0) and shares == sorted(shares, reverse=True)
    warm = train_config(lr_schedule=name, lr_options=options, warmup_ratio=0.2)
    assert [learning_rate(warm, step=step, total_steps=10) for step in (0, 1)] == [0.5, 1.0]


def test_a_floor_is_a_learning_rate_and_no_share_of_it() -> None:
    for name, options in (
        ("cosine_with_min_lr", {"min_lr": 1e-4}),
        ("polynomial", {"lr_end": 1e-4}),
        ("tanh", {"min_lr": 1e-4}),
    ):
        train = train_config(lr=1e-3, lr_schedule=name, lr_options=options)
        rates = [learning_rate(train, step=step, total_steps=50) for step in range(50)]
        assert rates[0] == pytest.approx(1e-3, rel=1e-3) and min(rates) == pytest.approx(1e-4, rel=0.3), name
    with pytest.raises(UserError, match=r"^train.lr_schedule: step counts epochs; leave train.max_steps out"):
        load_config("digits", ["train.lr_schedule=step", "train.max_steps=7"])


def test_a_rank_that_trains_nothing_clips_nothing() -> None:
    for name in ("lion", "adamw"):
        optimizer = make_optimizer(train_config(optimizer=name), [{"params": [], "weight_decay": 0.0}])
        scaled_step(optimizer, torch.tensor(0.5))


def test_options_that_a_schedule_does_not_take() -> None:
    train = train_config(lr_schedule="polynomial", lr_options={"cycles": 3})
    with pytest.raises(UserError, match=r"^train.lr_options: polynomial does not take .*cycles"):
        learning_rate(train, step=0, total_steps=10)


def test_a_loss_is_scaled_as_torch_scales_it() -> None:
    scale = LossScale()
    assert scale.factor == 2.0**16
    scale.overflowed()
    for _ in range(2000):
        scale.passed()
    assert scale.factor == 2.0**16
    scale.overflowed()
    for _ in range(1999):
        scale.passed()
    other = LossScale()
    other.load_state_dict(scale.state_dict())
    other.passed()
    assert (scale.factor, other.factor) == (2.0**15, 2.0**16)


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("data.erasing=0.1", "data.erasing: is for data.augment timm, and that is none; give data.augment=timm"),
        ("data.crop_scale=[0.9, 0.2]", "data.crop_scale: is for data.augment timm"),
        ("train.ema=1", "train.ema: 1 is not allowed; give a number above 0 and below 1"),
        ("train.optimizer=lamb", 'train.optimizer: "lamb" is not allowed; give one of adamw, sgd'),
        ("data.label_kind=scores", "data.label_kind: is for a table; digits has classes, leave it out"),
        ("train.mixup=-1", "train.mixup: -1"),
        ("data.streaming=true", "data.streaming: no such key; a stream has no order to freeze, cache and resume by"),
    ],
)
def test_settings_that_do_not_go_together(override: str, line: str) -> None:
    with pytest.raises(UserError) as refused:
        load_config("digits", [override])
    assert str(refused.value).startswith(line)
    with pytest.raises(UserError, match=r"^train.ema: cannot go with dp.shard"):
        load_config("digits", ["train.ema=0.9", "dp.shard=optimizer"])
    with pytest.raises(UserError, match=r"^train.cutmix: is for images; leave it out"):
        load_config("table", ["train.cutmix=1", "data.path=x"])
    with pytest.raises(UserError, match=r"^data.crop_scale: \[0.9, 0.2\] is not in order"):
        load_config("digits", ["data.augment=timm", "data.crop_scale=[0.9, 0.2]"])


# ---- whole runs ------------------------------------------------------------------------------------------------------


def write_requests(path: Path, *, label: str) -> Path:
    """Texts of one or two topics; their number in place of the topics for ``label`` scores."""
    rows = ["text,label"]
    for number in range(60):
        topics = [name for bit, name in enumerate(("bills", "cards", "loans")) if number % 7 & 1 << bit]
        told = len(topics) + number % 3 / 10 if label == "scores" else ";".join(topics)
        rows.append(f"about {' and '.join(topics) or 'nothing'} number {number},{told}")
    path.write_text("\n".join(rows) + "\n")
    return path


def run_of(folder: Path, config: str, *settings: str, ranks: int = 1) -> tuple[str, str]:
    """(What a small run prints, the cause of its end; empty where it has ended well)."""
    own = ("train.precision=float32", "log.wandb=disabled", "log.report=false", "run.id=x", "pipe.measure=false")
    given = [*own, "train.epochs=1", "train.batch_size=16", f"run.dir={folder}", *settings]
    job = ForkedJob(load_config(config, given).task, [config, *given], num_ranks=ranks)
    with running(job):
        ended = job.supervise()
    return ended.out, "" if ended.exit_code == 0 else ended.cause


def test_no_epoch_evaluates_the_model_as_it_is(tmp_path: Path) -> None:
    out, cause = run_of(tmp_path, "digits", "train.epochs=0", "data.max_eval_samples=40", ranks=2)
    assert cause == "" and "step 0: evaluation accuracy" in out
    told = read_events(tmp_path / "x" / "events.jsonl")
    assert [event["step"] for event in told if event["event"] == "evaluation"] == [0]
    assert json.loads((tmp_path / "x" / "summary.json").read_text())["steps"] == 0


def test_averages_go_on_where_a_run_does(tmp_path: Path) -> None:
    """Two epochs at once, or one, and then the other on another number of ranks: the same weights."""
    own = ("train.ema=0.9", "train.lr_schedule=constant", "train.warmup_ratio=0", "freeze.policy=none")
    few = ("data.max_train_samples=48", "data.max_eval_samples=16", "model.dropout=0", "train.precision=float64")
    for folder, epochs, more, ranks in (
        ("whole", 2, (), 1),
        ("parts", 1, (), 2),
        ("parts", 2, ("run.resume=true",), 1),
    ):
        _, cause = run_of(tmp_path / folder, "digits", *own, *few, f"train.epochs={epochs}", *more, ranks=ranks)
        assert cause == "", cause
    whole, parts = (load_file(tmp_path / name / "x/model/final/model.safetensors") for name in ("whole", "parts"))
    assert all(torch.allclose(whole[name], parts[name], rtol=0, atol=1e-10) for name in whole)


def test_a_small_disk_keeps_the_best_weights_alone(tmp_path: Path) -> None:
    out, cause = run_of(tmp_path, "digits", "model.save=best", "data.max_train_samples=32", "data.max_eval_samples=8")
    assert cause == "" and [path.name for path in (tmp_path / "x" / "model").iterdir()] == ["best"]
    with pytest.raises(UserError, match=r"x: holds model/best alone; model.save kept no other weights"):
        find_saved(tmp_path / "x", which="final")


def test_a_batch_is_computed_in_parts_where_there_is_no_pipeline(tmp_path: Path) -> None:
    few = ("data.max_train_samples=32", "data.max_eval_samples=8", "freeze.policy=none")
    out, cause = run_of(tmp_path, "digits", "train.gradient_accumulation_steps=4", *few)
    assert cause == "" and "pp 1 x dp 1, M 4" in out
    out, cause = run_of(tmp_path / "two", "digits", "train.gradient_accumulation_steps=4", *few, ranks=2)
    assert cause == "" and ("pp 1 x dp 2, M 4" in out or "pp 2 x dp 1" in out)
    _, cause = run_of(tmp_path / "many", "digits", "train.gradient_accumulation_steps=17", *few)
    assert cause.startswith("rank 0: train.gradient_accumulation_steps: 17 parts on 1 ranks are more than")


def test_where_nothing_froze_it_says_so(tmp_path: Path) -> None:
    few = ("data.max_train_samples=32", "data.max_eval_samples=8", "freeze.policy=guarded", "train.epochs=2")
    out, cause = run_of(tmp_path, "digits", *few)
    assert cause == "" and "no block was frozen; the last decision: step " in out


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["digits", "run.id=x"], "run.id: .*x exists; continue it with run.resume=true"),
        (["digits", "pipe.initial_length=2"], r"does not divide .* or start 2 ranks \(--ranks 2\)"),
        (["table", "data.path=gone.csv"], "data.path: there is no file gone.csv"),
        (
            ["table", "data.path=asked.csv", "data.eval_fraction=0.2", "data.label_column=topic"],
            "no column topic.*; name .* data.label_c",
        ),
        (["digits", "model.name=./gone"], "model.name: there is no folder ./gone"),
    ],
)
def test_what_needs_no_rank_is_told_before_they_start(
    arguments: list[str],
    line: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pipetransformer.adapter.run_ranks", lambda *_, **__: pytest.fail("ranks were started"))
    write_requests(tmp_path / "asked.csv", label="labels")
    (tmp_path / "runs" / "x").mkdir(parents=True)
    (tmp_path / "runs" / "x" / "config.yaml").write_text("task: none\n")
    assert commands.main(["train", *arguments]) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert re.search(line, told), told


@pytest.mark.parametrize("resumes", ["auto", "true"])
def test_a_job_to_be_resumed_is_left_to_its_ranks(
    resumes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They find out whether there is a run to go on with: a job that restarts has none at its first start."""
    monkeypatch.chdir(tmp_path)
    started = mock.Mock(return_value={})
    monkeypatch.setattr("pipetransformer.adapter.run_ranks", started)
    assert commands.main(["train", "digits", "run.id=x", f"run.resume={resumes}"]) == 0
    assert started.call_count == 1


RESMLP = ("model.name=resmlp_12_224", "model.kwargs={}", "data.image_size=32", "model.dropout=null")


def test_a_model_of_no_family_is_cut_at_the_blocks_that_are_named(tmp_path: Path) -> None:
    few = ("data.max_train_samples=48", "data.max_eval_samples=16")
    freezing = ("freeze.policy=static", "freeze.max_frozen=5", "freeze.guard=false")
    out, cause = run_of(tmp_path, "digits", *RESMLP, "model.blocks=blocks", *freezing, *few)
    assert cause == "" and "(12 blocks)" in out and "frozen 0 -> 5" in out
    _, cause = run_of(tmp_path / "no", "digits", *RESMLP, "model.blocks=layers", *few)
    assert cause == "rank 0: model.blocks: resmlp_12_224 has no layers; its lists of modules are blocks"
    _, cause = run_of(tmp_path / "no", "digits", *RESMLP, *few)
    assert "is no chain of stem, blocks and head that is known here" in cause and "model.blocks=PATH" in cause


def test_mixed_pictures_are_not_cached_and_it_says_so(tmp_path: Path) -> None:
    mixing = ("train.mixup=0.2", "train.ema=0.9", "data.max_train_samples=64", "data.max_eval_samples=16")
    freezing = ("freeze.policy=static", "freeze.max_frozen=2", "freeze.guard=false")
    out, cause = run_of(tmp_path, "digits", *mixing, *freezing, ranks=2)
    assert cause == "" and "no cache: training inputs are mixed anew at each step (train.mixup, train.cutmix)" in out


def test_half_precision_with_a_scaled_loss_is_for_gpus(tmp_path: Path) -> None:
    _, cause = run_of(tmp_path, "digits", "train.precision=float16")
    assert cause == "rank 0: train.precision: float16 is for GPUs; give bfloat16, or auto"


@pytest.mark.full
def test_compiled_blocks_train_as_others_do(tmp_path: Path) -> None:
    settings = ("data.max_train_samples=96", "data.max_eval_samples=32", "freeze.policy=static", "freeze.max_frozen=2")
    losses = []
    for compiled in ("true", "false"):
        freezing = ("freeze.warmup=3 steps", "freeze.every=1 steps", "freeze.guard=false", "train.eval_every=2 steps")
        folder = tmp_path / compiled
        _, cause = run_of(folder, "digits", f"train.compile={compiled}", *settings, *freezing)
        assert cause == ""
        told = read_events(folder / "x" / "events.jsonl")
        losses.append([event["metrics"]["loss"] for event in told if event["event"] == "evaluation"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
