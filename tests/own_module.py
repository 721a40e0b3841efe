"""A module of nobody's library, and data for it."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(dropout)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))


class Mine(nn.Module):
    """A stem, blocks and a head, under names of its own."""

    def __init__(self, *, width: int = 8, depth: int = 4, classes: int = 3, dropout: float = 0.0) -> None:
        super().__init__()
        self.start, self.shift = nn.Linear(6, width), nn.Parameter(0.1 * torch.ones(width))
        self.tower = nn.ModuleList(Block(width, dropout) for _ in range(depth))
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, features: Tensor) -> Tensor:
        x = self.start(features) + self.shift
        for block in self.tower:
            x = block(x)
        return self.out(self.norm(x).mean(dim=1))


def samples(number: int, *, seed: int, classes: int = 3) -> list[tuple[Tensor, int]]:
    """Five points about one of ``classes`` centres [5, 6], with its number."""
    random = torch.Generator().manual_seed(seed)
    centres = torch.randn((classes, 6), generator=torch.Generator().manual_seed(7))
    labels = torch.randint(classes, (number,), generator=random).tolist()
    noise = torch.randn((number, 5, 6), generator=random)
    return [(centres[label] + noise[row], label) for row, label in enumerate(labels)]
