"""Optimizer state by parameter name, so that it can move with its parameter."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from pipetransformer.config import TrainConfig

OptimizerState = dict[str, dict[str, Tensor]]
"""The optimizer's tensors, by parameter name and then by the optimizer's own name for each."""


def state_keys(train: TrainConfig) -> tuple[str, ...]:
    """Names of the tensors that the optimizer keeps for a parameter after its first step, in a fixed order."""
    if train.optimizer == "adamw":
        return ("exp_avg", "exp_avg_sq", "step")
    return ("momentum_buffer",) if train.momentum else ()


def empty_state(train: TrainConfig, parameter: Tensor, *, device: torch.device) -> dict[str, Tensor]:
    """Uninitialised optimizer state of one parameter, to be filled from a transfer or a checkpoint.

    The tensors have the shape and the type of ``parameter``, but for AdamW's ``step``: one float32 number.
    """
    return {
        key: torch.zeros((), dtype=torch.float32, device=device)
        if key == "step"
        else torch.empty_like(parameter, device=device)
        for key in state_keys(train)
    }


def take_state(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> OptimizerState:
    """The optimizer's tensors by parameter name, without the parameters that have none yet."""
    return {
        name: {key: value for key, value in optimizer.state[p].items() if isinstance(value, Tensor)}
        for name, p in parameters.items()
        if p in optimizer.state
    }
