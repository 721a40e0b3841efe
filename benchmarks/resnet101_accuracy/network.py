"""The network of the table and the learning rate of its training: the original's, and the small one's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from pipetransformer.graphs.zoo import zoo_model

__all__ = ["Network", "Recipe", "learning_rate"]

_EPOCHS, _WARM_EPOCHS, _FALLS = 90, 4, (30, 60, 80)  # the original's
_WARM_SHARE = 0.1  # of the small one's run


@dataclass(frozen=True, slots=True)
class Network:
    """ResNet-101 itself, or a ResNet of the same blocks.

    Attributes:
        stride: of a first convolution of 3 x 3 without the pooling behind it, for small pictures; None keeps both.
        channels_last: the order of weights and activations in memory; processors convolve faster so.
    """

    layers: tuple[int, ...] = (3, 4, 23, 3)
    channels: tuple[int, ...] = (64, 128, 256, 512)
    stride: int | None = None
    channels_last: bool = False

    def build(self, *, num_classes: int) -> nn.Module:
        model = zoo_model("resnet101").build(num_classes=num_classes, layers=self.layers, channels=self.channels)
        if self.stride is not None:
            assert isinstance(model.conv1, nn.Conv2d)
            model.conv1 = nn.Conv2d(3, model.conv1.out_channels, 3, stride=self.stride, padding=1, bias=False)
            nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
            model.maxpool = nn.Identity()
        if self.channels_last:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # an overload without dtype
        return model


@dataclass(frozen=True, slots=True)
class Recipe:
    """SGD with Nesterov momentum.

    Attributes:
        base_rate: the learning rate at ``base_batch``; in proportion to the batch at others.
        schedule: the original's (``learning_rate``), or a line up from 0 over a tenth of the run and down to 0 again.
    """

    epochs: int = _EPOCHS
    base_rate: float = 0.1
    base_batch: int = 256
    weight_decay: float = 1e-4
    momentum: float = 0.9
    schedule: Literal["original", "line"] = "original"

    def rate(self, progress: float, *, batch_size: int) -> float:
        """At a share of the run."""
        multiplier = batch_size / self.base_batch
        if self.schedule == "original":
            return learning_rate(progress, base=self.base_rate, multiplier=multiplier)
        return self.base_rate * multiplier * min(progress / _WARM_SHARE, (1 - progress) / (1 - _WARM_SHARE))


def learning_rate(progress: float, *, base: float = 0.1, multiplier: float) -> float:
    """The original's, which is written for 90 epochs, at a share of the run (Goyal et al. 2017, arXiv 1706.02677).

    From ``base`` it grows to ``multiplier`` times that over 4 epochs, and falls to a tenth at 30, 60 and 80.
    """
    epoch = _EPOCHS * progress
    warm = 1 + min(1.0, epoch / _WARM_EPOCHS) * (max(1.0, multiplier) - 1)
    return base * warm * 0.1 ** sum(epoch >= fall for fall in _FALLS)
