"""Optimizers, and their state by parameter name, so that it can move with its parameter.

Every optimizer here keeps tensors for each parameter and nothing else, and updates each from its own: what has moved
to another rank goes on there as if it had been left alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from pipetransformer.config import Config, TrainConfig
from pipetransformer.errors import UserError

OptimizerState = dict[str, dict[str, Tensor]]
"""The optimizer's tensors, by parameter name and then by the optimizer's own name for each."""

_FACTORED = frozenset({"adafactorbv", "muon"})  # what the others keep has a parameter's shape, or is one number
EMA, RECENT = "ema", "recent"
"""Names of the weights' moving averages among them, where there are such: the one that is evaluated and saved, and the
one that blocks freeze with."""


def make_optimizer(train: TrainConfig, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """torch's own AdamW or SGD, fused, or another one by timm's factory.

    Raises:
        UserError: for options that it does not take.
    """
    given = train.optimizer_options
    options: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in given.items()}
    name, lr = train.optimizer, train.lr
    try:
        if name == "adamw":
            settings: dict[str, Any] = {"betas": train.betas, "eps": train.eps, "fused": True}
            return torch.optim.AdamW(groups, lr=lr, **{**settings, **options})
        if name == "sgd":
            return torch.optim.SGD(groups, lr=lr, **{"momentum": train.momentum, "fused": True, **options})
        import timm.optim

        made: Any = timm.optim
        optimizer: torch.optim.Optimizer = made.create_optimizer_v2(
            groups, opt=name, lr=lr, momentum=train.momentum, **options
        )
        return optimizer
    except (TypeError, ValueError, LookupError, AssertionError, NotImplementedError) as error:
        said = f"{type(error).__name__}: {' '.join(str(error).split())}"
        if options:
            told = f"train.optimizer_options: {name} does not take them ({said}); leave out what it lacks"
        else:
            told = f"train.optimizer: {name} cannot be made ({said}); give another train.momentum, or another one"
        raise UserError(told) from error


def has_state(config: Config) -> bool:
    """Whether anything is kept for a parameter after its first step."""
    return bool(_tensors(config.train, (1, 1), torch.float32)) or bool(config.averages)


def state_keys(config: Config, parameter: Tensor) -> tuple[str, ...]:
    """Names of the tensors that are kept for a parameter after its first step, in a fixed order."""
    return tuple(_kept(config, parameter))


def empty_state(config: Config, parameter: Tensor, *, device: torch.device) -> dict[str, Tensor]:
    """Uninitialised state of one parameter, to be filled from a transfer or a checkpoint."""
    kept = _kept(config, parameter).items()
    return {key: torch.empty(shape, dtype=dtype, device=device) for key, (shape, dtype) in kept}


def state_factor(config: Config) -> float:
    """Bytes of the state of a large parameter, per byte of the parameter."""
    side = 64
    kept = _kept(config, torch.empty(side, side, device="meta")).values()
    return sum(shape.numel() for shape, _ in kept if shape) / side**2


def take_state(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> OptimizerState:
    """The optimizer's tensors by parameter name, without the parameters that have none yet, on its parameter's device:
    those that are not fused keep their number of steps on the CPU."""
    return {
        name: {key: value.to(p.device) for key, value in optimizer.state[p].items() if isinstance(value, Tensor)}
        for name, p in parameters.items()
        if p in optimizer.state
    }


def give_state(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, kept: Mapping[str, Tensor]) -> None:
    """Continues with what ``take_state`` gave of a parameter."""
    on_device = optimizer.defaults.get("fused") or optimizer.defaults.get("capturable")
    optimizer.state[parameter] = {key: t if t.dim() or on_device else t.cpu() for key, t in kept.items()}


_Kept = Mapping[str, tuple[torch.Size, torch.dtype]]


def _kept(config: Config, parameter: Tensor) -> _Kept:
    averages = dict.fromkeys(config.averages, (parameter.shape, parameter.dtype))
    return {**_tensors(config.train, tuple(parameter.shape), parameter.dtype), **averages}


def _tensors(train: TrainConfig, shape: tuple[int, ...], dtype: torch.dtype) -> _Kept:
    settings = train.optimizer, train.momentum, json.dumps(train.optimizer_options)
    if train.optimizer in _FACTORED:
        return _tensors_of(*settings, shape, dtype)
    kept = _tensors_of(*settings, (2,), dtype)  # no step of a large parameter
    return {key: (torch.Size(shape) if found else found, kind) for key, (found, kind) in kept.items()}


@lru_cache(maxsize=1024)
def _tensors_of(name: str, momentum: float, options: str, shape: tuple[int, ...], dtype: torch.dtype) -> _Kept:
    """Shape and type of what an optimizer keeps for a parameter, by a step of it: optimizers do not tell it."""
    given = {"optimizer": name, "momentum": momentum, "optimizer_options": json.loads(options)}
    train = TrainConfig.model_validate({"epochs": 1, "batch_size": 1, "lr": 1.0, **given})
    parameter = nn.Parameter(torch.zeros(shape, dtype=dtype))
    parameter.grad = torch.zeros_like(parameter)
    optimizer = make_optimizer(train, [{"params": [parameter], "weight_decay": 0.0}])
    optimizer.step()
    found = take_state(optimizer, {"": parameter}).get("", {})
    return {key: (value.shape, value.dtype) for key, value in found.items()}
