"""The form in which activations are stored: as they are, in a narrower type, or as 8-bit integers.

An 8-bit number is a multiple of a scale that its position has for itself: the largest magnitude there over 127
(symmetric quantization, a token at a time: ZeroQuant, arXiv 2206.01861). The scale, a float32, lies behind the numbers
of its position, so that a position is read in one piece.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["decode", "encode", "rounding", "stored_dtype", "stored_width"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "int8": torch.int8}
_SCALE_BYTES = 4
_LARGEST = 127


def stored_dtype(name: str, *, computed: torch.dtype) -> torch.dtype:
    """That of ``cache.dtype``.

    Args:
        computed: of the activations as the step computes them.
    """
    return _DTYPES.get(name, computed)


def stored_width(width: int, dtype: torch.dtype) -> int:
    """Numbers of ``dtype`` that a position of ``width`` numbers takes."""
    return width + _SCALE_BYTES if dtype == torch.int8 else width


def encode(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """Activations [rows, positions, width] in their stored form [rows, positions, stored width], on the CPU."""
    if dtype != torch.int8:
        return hidden.to(device="cpu", dtype=dtype)
    numbers = hidden.to(dtype=torch.float32)
    scale = numbers.abs().amax(-1, keepdim=True) / _LARGEST
    whole = (numbers / torch.where(scale > 0, scale, 1.0)).round_().to(torch.int8)
    return torch.cat([whole, scale.contiguous().view(torch.int8)], dim=-1).to(device="cpu")


def decode(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """The activations of a stored form, in ``dtype``, on its device."""
    if stored.dtype != torch.int8:
        return stored.to(dtype)
    scale = stored[..., -_SCALE_BYTES:].contiguous().view(torch.float32)
    return (stored[..., :-_SCALE_BYTES].to(torch.float32) * scale).to(dtype)


def rounding(hidden: Tensor, dtype: torch.dtype) -> float:
    """The root mean square of what the stored form changes, over that of the activations."""
    exact = hidden.to(device="cpu", dtype=torch.float64)
    change = decode(encode(hidden, dtype), torch.float64) - exact
    return float(change.norm() / exact.norm().clamp_min(1e-300))
