"""Moving averages of the weights that train (Polyak and Juditsky, "Acceleration of stochastic approximation by
averaging", 1992): one that is evaluated and saved in their place, and one that blocks freeze with. What is frozen is
its own average.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from pipetransformer.dp import OptimizerState

_EVERY = 4  # steps from one update to the next: weights a step apart are almost alike
_RECENCY = 15  # the average is of about the last sixteenth of the steps


class Average:
    """The averages of some parameters.

    Args:
        parameters: by name.
        state: optimizer state by parameter name; with the averages so far, where there are some. Others begin as the
            weights are.
        key: the name of the averages in it.
        decay: gives the share of the averages that stays after a step, from 0; the rest is of the new weights. 1 leaves
            them alone.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        state: OptimizerState,
        *,
        key: str,
        decay: Callable[[int], float],
    ) -> None:
        self.key = key
        self._parameters = dict(parameters)
        self._averages = {
            name: state[name][key] if key in state.get(name, ()) else parameter.detach().clone()
            for name, parameter in parameters.items()
        }
        self._decay = decay

    def update(self, step: int) -> None:
        """Takes note of the weights after step ``step``, from 0."""
        decay = self._decay(step)
        if self._parameters and decay < 1.0:
            move: Any = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
            move([*self._averages.values()], [p.detach() for p in self._parameters.values()], None)

    def begin_again(self) -> None:
        """Forgets all steps."""
        for name, parameter in self._parameters.items():
            self._averages[name].copy_(parameter.detach())

    def state(self) -> dict[str, Tensor]:
        """The averages by parameter name."""
        return dict(self._averages)

    def copy_to(self, names: Collection[str]) -> None:
        """Gives some parameters their averages."""
        for name in names:
            self._parameters[name].data.copy_(self._averages[name])

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


def warmed_up(decay: float) -> Callable[[int], float]:
    """A decay that is less in the first steps, as TensorFlow's with ``num_updates`` is: else a short run would save
    little but the weights that it began with."""
    return lambda step: min(decay, (1 + step) / (10 + step))


def recent(step: int) -> float:
    """The decay of an average of about the last sixteenth of the steps so far, which needs no length of the run:
    polynomial decay (Shamir and Zhang, "Stochastic gradient descent for non-smooth optimization", ICML 2013, section
    4). Of every fourth step, because an update reads and writes all weights, as the optimizer's does."""
    updates, rest = divmod(step + 1, _EVERY)
    return 1.0 if rest else (updates - 1) / (updates + _RECENCY)
