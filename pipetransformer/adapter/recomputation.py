"""Activation recomputation: keep what enters a unit, run the unit again when its backward comes (arXiv 1604.06174).

    never        autograd keeps what it needs; nothing runs twice
    except_last  all micro-batches of a step but the last, whose backward follows at once (torchgpipe, arXiv 2004.09910)
    always       every micro-batch
    selective    every micro-batch, but results of matrix products and attention are kept (arXiv 2205.05198, section 5)

It goes unit by unit of a chain, block by block of a graph, so that one at a time is alive again. Dropout draws the same
numbers both times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache, partial
from typing import Any, TypeVar

import torch
from torch import Tensor

# Note: the only base class of a mode that sees every operation; private, and what torch's own documentation names.
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

MODES = ("never", "except_last", "always", "selective")

_Context = Callable[[], AbstractContextManager[object]]
_Result = TypeVar("_Result")


class Recompute:
    """Runs units so that their activations are recomputed where ``mode`` says so.

    Args:
        mode: one of ``MODES``.
        context_fn: makes a context that is entered around every recomputation, beside those of the mode.

    Attributes:
        is_last_microbatch: of the step; whoever cuts the batch sets it before each micro-batch's forward.
    """

    def __init__(self, mode: str, *, context_fn: _Context | None = None) -> None:
        assert mode in MODES, mode
        self.mode = mode
        self.is_last_microbatch = True
        contexts = _selective_contexts if mode == "selective" else noop_context_fn
        self._contexts = contexts if context_fn is None else partial(_with_extra, contexts, context_fn)

    def applies_to(self, *, is_last_microbatch: bool) -> bool:
        """Whether a micro-batch of a training step is recomputed."""
        return self.mode != "never" and not (self.mode == "except_last" and is_last_microbatch)

    def __call__(self, forward: Callable[..., _Result], *arguments: object) -> _Result:
        """``forward(*arguments)`` of one unit for the micro-batch at hand."""
        if not (torch.is_grad_enabled() and self.applies_to(is_last_microbatch=self.is_last_microbatch)):
            return forward(*arguments)
        result: _Result = checkpoint(forward, *arguments, use_reentrant=False, context_fn=self._contexts)
        return result


def _with_extra(
    contexts: Callable[[], tuple[AbstractContextManager[object], AbstractContextManager[object]]], extra: _Context
) -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
    first, again = contexts()

    @contextmanager
    def both() -> Iterator[None]:
        with again, extra():
            yield

    return first, both()


def kept_bytes(mode: str, activation_bytes: int, input_bytes: int, *, product_bytes: int) -> int:
    """Bytes that a unit keeps of a recomputed micro-batch between its forward and its backward.

    A recomputing rank needs, beside the sum of these, the ``activation_bytes`` of one unit and micro-batch at a time.

    Args:
        activation_bytes: kept by autograd without recomputation.
        input_bytes: of the unit's input.
        product_bytes: measured by ``product_bytes``; ``selective`` keeps them.
    """
    if mode == "never":
        return activation_bytes
    return input_bytes + product_bytes if mode == "selective" else input_bytes


def product_bytes(forward: Callable[[], object]) -> int:
    """Runs ``forward`` and counts the bytes that matrix products and attention return: ``selective`` keeps them."""
    counter = _ProductBytes()
    with counter:
        forward()
    return counter.num_bytes


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


def _selective_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The contexts of one forward and its recomputation, in which products and attention do not run twice."""

    def policy(_: object, operation: Any, *arguments: Any, **keywords: Any) -> CheckpointPolicy:
        kept = _is_kept(operation, arguments, keywords)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    first, again = create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
    return first, again


class _ProductBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts, as a context, the bytes that ``selective`` would keep."""

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
