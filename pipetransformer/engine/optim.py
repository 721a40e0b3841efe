"""Optimizer and gradient clipping."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipetransformer.config import Config, TrainConfig
from pipetransformer.dp import give_state, make_optimizer, state_factor
from pipetransformer.models import Chain


def build_optimizer(
    train: TrainConfig,
    parameters: Mapping[str, nn.Parameter],
    state: Mapping[str, Mapping[str, Tensor]],
    *,
    lr_scales: Mapping[str, float] | None = None,
) -> torch.optim.Optimizer:
    """The optimizer over ``parameters``, without weight decay on biases and norms.

    Args:
        parameters: parameters by name.
        state: optimizer state to continue with, by parameter name; parameters may be missing.
        lr_scales: learning rate of every parameter as a multiple of the step's, by name; None for 1. The optimizer's
            groups keep it as ``lr_scale``.
    """
    alike: dict[tuple[float, float], list[nn.Parameter]] = defaultdict(list)
    for name, parameter in parameters.items():
        scale = 1.0 if lr_scales is None else lr_scales[name]
        alike[scale, train.weight_decay if parameter.ndim > 1 else 0.0].append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": found, "lr_scale": scale, "weight_decay": decay} for (scale, decay), found in alike.items()
    ]
    groups = groups or [{"params": [], "lr_scale": 1.0, "weight_decay": 0.0}]  # where all units are frozen in place
    optimizer = make_optimizer(train, groups)
    for name, parameter in parameters.items():
        if name in state:
            give_state(optimizer, parameter, state[name])
        elif state and train.optimizer == "sgd" and train.momentum:
            # Note: fused SGD cannot mix parameters with and without a buffer. A zero buffer gives the same first step.
            optimizer.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter)}
    return optimizer


def optimizer_factor(config: Config) -> float:
    """Bytes of weights and optimizer state together, per byte of weights."""
    return 1.0 + state_factor(config)


def tables_by_row(train: TrainConfig, chain: Chain) -> frozenset[str]:
    """Names of the large tables of embeddings whose gradients come, and are summed, by row, in memory that stays.

    None for optimizers of timm, which are free to write to the gradients of all rows, and none for compiled blocks.
    """
    return chain.large_tables if train.optimizer in ("adamw", "sgd") and not train.compile else frozenset()


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Gives every group of an optimizer of ``build_optimizer`` its share of the step's learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]


def lr_scale(train: TrainConfig, part: int, *, num_blocks: int) -> float:
    """Learning rate of a part of the model as a multiple of the step's: layer-wise decay (ULMFiT, arXiv 1801.06146,
    section 3.2, where it is called discriminative fine-tuning), counted from the head.

    Args:
        part: 0 for the stem, i + 1 for block i, ``num_blocks`` + 1 for the head.
    """
    head = num_blocks + 1
    return train.head_lr_scale if part == head else train.layer_decay ** (head - part)


def clip_scale(norms: Tensor, *, max_norm: float, group: dist.ProcessGroup | None) -> Tensor:
    """The number, at most 1, that brings the norm of all gradients of the model down to ``max_norm`` [].

    Stages hold different parameters, and replicas the same gradients, or different ones where they share them out. So
    the sum of squares over one pipeline, or over all ranks, is the square of the global norm.

    Args:
        norms: norm of each local gradient [gradients].
        group: the ranks that hold one model's gradients together; None for this rank alone.
    """
    norm = torch.linalg.vector_norm(norms)
    if group is not None:
        squares = norm.square()
        dist.all_reduce(squares, group=group)
        norm = squares.sqrt()
    scale: Tensor = max_norm / (norm + 1e-6)
    return scale.clamp_(max=1.0)
