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


def rows_of(gradient: Tensor) -> Tensor:
    """Numbers of the rows that a sparse gradient has, some more than once [rows].

    Note: the public way to them sorts and sums the rows first.
    """
    return gradient._indices()[0]


def storage_of(tensor: Tensor) -> tuple[int, int]:
    """A number of the memory that a tensor lies in, its own while it lives, and its bytes.

    Note: a fake tensor's memory has no address.
    """
    storage = tensor.untyped_storage()
    return storage._cdata, storage.nbytes()


def belongs_to_parameter(tensor: Tensor) -> bool:
    """Whether ``tensor`` is a parameter or a view of one. Note: a view's base has no public name."""
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)


def divide(tensors: Sequence[Tensor], number: float) -> None:
    """Divides all of ``tensors``, in place."""
    if tensors:
        torch._foreach_div_(list(tensors), number)


def scaled_step(optimizer: torch.optim.Optimizer, scale: Tensor) -> None:
    """An optimizer step on the gradients times ``scale`` (one number), without a device synchronisation.

    Note: torch's fused optimizers divide gradients by their ``grad_scale`` while they read them, as ``GradScaler`` has
    it, which saves a pass over the memory. They take it in float32 alone: other gradients, and those of optimizers that
    are not fused, are multiplied before.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if not parameters:
        return  # of a rank whose units are all frozen in place
    is_fused = bool(optimizer.defaults.get("fused"))
    if not (is_fused and all(parameter.dtype == torch.float32 for parameter in parameters)):
        torch._foreach_mul_([parameter.grad for parameter in parameters], scale)
        optimizer.step()
        return
    optimizer.grad_scale = scale.reciprocal()  # type: ignore[attr-defined]
    try:
        optimizer.step()
    finally:
        del optimizer.grad_scale  # type: ignore[attr-defined]
