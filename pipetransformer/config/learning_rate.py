"""The learning rate of every step, and how much of it all a step leaves to come: pure arithmetic."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from pipetransformer.errors import UserError

if TYPE_CHECKING:
    from pipetransformer.config.training import TrainConfig

OF_EPOCHS = frozenset({"step", "multistep", "tanh"})
"""Schedules whose options count epochs: timm's."""

_OURS = frozenset({"linear", "cosine", "constant"})


def learning_rate(train: TrainConfig, *, step: int, total_steps: int) -> float:
    """Learning rate of optimizer step ``step`` (from 0): linear warm-up, then as ``train.lr_schedule`` says.

    Raises:
        UserError: for ``train.lr_options`` that the schedule does not take.
    """
    warmup = math.ceil(train.warmup_ratio * total_steps - 1e-9)  # as transformers rounds
    if step < warmup:
        return train.lr * (step + 1) / warmup
    if train.lr_schedule not in _OURS:
        return train.lr * _factors(train, warmup=warmup, total_steps=total_steps)[step - warmup]
    progress = (step - warmup) / max(1, total_steps - warmup)
    if train.lr_schedule == "linear":
        return train.lr * (1.0 - progress)
    if train.lr_schedule == "cosine":
        return train.lr * 0.5 * (1.0 + math.cos(math.pi * progress))
    return train.lr


def share_to_come(train: TrainConfig, *, step: int, total_steps: int) -> float:
    """The sum of the learning rates from optimizer step ``step`` on, as a share of the sum of all, 1 to 0.

    By the areas under the schedule, to a part of ``total_steps``; of a library's schedule, by the sum itself.
    """
    if step >= total_steps:
        return 0.0
    if train.lr_schedule not in _OURS:
        sums = _sums_of(*_key(train), math.ceil(train.warmup_ratio * total_steps - 1e-9), total_steps)
        return 1.0 - sums[step] / sums[-1]
    warmup = train.warmup_ratio * total_steps
    decay = total_steps - warmup

    def behind(progress: float) -> float:
        left = 1.0 - progress
        if train.lr_schedule == "linear":
            return decay * left**2 / 2
        if train.lr_schedule == "cosine":
            return decay * (left / 2 - math.sin(math.pi * progress) / (2 * math.pi))
        return decay * left

    if step < warmup:
        return 1.0 - (step**2 / warmup / 2) / (warmup / 2 + behind(0.0))
    return behind((step - warmup) / decay) / (warmup / 2 + behind(0.0))


def _factors(train: TrainConfig, *, warmup: int, total_steps: int) -> tuple[float, ...]:
    """Of each step behind the warm-up, as a library's schedule has them."""
    return _factors_of(*_key(train), warmup, total_steps)


def _key(train: TrainConfig) -> tuple[str, str, float, int]:
    return train.lr_schedule, json.dumps(train.lr_options), train.lr, train.epochs


@lru_cache(maxsize=8)
def _sums_of(name: str, options: str, lr: float, epochs: int, warmup: int, total_steps: int) -> tuple[float, ...]:
    """Sums of the factors of the first steps, 0 to all of them [total_steps + 1]."""
    rising = ((step + 1) / warmup for step in range(warmup))
    return (0.0, *accumulate((*rising, *_factors_of(name, options, lr, epochs, warmup, total_steps))))


@lru_cache(maxsize=8)
def _factors_of(name: str, options: str, lr: float, epochs: int, warmup: int, total_steps: int) -> tuple[float, ...]:
    given = json.loads(options)
    make = _of_timm if name in OF_EPOCHS else _of_transformers
    try:
        factor = make(name, given, _optimizer(lr), warmup, total_steps, epochs)
        return tuple(factor(step) for step in range(warmup, max(warmup + 1, total_steps)))
    except Exception as error:  # whatever a factory makes of arguments
        said = " ".join(str(error).split())[:200]
        raise UserError(f"train.lr_options: {name} does not take {given} ({type(error).__name__}: {said})") from error


def _of_transformers(
    name: str, options: dict[str, Any], optimizer: Any, warmup: int, total_steps: int, epochs: int
) -> Callable[[int], float]:
    from transformers import get_scheduler

    scheduler: Any = get_scheduler(
        name,
        optimizer,
        num_warmup_steps=warmup,
        num_training_steps=max(1, total_steps),
        scheduler_specific_kwargs=_with_needed(name, options, num_steps=total_steps - warmup),
    )
    factor: Callable[[int], float] = scheduler.lr_lambdas[0]
    return factor


def _with_needed(name: str, options: dict[str, Any], *, num_steps: int) -> dict[str, Any]:
    """What transformers has no default for."""
    needed: dict[str, dict[str, Any]] = {
        "cosine_with_min_lr": {} if "min_lr" in options else {"min_lr_rate": 0.1},
        "warmup_stable_decay": {"num_decay_steps": num_steps // 5},
    }
    return {**needed.get(name, {}), **options}


def _of_timm(
    name: str, options: dict[str, Any], optimizer: Any, warmup: int, total_steps: int, epochs: int
) -> Callable[[int], float]:
    import timm.scheduler

    made: Any = timm.scheduler
    lr, per_epoch = optimizer.param_groups[0]["lr"], max(1, -(-total_steps // max(1, epochs)))
    settings = {"num_epochs": max(1, epochs), "decay_epochs": max(1, epochs // 3), **options}
    scheduler: Any = made.create_scheduler_v2(
        optimizer, sched=name, step_on_epochs=False, updates_per_epoch=per_epoch, **settings
    )[0]

    def factor(step: int) -> float:
        scheduler.step_update(step)
        return float(optimizer.param_groups[0]["lr"] / lr)

    return factor


def _optimizer(lr: float) -> Any:
    """One that a library's schedule is made with: some of its options are learning rates themselves."""
    import torch

    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
