"""Small models that are no chain, each with what makes a graph hard to cut, and their reference gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipetransformer.graphs.graph import Graph, trace
from pipetransformer.graphs.zoo import ZOO, zoo_model

ROWS = 3  # of a micro-batch


class ResidualNet(nn.Module):
    """Batch normalisation, shortcuts, changes in place, one branch that is only a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.blocks = nn.ModuleList([_Residual(8, 8), _Residual(8, 12), _Residual(12, 12)])
        self.head = nn.Linear(12, 5)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.stem(images)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden.mean((2, 3)))


class _Residual(nn.Module):
    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, out, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(out, momentum=0.3)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(out)
        self.shortcut = nn.Conv2d(width, out, 1) if width != out else None

    def forward(self, hidden: Tensor) -> Tensor:
        branch = self.norm1(self.conv1(hidden)).relu_()
        branch = self.norm2(self.conv2(branch))
        branch += hidden if self.shortcut is None else self.shortcut(hidden)
        return branch.relu_()


class LongSkips(nn.Module):
    """Every level of the encoder feeds the decoder past all that is deeper; the input itself is used at the end. One
    tensor is changed through a view of it."""

    def __init__(self) -> None:
        super().__init__()
        widths = [4, 6, 8]
        self.down = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in zip([3, *widths], widths))
        self.bottom = nn.Conv2d(8, 8, 3, padding=1)
        self.up = nn.ModuleList(nn.Conv2d(2 * b, a, 3, padding=1) for a, b in zip([4, 4, 6], widths))
        self.last = nn.Conv2d(4 + 3, 5, 1)

    def forward(self, images: Tensor) -> Tensor:
        hidden, skips = images, []
        for conv in self.down:
            hidden = torch.tanh(conv(hidden))
            skips.append(hidden)
            hidden = F.max_pool2d(hidden, 2)
        hidden = self.bottom(hidden)
        hidden[:, :2].add_(skips[-1].mean())
        for conv, skip in zip(reversed(self.up), reversed(skips)):
            hidden = F.interpolate(hidden, size=skip.shape[-2:])
            hidden = torch.tanh(conv(torch.cat((hidden, skip), dim=1)))
        return self.last(torch.cat((hidden, images), dim=1)).mean((2, 3))


class TwoInputCells(nn.Module):
    """Cells that read the two cells before them, and branches that are views of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.cells = nn.ModuleList(_Cell() for _ in range(3))
        self.head = nn.Linear(8, 5)

    def forward(self, images: Tensor) -> Tensor:
        before = current = self.stem(images)
        for cell in self.cells:
            before, current = current, cell(current, before)
        return self.head(current.relu().mean((2, 3)))


class _Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(8)
        self.left = nn.Conv2d(4, 4, (1, 3), padding=(0, 1))
        self.right = nn.Conv2d(4, 4, (3, 1), padding=(1, 0))
        self.previous = nn.Conv2d(8, 8, 1)

    def forward(self, current: Tensor, before: Tensor) -> Tensor:
        left, right = self.norm(current).transpose(2, 3).chunk(2, dim=1)
        mixed = torch.cat((self.left(left), self.right(right)), dim=1).transpose(2, 3)
        return mixed + F.avg_pool2d(self.previous(before).relu(), 3, 1, 1)


class TiedLanguageModel(nn.Module):
    """Tied embeddings, position ids, a mask made of the token ids (0 pads) through a view, and a layer never used."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 8)
        self.positions = nn.Embedding(6, 8)
        self.register_buffer("scale", torch.tensor(0.5), persistent=False)
        self.blocks = nn.ModuleList(_Attention() for _ in range(3))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.tokens.weight
        self.never = nn.Linear(2, 2)

    def forward(self, ids: Tensor) -> Tensor:
        steps = torch.arange(ids.shape[1], device=ids.device)
        mask = torch.zeros(ids.shape[1], ids.shape[1], dtype=self.scale.dtype)
        mask[:-1].masked_fill_(steps[:-1, None] < steps[None, :], -1e9)
        mask = mask + (ids == 0).to(mask.dtype)[:, None, :] * -1e9
        hidden = self.tokens(ids) + self.positions(steps)
        for block in self.blocks:
            hidden = block(hidden, mask) * self.scale + hidden
        return self.head(self.norm(hidden)).flatten(1)


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.mixed = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        query, key, value = self.mixed(self.norm(hidden)).split(8, dim=-1)
        scores = query @ key.transpose(1, 2) + mask
        return self.out(torch.softmax(scores, dim=-1) @ value)


