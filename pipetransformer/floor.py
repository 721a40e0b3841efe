"""The compute floor: the least that a run's own freeze schedule allows, by the definition in design.md.

  sum over steps of  t0 x (real / global batch) x active share of forward + backward
+ one forward for every (sample, newly frozen unit) that was really advanced, shared by all ranks
+ the forward of the prefix where it was computed in the step, shared by all ranks
+ cache reads at memcpy speed
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipetransformer.pipe.costs import UnitCosts

__all__ = ["ComputeFloor"]


@dataclass(slots=True)
class ComputeFloor:
    """Adds up the floor of a run.

    Attributes:
        step_seconds: t0 by padded length: a full step of the best static layout, measured before training.
        costs: unit costs by padded length.
        memcpy_bytes_per_second: of one rank.
    """

    step_seconds: Mapping[int, float]
    costs: Mapping[int, UnitCosts]
    global_batch_size: int
    world_size: int
    memcpy_bytes_per_second: float
    seconds: float = 0.0

    def add_step(self, *, length: int, num_samples: int, first_active: int, enters: int, read_bytes: int) -> None:
        """One step of ``num_samples`` real samples whose prefix was entered at unit ``enters``."""
        if length not in self.step_seconds:
            return
        costs = self.costs[length]
        share = sum(costs.step_ns[first_active:]) / sum(costs.step_ns)
        self.seconds += self.step_seconds[length] * num_samples / self.global_batch_size * share
        self.seconds += self._forward(costs, enters, first_active, num_samples)
        self.seconds += read_bytes / self.memcpy_bytes_per_second / self.world_size

    def add_advance(self, *, length: int, num_samples: int, first: int, stop: int) -> None:
        """``num_samples`` samples were carried through units first .. stop - 1."""
        if length in self.costs:
            self.seconds += self._forward(self.costs[length], first, stop, num_samples)

    def _forward(self, costs: UnitCosts, first: int, stop: int, num_samples: int) -> float:
        return sum(costs.forward_ns[first:stop]) / 1e9 / costs.rows * num_samples / self.world_size
