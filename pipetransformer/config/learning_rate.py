"""The learning rate of every step, and how much of it all a step leaves to come: pure arithmetic."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipetransformer.config.training import TrainConfig


def learning_rate(train: TrainConfig, *, step: int, total_steps: int) -> float:
    """Learning rate of optimizer step ``step`` (from 0): linear warm-up, then linear or cosine decay, or no decay."""
    warmup = math.ceil(train.warmup_ratio * total_steps - 1e-9)  # as transformers rounds
    if step < warmup:
        return train.lr * (step + 1) / warmup
    progress = (step - warmup) / max(1, total_steps - warmup)
    if train.lr_schedule == "linear":
        return train.lr * (1.0 - progress)
    if train.lr_schedule == "cosine":
        return train.lr * 0.5 * (1.0 + math.cos(math.pi * progress))
    return train.lr


def share_to_come(train: TrainConfig, *, step: int, total_steps: int) -> float:
    """The sum of the learning rates from optimizer step ``step`` on, as a share of the sum of all, 1 to 0.

    By the areas under the schedule, to a part of ``total_steps``.
    """
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