class WithoutGradients(nn.Module):
    """Numbers and a detached tensor, made of what the first layer gives, that the last layers need."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.body = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.Tanh())))
        self.table = nn.Embedding(8, 8)
        self.last = nn.Linear(8, 5)

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.first(rows)
        largest, scale = hidden.argmax(1), hidden.detach().std(1, keepdim=True)
        with torch.no_grad():
            shift = hidden.cumsum(1)
        return self.last(self.body(hidden) * scale + self.table(largest) + shift)


def _images(rows: int) -> Tensor:
    return torch.randn(rows, 3, 8, 8, dtype=torch.float64)


def _ids(rows: int) -> Tensor:
    return torch.randint(0, 11, (rows, 6))


_Model = tuple[Callable[[], nn.Module], Callable[[int], Tensor]]

MODELS: dict[str, _Model] = {
    "residual": (ResidualNet, _images),
    "long skips": (LongSkips, _images),
    "two inputs": (TwoInputCells, _images),
    "tied": (TiedLanguageModel, _ids),
    "without gradients": (WithoutGradients, lambda rows: torch.randn(rows, 6, dtype=torch.float64)),
}


def _zoo(name: str) -> _Model:
    model = zoo_model(name)
    overrides = {**model.small, **({"dropout": 0.0} if name.startswith(("gpt2", "unet")) else {})}

    def data(rows: int) -> Tensor:
        example = model.example(batch_size=rows, seed=2, **model.small_input)
        return example.double() if example.is_floating_point() else example

    return lambda: model.build(**overrides), data


SMALL_ZOO: dict[str, _Model] = {name: _zoo(name) for name in ZOO}


def build(name: str) -> nn.Module:
    """The same weights on every rank, float64, training mode."""
    torch.manual_seed(0)
    return (MODELS | SMALL_ZOO)[name][0]().double().train()


def traced(name: str, *, depth: int | None = None) -> tuple[nn.Module, Graph]:
    model = build(name)
    return model, trace(model, (batch(name, num_microbatches=1)[0],), depth=depth)


def even_cut(graph: Graph, num_stages: int) -> tuple[int, ...]:
    return tuple(graph.num_units * stage // num_stages for stage in range(1, num_stages))


def batch(name: str, *, num_microbatches: int) -> tuple[Tensor, Tensor]:
    """(input, target) [micro-batches x ROWS, ...], the same on every rank."""
    torch.manual_seed(1)
    data = (MODELS | SMALL_ZOO)[name][1](num_microbatches * ROWS)
    return data, torch.randn(build(name)(data).shape, dtype=torch.float64)


def loss(output: Tensor, target: Tensor) -> Tensor:
    """A sum, so that it needs no knowledge of the whole batch."""
    return (output - target).square().sum()


@dataclass(frozen=True)
class Reference:
    """The unpartitioned model after one mini-batch: gradients, and running statistics as they must be."""

    losses: Tensor
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]


def reference(model: nn.Module, data: Tensor, target: Tensor, *, num_microbatches: int) -> Reference:
    """The model over the same micro-batches; statistics of what entered its normalisations, all rows at once."""
    model = copy.deepcopy(model)
    rows: dict[str, list[Tensor]] = {}
    norms = {name: module for name, module in model.named_modules() if isinstance(module, nn.BatchNorm2d)}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for name, norm in norms.items():
        norm.register_forward_pre_hook(lambda _, given, name=name: rows.setdefault(name, []).append(given[0].detach()))
    losses = []
    for part, goal in zip(data.chunk(num_microbatches), target.chunk(num_microbatches)):
        losses.append(loss(model(part), goal))
        losses[-1].backward()
    for name, norm in norms.items():
        whole = torch.cat(rows[name]).transpose(0, 1).flatten(1)
        assert norm.momentum is not None
        for field, new in (("running_mean", whole.mean(1)), ("running_var", whole.var(1, correction=1))):
            old = buffers[f"{name}.{field}"]
            buffers[f"{name}.{field}"] = (1 - norm.momentum) * old + norm.momentum * new
        buffers[f"{name}.num_batches_tracked"] += 1
    gradients = {n: p.grad for n, p in model.named_parameters(remove_duplicate=False) if p.grad is not None}
    return Reference(torch.stack(losses).detach(), gradients, buffers)


def errors(found: nn.Module, expected: Reference) -> dict[str, float]:
    """Largest error of every gradient and buffer that ``found`` has, relative to the tensor's largest value.

    A bias that a normalisation behind it takes out again has a gradient of zero, of which rounding leaves noise: that
    must be as small here, relative to the largest gradient of the model. A mean may be zero too; its error is seen
    beside the standard deviation.
    """
    result = {}
    largest = max(float(gradient.abs().max()) for gradient in expected.gradients.values())
    for name, parameter in found.named_parameters(remove_duplicate=False):
        if name not in expected.gradients:
            assert parameter.grad is None, name
            continue
        assert parameter.grad is not None, name
        want = expected.gradients[name]
        is_zero = float(want.abs().max()) < 1e-14 * largest
        result[name] = float(parameter.grad.abs().max()) / largest if is_zero else _error(parameter.grad, want)
    for name, buffer in found.named_buffers():
        deviation = 0.0
        if name.endswith("running_mean"):
            deviation = float(expected.buffers[name.replace("running_mean", "running_var")].max()) ** 0.5
        result[name] = _error(buffer.double(), expected.buffers[name].double(), at_least=deviation)
    return result


def _error(have: Tensor, want: Tensor, *, at_least: float = 0.0) -> float:
    return float((have - want).abs().max()) / max(float(want.abs().max()), at_least)
