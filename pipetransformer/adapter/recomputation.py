"""What ``selective`` recomputation keeps: results of matrix products and attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

# Note: the only base class of a mode that sees every operation; private, and what torch's own documentation names.
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

__all__ = ["ProductBytes", "selective_contexts"]


@lru_cache(maxsize=1)
def _products() -> frozenset[Any]:
    """Matrix products and attention. Note: kernels of attention have private names, by version and device."""
    attention = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
    names = ("mm", "addmm", "bmm", "baddbmm", "convolution", *(f"_scaled_dot_product_{name}" for name in attention))
    return frozenset(getattr(torch.ops.aten, name).default for name in names if hasattr(torch.ops.aten, name))


def _is_kept(operation: Any, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> bool:
    """Note: attention that drops out is not kept: where it did not run again, the random numbers of what comes behind
    it would be other ones. Only the private schema tells where ``dropout_p`` stands.
    """
    if operation not in _products():
        return False
    names = [argument.name for argument in operation._schema.arguments]
    return not {**dict(zip(names, arguments)), **keywords}.get("dropout_p")


def selective_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The contexts of one forward and its recomputation, in which products and attention do not run twice."""

    def policy(_: object, operation: Any, *arguments: Any, **keywords: Any) -> CheckpointPolicy:
        kept = _is_kept(operation, arguments, keywords)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    first, again = create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
    return first, again


class ProductBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts, as a context, the bytes of what ``selective_contexts`` would keep."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if _is_kept(func, args, kwargs):
            tensors = result if isinstance(result, (tuple, list)) else (result,)
            self.num_bytes += sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))
        return result
