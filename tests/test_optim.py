"""Learning rates by hand, decay where it belongs, one clipping for all stages, moments that keep their name."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from ranks import RankPool
from torch import Tensor, nn

from pipetransformer.adapter import gradient_norms, scaled_step
from pipetransformer.config import TrainConfig, load_config
from pipetransformer.config.learning_rate import learning_rate, share_to_come
from pipetransformer.dp.optimizer_state import OptimizerState, empty_state, state_keys, take_state
from pipetransformer.engine.optim import build_optimizer, clip_scale, lr_scale, set_learning_rate
from pipetransformer.process.world import World

OPTIMIZERS = [{"optimizer": "adamw"}, {"optimizer": "sgd", "momentum": 0.9}, {"optimizer": "sgd", "momentum": 0.0}]


def train_config(**changes: object) -> TrainConfig:
    return TrainConfig.model_validate({"epochs": 1, "batch_size": 8, "lr": 0.1, **changes})


def parameters(*, seed: int = 0) -> dict[str, nn.Parameter]:
    random = torch.Generator().manual_seed(seed)
    shapes = {"stem.weight": (4, 3, 2), "norm.weight": (4,), "head.weight": (5, 4), "head.bias": (5,)}
    return {name: nn.Parameter(torch.randn(shape, generator=random)) for name, shape in shapes.items()}


# Learning rate


@pytest.mark.parametrize(
    ("lr_schedule", "warmup_ratio", "expected"),
    [
        ("constant", 0.0, [8, 8, 8, 8, 8, 8, 8, 8]),
        ("linear", 0.0, [8, 7, 6, 5, 4, 3, 2, 1]),
        ("cosine", 0.0, [8, 7.6955, 6.8284, 5.5307, 4, 2.4693, 1.1716, 0.3045]),
        ("constant", 0.5, [2, 4, 6, 8, 8, 8, 8, 8]),
        ("linear", 0.5, [2, 4, 6, 8, 8, 6, 4, 2]),
        ("cosine", 0.5, [2, 4, 6, 8, 8, 6.8284, 4, 1.1716]),
        ("linear", 0.125, [8, 8, 6.8571, 5.7143, 4.5714, 3.4286, 2.2857, 1.1429]),
    ],
)
def test_learning_rate_against_its_table(lr_schedule: str, warmup_ratio: float, expected: list[float]) -> None:
    train = train_config(lr=8.0, lr_schedule=lr_schedule, warmup_ratio=warmup_ratio)
    rates = [learning_rate(train, step=step, total_steps=8) for step in range(8)]
    assert rates == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(("ratio", "total_steps", "num_warmup"), [(0.57, 100, 57), (0.29, 100, 29), (0.1, 30, 3)])
def test_warmup_is_not_cut_by_rounding(ratio: float, total_steps: int, num_warmup: int) -> None:
    train = train_config(lr=1.0, warmup_ratio=ratio, lr_schedule="constant")
    rates = [learning_rate(train, step=step, total_steps=total_steps) for step in range(total_steps)]
    assert rates.index(1.0) == num_warmup - 1
    assert rates[0] == 1 / num_warmup


@pytest.mark.parametrize("lr_schedule", ["linear", "cosine", "constant"])
@pytest.mark.parametrize("warmup_ratio", [0.0, 0.1, 0.9])
def test_the_share_of_the_learning_rates_to_come_is_that_of_their_sum(lr_schedule: str, warmup_ratio: float) -> None:
    train, total_steps = train_config(lr=1.0, lr_schedule=lr_schedule, warmup_ratio=warmup_ratio), 1000
    rates = [learning_rate(train, step=step, total_steps=total_steps) for step in range(total_steps)]
    for step in (0, 50, 100, 333, 600, 990, 1000):
        found = share_to_come(train, step=step, total_steps=total_steps)
        assert found == pytest.approx(sum(rates[step:]) / sum(rates), abs=3e-3)


@pytest.mark.parametrize("lr_schedule", ["constant", "linear", "cosine"])
def test_a_single_step_has_the_full_rate(lr_schedule: str) -> None:
    assert learning_rate(train_config(lr=1.0, lr_schedule=lr_schedule), step=0, total_steps=1) == 1.0


# Decay


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_weights_decay_and_biases_and_norms_do_not(kind: dict[str, object]) -> None:
    found = parameters()
    optimizer = build_optimizer(train_config(weight_decay=0.5, **kind), found, {})
    for parameter in found.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for (name, before), after in zip(parameters().items(), found.values(), strict=True):
        kept = 1 - 0.1 * 0.5 if name in ("stem.weight", "head.weight") else 1
        torch.testing.assert_close(after, before * kept)


def test_the_head_is_the_fastest_and_the_stem_the_slowest() -> None:
    train = train_config(head_lr_scale=10.0, layer_decay=0.5)
    assert [lr_scale(train, part, num_blocks=2) for part in range(4)] == [0.125, 0.25, 0.5, 10.0]
    assert [lr_scale(train_config(), part, num_blocks=2) for part in range(4)] == [1.0] * 4


def test_parameters_of_one_rate_are_one_group() -> None:
    """A fused optimizer runs a kernel for each group."""
    found = parameters()
    scales = dict.fromkeys(found, 1.0) | {"head.weight": 10.0}
    optimizer = build_optimizer(train_config(weight_decay=0.5), found, {}, lr_scales=scales)
    set_learning_rate(optimizer, 0.2)
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    assert {name: rates[id(p)] for name, p in found.items()} == {name: 0.2 * scales[name] for name in found}
    assert len(optimizer.param_groups) == 3


# Clipping


def gradients_of(stage: int) -> list[Tensor]:
    random = torch.Generator().manual_seed(stage)
    return [torch.randn(shape, generator=random) for shape in ((3, 4), (4,), (2, 2, 2))]


def reference(gradients: list[Tensor], *, max_norm: float) -> list[Tensor]:
    clipped = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(clipped, gradients):
        parameter.grad = gradient.clone()
    nn.utils.clip_grad_norm_(clipped, max_norm)
    return [parameter.grad for parameter in clipped if parameter.grad is not None]


@pytest.mark.parametrize("max_norm", [0.1, 4.0, 1e6])
def test_clipping_one_stage_is_torch_s(max_norm: float) -> None:
    gradients = gradients_of(0)
    scale = clip_scale(gradient_norms(gradients), max_norm=max_norm, group=None)
    torch.testing.assert_close(
        [scale * gradient for gradient in gradients], reference(gradients_of(0), max_norm=max_norm)
    )


def clips(world: World, max_norm: float) -> list[Tensor]:
    gradients = gradients_of(world.rank)
    group = torch.distributed.group.WORLD
    scale = clip_scale(gradient_norms(gradients), max_norm=max_norm, group=group)
    return [scale * gradient for gradient in gradients]


@pytest.mark.parametrize("max_norm", [0.1, 6.0, 1e6])
def test_clipping_two_stages_is_that_of_all_their_gradients(ranks: RankPool, max_norm: float) -> None:
    first, second = ranks.run(2, clips, max_norm)
    torch.testing.assert_close(first + second, reference(gradients_of(0) + gradients_of(1), max_norm=max_norm))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("changes", OPTIMIZERS)
def test_a_scaled_step_is_one_on_scaled_gradients(changes: dict[str, object], dtype: torch.dtype) -> None:
    """To the last bits, also in a type that ``grad_scale`` does not know; a step without a scale follows as ever."""
    ours, theirs = parameters(), parameters()
    for parameter in (*ours.values(), *theirs.values()):
        parameter.data = parameter.data.to(dtype)
    optimizers = [build_optimizer(train_config(**changes), of, {}) for of in (ours, theirs)]
    for number, scale in enumerate((0.3, 1.0, 0.01, None)):
        for index, (mine, other) in enumerate(zip(ours.values(), theirs.values())):
            random = torch.Generator().manual_seed(100 * number + index)
            mine.grad = torch.randn(mine.shape, generator=random, dtype=dtype)
            other.grad = mine.grad * torch.tensor(1.0 if scale is None else scale, dtype=dtype)
        if scale is None:
            optimizers[0].step()
        else:
            scaled_step(optimizers[0], torch.tensor(scale, dtype=dtype))
        optimizers[1].step()
        tolerance = 1e-6 if dtype == torch.float32 else 1e-14
        torch.testing.assert_close(list(ours.values()), list(theirs.values()), rtol=tolerance, atol=tolerance)


# State by name


def step(optimizer: torch.optim.Optimizer, of: Mapping[str, nn.Parameter], number: int) -> None:
    for index, parameter in enumerate(of.values()):
        random = torch.Generator().manual_seed(100 * number + index)
        parameter.grad = torch.randn(parameter.shape, generator=random)
    optimizer.step()


def rebuilt(
    train: TrainConfig, of: Mapping[str, nn.Parameter], state: OptimizerState
) -> tuple[dict[str, nn.Parameter], torch.optim.Optimizer]:
    """Other parameter objects of the same names and values, in another order, with an optimizer of their own."""
    copies = {name: nn.Parameter(parameter.detach().clone()) for name, parameter in reversed(of.items())}
    copied_state = {name: {key: value.clone() for key, value in kept.items()} for name, kept in state.items()}
    return {name: copies[name] for name in of}, build_optimizer(train, copies, copied_state)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_state_survives_a_rebuild_by_name(kind: dict[str, object]) -> None:
    train = train_config(**kind)
    undisturbed, moved = parameters(), parameters()
    steady, optimizer = build_optimizer(train, undisturbed, {}), build_optimizer(train, moved, {})
    for number in range(6):
        if number in (1, 4):
            moved, optimizer = rebuilt(train, moved, take_state(optimizer, moved))
        step(steady, undisturbed, number)
        step(optimizer, moved, number)
    for name, parameter in undisturbed.items():
        assert torch.equal(moved[name], parameter), name


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_empty_state_is_what_a_stepped_optimizer_keeps(kind: dict[str, object]) -> None:
    train, found = train_config(**kind), parameters()
    optimizer = build_optimizer(train, found, {})
    assert take_state(optimizer, found) == {}
    step(optimizer, found, 0)
    for name, kept in take_state(optimizer, found).items():
        config = load_config("digits", ["freeze.policy=none"]).model_copy(update={"train": train})
        empty = empty_state(config, found[name], device=torch.device("cpu"))
        assert set(kept) == set(empty) == set(state_keys(config, found[name]))
        assert all((kept[key].shape, kept[key].dtype) == (empty[key].shape, empty[key].dtype) for key in kept)


def test_parameters_without_state_start_anew() -> None:
    train, found = train_config(), parameters()
    optimizer = build_optimizer(train, found, {})
    step(optimizer, found, 0)
    state = take_state(optimizer, found)
    del state["head.weight"]
    _, again = rebuilt(train, found, state)
    assert len(again.state) == len(found) - 1
