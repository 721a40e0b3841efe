"""A stage of a pipeline: consecutive units of a chain as a module, those that are frozen included."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipetransformer.models.chain import Chain


class Stage(nn.Module):
    """Consecutive units of one rank, as the module that a pipeline stage runs.

    It registers no parameter: the chain's model owns them all, under the model's names. Frozen units run their forward
    alone. What enters them gets gradients of zero, which the stage before does not use, but a schedule sends. Where
    nothing up to its end trains, what leaves it is a leaf.

    Args:
        first_active: the first unit of the chain that trains.
        around: called with (unit, its forward, hidden, inputs) in that forward's place, to recompute it, say.
    """

    def __init__(
        self, chain: Chain, units: range, *, first_active: int = 0, around: Callable[..., Tensor] | None = None
    ) -> None:
        super().__init__()
        self._chain = chain
        self._around = around
        self.units = units
        middle = min(max(units.start, first_active), units.stop)
        self._frozen, self._active = range(units.start, middle), range(middle, units.stop)

    def forward(self, hidden: Tensor, **inputs: Tensor) -> Tensor:
        leaving = self._past_frozen(hidden, inputs) if self._frozen else hidden
        if self._around is None:
            leaving = self._chain.run(self._active, leaving, inputs)
        else:
            for unit in self._active:
                leaving = self._around(unit, partial(self._chain.run, range(unit, unit + 1)), leaving, inputs)
        self._chain.check_leaving(leaving, unit=self.units.stop - 1, hidden=hidden)
        # A backward needs a graph to go through, or a leaf, also where nothing before it trains.
        return leaving if leaving.requires_grad or not torch.is_grad_enabled() else leaving.requires_grad_()

    def _past_frozen(self, hidden: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        with torch.no_grad():
            leaving = self._chain.run(self._frozen, hidden, inputs)
        if not torch.is_grad_enabled():
            return leaving
        # What enters the first stage takes no gradient.
        return _ForwardOnly.apply(hidden, leaving) if hidden.requires_grad else leaving

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Parameters of its units that train: a schedule that splits a backward asks for them."""
        return iter(self._chain.trained_parameters(self.units).values())


class _ForwardOnly(torch.autograd.Function):
    """``leaving``, computed from ``hidden`` without a graph."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, leaving: Tensor) -> Tensor:
        ctx.shape, ctx.dtype = hidden.shape, hidden.dtype
        return leaving.view_as(leaving)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].new_zeros(ctx.shape, dtype=ctx.dtype), None
