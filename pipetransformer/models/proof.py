"""The proof of a wrapped model: the library's own outputs, of the whole, of blocks cut in halves, and of one row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from pipetransformer.errors import UserError
from pipetransformer.models.halves import Halves
from pipetransformer.models.rows import row_of


def differ(ours: Tensor, own: Tensor) -> bool:
    """Whether by more than other kernels and shapes could make it; a mistake between modules shows by far more."""
    return ours.shape != own.shape or bool((ours - own).abs().max() > 1e-3 * own.abs().max().clamp_min(1.0))


def halves_differ(halves: Halves, block: nn.Module, hidden: Tensor, *, arguments: Mapping[str, Any]) -> bool:
    """Whether the two halves differ from ``block``, in eval mode or, with the same dropout, in train mode.

    The block is left as it was, in eval mode.
    """
    with _moved(block, hidden):
        for mode in (False, True):
            block.train(mode)
            torch.manual_seed(0)
            own = block(hidden, **arguments)
            torch.manual_seed(0)
            ours = halves.mlp(block, halves.attention(block, hidden, **arguments), **arguments)
            if differ(ours, own):
                return True
    return False


def row_differs(
    halves: Halves, block: nn.Module, hidden: Tensor, at: Tensor | None, *, arguments: Mapping[str, Any]
) -> bool:
    """Whether one row of each sample differs from the same row of ``block``.

    In eval mode, and in train mode with each dropout in turn dropping everything and the others nothing: random numbers
    of one row are not those of all rows, but where they enter must be the same. The block is left as it was, in eval
    mode.
    """
    assert halves.attention_of_row is not None
    dropouts = [module for module in block.modules() if isinstance(module, nn.Dropout)]
    rates = [dropout.p for dropout in dropouts]
    # Note: other kernels of attention may refuse to drop everything.
    with _moved(block, hidden), sdpa_kernel(SDPBackend.MATH):
        try:
            for dropped in (None, *dropouts):
                block.train(dropped is not None)
                for dropout in dropouts:
                    dropout.p = float(dropout is dropped)
                torch.manual_seed(0)  # whole samples are dropped alike (stochastic depth)
                own = row_of(block(hidden, **arguments), at)
                torch.manual_seed(0)
                ours = halves.mlp(block, halves.attention_of_row(block, hidden, at, **arguments), **arguments)
                if differ(ours, own) or not ours.isfinite().all():
                    return True
        finally:
            for dropout, rate in zip(dropouts, rates):
                dropout.p = rate
    return False


@contextmanager
def _moved(block: nn.Module, hidden: Tensor) -> Iterator[None]:
    """Moves biases, norms and layer scales: where they start, at 0, 1 or 1e-6, they would hide a mistake.

    Random numbers, weights and eval mode are as before at the end.
    """
    moved = [parameter for parameter in block.parameters() if parameter.ndim <= 1]
    kept = [parameter.detach().clone() for parameter in moved]
    random = torch.Generator().manual_seed(0)
    devices = [hidden.device] if hidden.device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices=devices):
        try:
            for parameter in moved:
                parameter.add_(torch.randn(parameter.shape, generator=random).to(parameter), alpha=0.1)
            yield
        finally:
            for parameter, value in zip(moved, kept):
                parameter.copy_(value)
            block.eval()


def indivisible(name: str, found: str) -> UserError:
    """Blocks that cannot be cut in halves."""
    return UserError(f"pipe.units: half cannot cut the blocks of {name} ({found}); give block")


def unlike(name: str, family: str, found: str) -> UserError:
    """A model that is none of its family."""
    return UserError(
        f"model.name: {name} looks like {family} but computes something else between its parts ({found}); add its own "
        "entry to FAMILIES in pipetransformer/models/families.py"
    )
