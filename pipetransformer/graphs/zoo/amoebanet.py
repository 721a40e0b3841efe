"""AmoebaNet-D (Real et al. 2019, arXiv 1802.01548), the convolutional model of GPipe's and torchgpipe's benchmarks.

A stem convolution and two reduction cells, then three groups of normal cells with a reduction cell between groups.
A cell reads the outputs of the two cells before it: the skip edges that make the model a graph and no chain.
Left out, as in those benchmarks: the auxiliary head and drop path.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipetransformer.errors import UserError

Step = tuple[tuple[str, int], tuple[str, int]]

# A step adds two operations on earlier states and makes the next state. State 0 is the output of the cell before,
# state 1 that of the cell before it, both brought to the cell's number of channels; the steps make states 2 to 6.
_NORMAL: tuple[Step, ...] = (
    (("conv_1x1", 1), ("max_pool_3x3", 1)),
    (("identity", 1), ("conv_1x7_7x1", 0)),
    (("conv_1x1", 0), ("conv_1x7_7x1", 0)),
    (("max_pool_3x3", 2), ("identity", 2)),
    (("avg_pool_3x3", 1), ("conv_1x1", 5)),
)
_REDUCTION: tuple[Step, ...] = (
    (("max_pool_2x2", 0), ("max_pool_3x3", 0)),
    (("identity", 2), ("conv_3x3", 1)),
    (("conv_1x7_7x1", 2), ("max_pool_3x3", 2)),
    (("identity", 3), ("max_pool_2x2", 1)),
    (("avg_pool_3x3", 2), ("conv_1x1", 3)),
)
_REDUCTION_OUTPUTS = (4, 5, 6)


@dataclass(frozen=True, slots=True)
class _Variant:
    normal_outputs: tuple[int, ...]
    projects_pools: bool


Cells = Literal["gpipe", "ftpipe"]
_VARIANTS: dict[str, _Variant] = {
    "gpipe": _Variant(normal_outputs=(0, 3, 4, 6), projects_pools=False),
    "ftpipe": _Variant(normal_outputs=(3, 4, 6), projects_pools=True),
}


class AmoebaNetD(nn.Module):
    """Images [batch, 3, height, width] -> logits [batch, num_classes]. Weights drawn as in TensorFlow's release.

    ``cells="gpipe"`` is TensorFlow's release, GPipe's Table 1 and torchgpipe from 0.0.5 on. ``cells="ftpipe"`` is
    torchgpipe up to 0.0.4 and FTPipe: the same steps, but a normal cell does not pass state 0 on, and each pooling has
    a 1x1 convolution and a norm behind it. Both older sources count ``num_layers`` per group: theirs times 3 is ours.

    Args:
        num_layers: normal cells, a third of them in each group (L of the papers).
        num_filters: channels of the cells of the first group (F or D of the papers).
        cells: the variant, as above.

    Raises:
        UserError: ``num_layers`` does not divide by 3, ``num_filters`` not by 8, or ``cells`` is unknown.
    """

    def __init__(
        self, *, num_layers: int = 18, num_filters: int = 208, num_classes: int = 1000, cells: Cells = "gpipe"
    ) -> None:
        super().__init__()
        if num_layers < 3 or num_layers % 3:
            raise UserError(f"num_layers: {num_layers} is not allowed; give a multiple of 3 (three groups of cells)")
        if num_filters < 8 or num_filters % 8:
            raise UserError(f"num_filters: {num_filters} is not allowed; give a multiple of 8")
        if cells not in _VARIANTS:
            raise UserError(f"cells: {cells!r} is not known; give one of {', '.join(_VARIANTS)}")
        channels = num_filters // 4
        self.stem = nn.Sequential(nn.Conv2d(3, channels, 3, stride=2, padding=1, bias=False), _norm(channels))
        self.cells = nn.ModuleList()
        previous_width = current_width = channels
        previous_is_larger = False
        group = [False] * (num_layers // 3)
        for is_reduction in (True, True, *group, True, *group, True, *group):
            channels *= 2 if is_reduction else 1
            cell = Cell(
                current_width,
                previous_width,
                channels,
                is_reduction=is_reduction,
                previous_is_larger=previous_is_larger,
                cells=cells,
            )
            self.cells.append(cell)
            previous_width, current_width = current_width, cell.out_channels
            previous_is_larger = is_reduction
        self.classifier = nn.Linear(current_width, num_classes)
        self.apply(_initialise)

    def forward(self, images: Tensor) -> Tensor:
        previous = current = self.stem(images)
        for cell in self.cells:
            previous, current = current, cell(current, previous)
        logits: Tensor = self.classifier(current.relu().mean((2, 3)))
        return logits


class Cell(nn.Module):
    """``forward(current, previous)``, the outputs of the last two cells, each [batch, channels, height, width].

    Gives [batch, out_channels, height, width], halved in height and width by a reduction cell.

    Args:
        previous_is_larger: the last cell was a reduction cell, so ``previous`` has twice its height and width.
    """

    def __init__(
        self,
        current_width: int,
        previous_width: int,
        channels: int,
        *,
        is_reduction: bool,
        previous_is_larger: bool,
        cells: Cells,
    ) -> None:
        super().__init__()
        variant = _VARIANTS[cells]
        self.steps = _REDUCTION if is_reduction else _NORMAL
        self.outputs = _REDUCTION_OUTPUTS if is_reduction else variant.normal_outputs
        self.out_channels = channels * len(self.outputs)
        self.from_current = _relu_conv_norm(current_width, channels)
        self.from_previous: nn.Module = nn.Identity()
        if previous_is_larger:
            self.from_previous = FactorizedReduction(previous_width, channels)
        elif previous_width != channels:
            self.from_previous = _relu_conv_norm(previous_width, channels)
        self.operations = nn.ModuleList(
            _operation(
                name,
                channels,
                stride=2 if is_reduction and state < 2 else 1,
                projects_pools=variant.projects_pools,
            )
            for step in self.steps
            for name, state in step
        )

    def forward(self, current: Tensor, previous: Tensor) -> Tensor:
        states = [self.from_current(current), self.from_previous(previous)]
        for number, ((_, left), (_, right)) in enumerate(self.steps):
            first, second = self.operations[2 * number], self.operations[2 * number + 1]
            states.append(first(states[left]) + second(states[right]))
        return torch.cat([states[index] for index in self.outputs], dim=1)

    def extra_repr(self) -> str:
        return f"steps={self.steps}, outputs={self.outputs}"


class FactorizedReduction(nn.Module):
    """Halves height and width and loses no pixel column: half the channels read the grid shifted by one pixel."""

    def __init__(self, in_channels: int, channels: int) -> None:
        super().__init__()
        self.even = nn.Conv2d(in_channels, channels // 2, 1, stride=2, bias=False)
        self.odd = nn.Conv2d(in_channels, channels // 2, 1, stride=2, bias=False)
        self.norm = _norm(channels)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden.relu()
        shifted = F.pad(hidden[:, :, 1:, 1:], (0, 1, 0, 1))
        reduced: Tensor = self.norm(torch.cat((self.even(hidden), self.odd(shifted)), dim=1))
        return reduced


def _operation(name: str, channels: int, *, stride: int, projects_pools: bool) -> nn.Module:
    """An operation of as many channels; with stride 2 it makes ceil(size / 2) of a size, also of an odd one."""
    bottleneck = channels // 4
    if name == "identity":
        return nn.Identity()
    if name == "conv_1x1":
        return _relu_conv_norm(channels, channels, stride=stride)
    if name == "conv_3x3":
        return nn.Sequential(
            _relu_conv_norm(channels, bottleneck),
            _relu_conv_norm(bottleneck, bottleneck, kernel=(3, 3), stride=stride),
            _relu_conv_norm(bottleneck, channels),
        )
    if name == "conv_1x7_7x1":
        return nn.Sequential(
            _relu_conv_norm(channels, bottleneck),
            _relu_conv_norm(bottleneck, bottleneck, kernel=(1, 7), stride=(1, stride)),
            _relu_conv_norm(bottleneck, bottleneck, kernel=(7, 1), stride=(stride, 1)),
            _relu_conv_norm(bottleneck, channels),
        )
    pool = {
        "max_pool_2x2": nn.MaxPool2d(2, stride, ceil_mode=True),
        "max_pool_3x3": nn.MaxPool2d(3, stride, padding=1),
        "avg_pool_3x3": nn.AvgPool2d(3, stride, padding=1, count_include_pad=False),
    }[name]
    if not projects_pools:
        return pool
    return nn.Sequential(pool, nn.Conv2d(channels, channels, 1, bias=False), _norm(channels))


def _relu_conv_norm(
    in_channels: int, channels: int, *, kernel: tuple[int, int] = (1, 1), stride: int | tuple[int, int] = 1
) -> nn.Sequential:
    padding = (kernel[0] // 2, kernel[1] // 2)
    convolution = nn.Conv2d(in_channels, channels, kernel, stride=stride, padding=padding, bias=False)
    return nn.Sequential(nn.ReLU(), convolution, _norm(channels))


def _norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=1e-3)


def _initialise(module: nn.Module) -> None:
    """Variance scaling by fan-out, normal, cut at two deviations: 1.3 makes up for the variance that the cut takes."""
    if isinstance(module, (nn.Conv2d, nn.Linear)):
        fan_out = module.weight.numel() // module.weight.shape[1]
        deviation = (1.3 * 2 / fan_out) ** 0.5
        nn.init.trunc_normal_(module.weight, std=deviation, a=-2 * deviation, b=2 * deviation)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
