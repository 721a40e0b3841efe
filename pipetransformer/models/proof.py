"""The proof of a wrapped model: the library's own outputs, of the whole and of every block cut in halves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pipetransformer.models.halves import Halves


def differ(ours: Tensor, own: Tensor) -> bool:
    """Whether by more than other kernels and shapes could make it; a mistake between modules shows by far more."""
    return ours.shape != own.shape or bool((ours - own).abs().max() > 1e-3 * own.abs().max().clamp_min(1.0))


def halves_differ(halves: Halves, block: nn.Module, hidden: Tensor, *, arguments: Mapping[str, Any]) -> bool:
    """Whether the two halves differ from ``block``, in eval mode or, with the same dropout, in train mode.

    Biases, norms and layer scales are moved meanwhile: where they start, at 0, 1 or 1e-6, they would hide a mistake.
    The block is left as it was, in eval mode.
    """
    moved = [parameter for parameter in block.parameters() if parameter.ndim <= 1]
    kept = [parameter.detach().clone() for parameter in moved]
    random = torch.Generator().manual_seed(0)
    devices = [hidden.device] if hidden.device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices=devices):
        try:
            for parameter in moved:
                parameter.add_(torch.randn(parameter.shape, generator=random).to(parameter), alpha=0.1)
            for mode in (False, True):
                block.train(mode)
                torch.manual_seed(0)
                own = block(hidden, **arguments)
                torch.manual_seed(0)
                ours = halves.mlp(block, halves.attention(block, hidden, **arguments), **arguments)
                if differ(ours, own):
                    return True
        finally:
            for parameter, value in zip(moved, kept):
                parameter.copy_(value)
            block.eval()
    return False
