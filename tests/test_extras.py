"""What other trainers have too: moving averages, mixed pictures, more optimizers and schedules, each equal to a plain
loop through plans that cut, freeze and thaw; timm's transforms; compiled blocks; float16's scaled loss."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from laws import TWO_RANKS, Case, deviation, elastic_run, gradient_deviation
from ranks import RankPool
from test_exactness import reference
from tiny import tiny_bert, tiny_sst2
from torch import nn

from pipetransformer.config import DataConfig, TrainConfig, load_config
from pipetransformer.config.learning_rate import learning_rate, share_to_come
from pipetransformer.data import Batch, ImagePreprocessing, Mixing, describe, load_image_data
from pipetransformer.dp.optimizer_state import empty_state, make_optimizer, state_factor, state_keys, take_state
from pipetransformer.engine.loss_scale import LossScale
from pipetransformer.errors import UserError

PLAIN = ImagePreprocessing(size=16, channels=3, mean=(0.5,) * 3, std=(0.5,) * 3, interpolation="bilinear")


def train_config(**changes: object) -> TrainConfig:
    return TrainConfig.model_validate({"epochs": 4, "batch_size": 8, "lr": 1.0, **changes})


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("texts")
    tiny_bert(folder / "bert", layers=6)
    tiny_sst2(folder / "sst2", 150, num_eval_samples=40)
    return str(folder)


# ---- law 1 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "without"),
    [
        (Case("vit", 2, TWO_RANKS, cached=True, ema=0.8), {"ema": None}),
        (Case("bert", 2, TWO_RANKS, cached=True, ema=0.8, optimizer="sgd", clip=None), {"ema": None}),
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
        empty = empty_state(train, parameter, device=torch.device("cpu"))
        assert {k: (v.shape, v.dtype) for k, v in empty.items()} == {
            k: (v.shape, v.dtype) for k, v in state[key].items()
        }
        assert state_keys(train, parameter) == tuple(state[key])
        second.state[parameter] = state[key]
    stepped(name, moved, second, range(2, 4))
    assert all(torch.equal(one, other) for one, other in zip(whole, moved))


def test_the_bytes_of_an_optimizer() -> None:
    assert [state_factor(train_config(optimizer=name)) for name in ("adamw", "sgd", "lion", "adam")] == [2, 1, 1, 2]
    assert state_factor(train_config(optimizer="sgd", momentum=0.0)) == 0
    assert state_factor(train_config(optimizer="lion", ema=0.9)) == 2


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


# ---- pictures --------------------------------------------------------------------------------------------------------


def test_a_batch_is_mixed_alike_however_it_is_cut() -> None:
    """Each row with its partner of the whole batch, by one share; targets too where there is no picture."""
    mixing = Mixing(train_config(mixup=0.8, label_smoothing=0.1, seed=3), num_classes=4)
    batch = Batch(5, (np.array([7, 1, 4]), np.array([2, 9])), 8)
    partners = mixing.partners(batch.ids, batch, epoch=2)
    assert sorted(partners) == sorted(batch.ids)
    assert list(mixing.partners(np.array([9, 4, 9]), batch, epoch=2)) == [partners[4], partners[2], partners[4]]
    pictures, labels = torch.rand(10, 3, 8, 8), torch.arange(10) % 4

    def mixed(rows: slice, *, hidden: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        ids, others = torch.from_numpy(batch.ids[rows]), torch.from_numpy(partners[rows])
        given = (torch.empty(len(ids), 1, 8, 8, device="meta"),) * 2 if hidden else (pictures[ids], pictures[others])
        return mixing.mixed(given, (labels[ids], labels[others]), epoch=2, index=5)

    before = np.random.get_state()[1].copy()  # type: ignore[union-attr]
    whole, targets = mixed(slice(5))
    parts = [mixed(slice(0, 2)), mixed(slice(2, 5))]
    assert torch.equal(torch.cat([part for part, _ in parts]), whole)
    assert torch.equal(torch.cat([target for _, target in parts]), targets)
    assert torch.equal(mixed(slice(5), hidden=True)[1], targets)
    assert (np.random.get_state()[1] == before).all()  # type: ignore[union-attr]
    assert targets.sum(1).tolist() == pytest.approx([1.0] * 5) and targets.min() == pytest.approx(0.025)
    share = (whole[0] - pictures[partners[0]]) / (pictures[batch.ids[0]] - pictures[partners[0]])
    assert share.std() < 1e-4 or batch.ids[0] == partners[0]
    with pytest.raises(UserError, match="train.mixup: the model does not say"):
        Mixing(train_config(mixup=0.8), num_classes=0)


@pytest.mark.parametrize("channels", [1, 3])
def test_timms_transforms_depend_on_seed_view_and_sample_alone(channels: int) -> None:
    settings = {"augment": "timm", "rand_augment": "rand-m9-mstd0.5-inc1", "erasing": 0.5, "max_train_samples": 12}
    data = DataConfig.model_validate({"name": "digits", **settings})
    used = replace(PLAIN, channels=channels, mean=(0.5,) * channels, std=(0.5,) * channels)

    def pictures(seed: int) -> torch.Tensor:
        train = load_image_data(data, info=describe(data), preprocessing=used, seed=seed)["train"]
        before = torch.get_rng_state()
        first, second = (train.inputs(np.arange(12), length=16, epoch=epoch)["pixel_values"] for epoch in (0, 1))
        assert first.shape == (12, channels, 16, 16) and not torch.equal(first, second)
        alone = train.inputs(np.array([7, 3]), length=16, epoch=1)["pixel_values"]
        assert torch.equal(alone, second[[7, 3]]) and torch.equal(torch.get_rng_state(), before)
        assert train.views is None
        return second

    assert torch.equal(pictures(1), pictures(1)) and not torch.equal(pictures(1), pictures(2))


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("data.erasing=0.1", "data.erasing: is for data.augment timm, and that is none; give data.augment=timm"),
        ("data.crop_scale=[0.9, 0.2]", "data.crop_scale: is for data.augment timm"),
        ("train.ema=1", "train.ema: 1 is not allowed; give a number above 0 and below 1"),
        ("train.optimizer=lamb", 'train.optimizer: "lamb" is not allowed; give one of adamw, sgd'),
        ("data.label_kind=scores", "data.label_kind: is for a table; digits has classes, leave it out"),
        ("train.mixup=-1", "train.mixup: -1"),
    ],
)
def test_settings_that_do_not_go_together(override: str, line: str) -> None:
    with pytest.raises(UserError) as refused:
        load_config("digits", [override])
    assert str(refused.value).startswith(line)
    with pytest.raises(UserError, match=r"^train.cutmix: is for images; leave it out"):
        load_config("table", ["train.cutmix=1", "data.path=x"])
    with pytest.raises(UserError, match=r"^data.crop_scale: \[0.9, 0.2\] is not in order"):
        load_config("digits", ["data.augment=timm", "data.crop_scale=[0.9, 0.2]"])
