"""The simplified U-Net (B, C) of torchgpipe's benchmarks (arXiv 2004.09910, Section 4.2): a model with long skips.

Every encoder level sends its output past all deeper levels to the decoder level of the same size.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipetransformer.errors import UserError


class UNet(nn.Module):
    """Images [batch, 3, height, width] -> logits [batch, out_channels, height, width]. Weights as torch draws them.

    Args:
        num_convs: convolutions in every level of encoder and decoder and in the bottleneck (B of the paper).
        base_channels: channels of the first encoder level, doubled in each deeper one (C of the paper).
        depth: levels; height and width must be at least 2 ** (depth + 1).

    Raises:
        UserError: ``base_channels`` is odd (the last decoder level has half as many), or a count is not positive.
    """

    def __init__(
        self,
        *,
        num_convs: int = 5,
        base_channels: int = 64,
        depth: int = 5,
        out_channels: int = 1,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        if base_channels < 2 or base_channels % 2:
            raise UserError(f"base_channels: {base_channels} is not allowed; give a positive even number")
        if num_convs < 1 or depth < 1:
            raise UserError(f"num_convs: {num_convs} and depth: {depth} must be at least 1")
        widths = [base_channels * 2**level for level in range(depth)]
        self.encoder = nn.ModuleList(
            _level([incoming, *[width] * num_convs], dropout) for incoming, width in zip([3, *widths], widths)
        )
        self.bottleneck = _level([widths[-1], *[2 * widths[-1]] * (num_convs - 1), widths[-1]], dropout)
        self.decoder = nn.ModuleList(
            _level([2 * width, *[width // 2] * num_convs], dropout) for width in reversed(widths)
        )
        self.segment = nn.Conv2d(base_channels // 2, out_channels, 1, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        hidden, skips = images, []
        for level in self.encoder:
            hidden = level(hidden)
            skips.append(hidden)
            hidden = F.max_pool2d(hidden, 2)
        hidden = self.bottleneck(hidden)
        for level, skip in zip(self.decoder, reversed(skips)):
            hidden = F.interpolate(hidden, size=skip.shape[-2:])
            hidden = level(torch.cat((hidden, skip), dim=1))
        logits: Tensor = self.segment(hidden)
        return logits


def _level(widths: list[int], dropout: float) -> nn.Sequential:
    return nn.Sequential(
        *(
            nn.Sequential(
                nn.Conv2d(incoming, width, 3, padding=1, bias=False),
                nn.Dropout2d(dropout),
                nn.InstanceNorm2d(width),
                nn.LeakyReLU(0.01),
            )
            for incoming, width in pairwise(widths)
        )
    )
