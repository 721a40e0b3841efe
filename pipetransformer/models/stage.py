"""A stage of a pipeline: consecutive units of a chain as a module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from torch import Tensor, nn

from pipetransformer.models.chain import Chain


class Stage(nn.Module):
    """Consecutive active units that one rank trains, as the module that a pipeline stage runs.

    It registers no parameter: the chain's model owns them all, under the model's names.

    Args:
        around: called with (forward of one unit, hidden, inputs) in that forward's place, to recompute it, say.
    """

    def __init__(self, chain: Chain, units: range, *, around: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        self._chain = chain
        self._around = around
        self.units = units

    def forward(self, hidden: Tensor, **inputs: Tensor) -> Tensor:
        if self._around is None:
            leaving = self._chain.run(self.units, hidden, inputs)
        else:
            leaving = hidden
            for unit in self.units:
                leaving = self._around(partial(self._chain.run, range(unit, unit + 1)), leaving, inputs)
        self._chain.check_leaving(leaving, unit=self.units.stop - 1, hidden=hidden)
        return leaving

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Parameters of its units: a schedule that splits a backward asks for them."""
        return iter(self._chain.named_parameters(self.units).values())
