"""The moving average of the weights that train (Polyak and Juditsky, "Acceleration of stochastic approximation by
averaging", 1992): evaluated and saved in their place. What is frozen is its own average.

It warms up, as TensorFlow's with ``num_updates`` does: else a short run would save little but the weights that it began
with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from pipetransformer.dp import AVERAGE, OptimizerState


class Average:
    """The averages of some parameters: after each step, ``decay`` of them, less in the first steps, and the rest of the
    new weights.

    Args:
        parameters: by name.
        state: optimizer state by parameter name; with the averages so far, where there are some. Others begin as the
            weights are.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], state: OptimizerState, *, decay: float) -> None:
        self._parameters = dict(parameters)
        self._averages = {
            name: state[name][AVERAGE] if AVERAGE in state.get(name, ()) else parameter.detach().clone()
            for name, parameter in parameters.items()
        }
        self._decay = decay

    def update(self, step: int) -> None:
        """Takes note of the weights after step ``step``, from 0."""
        if self._parameters:
            move: Any = get_ema_multi_avg_fn(min(self._decay, (1 + step) / (10 + step)))  # type: ignore[no-untyped-call]
            move([*self._averages.values()], [p.detach() for p in self._parameters.values()], None)

    def begin_again(self) -> None:
        """Forgets all steps."""
        for name, parameter in self._parameters.items():
            self._averages[name].copy_(parameter.detach())

    def state(self) -> dict[str, Tensor]:
        """The averages by parameter name."""
        return dict(self._averages)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The averages in the place of the weights, without a copy."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def settle(self) -> None:
        """Puts the averages in the place of the weights, for good."""
        self._swap()

    def _swap(self) -> None:
        for name, parameter in self._parameters.items():
            parameter.data, self._averages[name] = self._averages[name], parameter.data
