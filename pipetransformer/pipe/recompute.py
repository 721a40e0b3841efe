"""Activation recomputation: keep what enters a unit, run the unit again when its backward comes (arXiv 1604.06174).

    never        autograd keeps what it needs; nothing runs twice
    except_last  all micro-batches of a step but the last, whose backward follows at once (torchgpipe, arXiv 2004.09910)
    always       every micro-batch
    selective    every micro-batch, but what matrix products and attention gave is kept (arXiv 2205.05198, section 5)

It goes unit by unit of a chain, block by block of a graph, so that one at a time is alive again. Dropout draws the same
numbers both times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TypeVar

import torch
from torch.utils.checkpoint import checkpoint, noop_context_fn

from pipetransformer.adapter import ProductBytes, selective_contexts

__all__ = ["MODES", "Recompute", "kept_bytes", "product_bytes"]

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
        contexts = selective_contexts if mode == "selective" else noop_context_fn
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
        activation_bytes: what autograd keeps without recomputation. input_bytes: what enters the unit.
        product_bytes: what ``product_bytes`` measures, which ``selective`` keeps.
    """
    if mode == "never":
        return activation_bytes
    return input_bytes + product_bytes if mode == "selective" else input_bytes


def product_bytes(forward: Callable[[], object]) -> int:
    """Runs ``forward`` and counts the bytes of what matrix products and attention give: ``selective`` keeps them."""
    counter = ProductBytes()
    with counter:
        forward()
    return counter.num_bytes
