"""The compute floor: the least that a run's own freeze schedule allows, by the definition in design.md.

  sum over steps of  t0 x (real / samples of the timed step) x active share of forward + backward
+ one forward for every (sample, newly frozen unit) that was really advanced, shared by all ranks
+ the forward of the prefix where it was computed in the step, shared by all ranks
+ cache reads at memcpy speed
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipetransformer.pipe.planner.costs import UnitCosts

__all__ = ["ComputeFloor"]


@dataclass(slots=True)
class ComputeFloor:
    """Adds up the floor of a run.

    Attributes:
        step_seconds: t0 by padded length: a full step of the best static layout, measured before training.
        costs: unit costs by padded length. timed_samples: samples of the step that t0 is the time of.
        memcpy_bytes_per_second: of one rank.
    """

    step_seconds: Mapping[int, float]
    costs: Mapping[int, UnitCosts]
    timed_samples: int
    world_size: int
    memcpy_bytes_per_second: float
    seconds: float = 0.0

    def add_step(self, *, length: int, num_samples: int, first_active: int, enters: int, read_bytes: int) -> None:
        """One step of ``num_samples`` real samples whose prefix was entered at unit ``enters``."""
        if length not in self.step_seconds:
            return
        costs = self.costs[length]
        share = sum(costs.step_ns[first_active:]) / sum(costs.step_ns)
        self.seconds += self.step_seconds[length] * num_samples / self.timed_samples * share
        self.seconds += costs.prefix_seconds(enters, first_active, num_samples=num_samples) / self.world_size
        self.seconds += read_bytes / self.memcpy_bytes_per_second / self.world_size

    def add_advance(self, *, length: int, num_samples: int, first: int, stop: int) -> None:
        """``num_samples`` samples were carried through units first .. stop - 1."""
        if length in self.costs:
            self.seconds += self.costs[length].prefix_seconds(first, stop, num_samples=num_samples) / self.world_size
