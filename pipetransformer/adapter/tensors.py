"""Tensors: operations that torch fuses, and bases of views."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def gradient_norms(gradients: Sequence[Tensor]) -> Tensor:
    """Norm of every gradient [len(gradients)] in one fused pass.

    Note: ``torch.nn.utils.get_total_norm`` fuses alike but returns only the total; ``_foreach_norm`` is what it calls.
    """
    return torch.stack(torch._foreach_norm(list(gradients)))


def belongs_to_parameter(tensor: Tensor) -> bool:
    """Whether ``tensor`` is a parameter or a view of one. Note: a view's base has no public name."""
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)


def scale_gradients_(gradients: Sequence[Tensor], scale: Tensor) -> None:
    """Multiplies all gradients by one scalar tensor in one fused pass, without a device synchronisation."""
    torch._foreach_mul_(list(gradients), scale)
