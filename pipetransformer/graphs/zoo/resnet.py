"""timm's ResNet-101 (He et al. 2016, arXiv 1512.03385) without operations in place.

A graph may be cut behind any operation; what arrives at the next stage must not be overwritten there, so residual sum
and ReLU make new tensors. Same parameter names and same values to the bit as timm's own.
"""

from __future__ import annotations

import timm
from timm.models import resnet
from torch import Tensor, nn


class _Bottleneck(resnet.Bottleneck):
    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.act1(self.bn1(self.conv1(x)))
        x = self.act2(self.bn2(self.conv2(x)))
        result: Tensor = self.act3(self.bn3(self.conv3(x)) + shortcut)
        return result


def resnet101(
    *,
    num_classes: int = 1000,
    layers: tuple[int, ...] = (3, 4, 23, 3),
    channels: tuple[int, ...] = (64, 128, 256, 512),
) -> nn.Module:
    """Images [batch, 3, height, width] -> logits [batch, num_classes]. Random weights, as timm draws them.

    Args:
        layers: blocks of each group.
        channels: channels of the 3x3 convolution in the blocks of each group.
    """
    model: nn.Module = timm.create_model(
        "resnet101", pretrained=False, num_classes=num_classes, block=_Bottleneck, layers=layers, channels=channels
    )
    for module in model.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = False
    return model
