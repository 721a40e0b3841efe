"""The compute floor: a run's training time at the speed of its own calibrated static step, in seconds.

  sum over steps of  t0 x (real samples / samples of the timed step) x active share of forward + backward
+ one forward for every (sample of training, unit) of the advance passes that were made, shared by all ranks
+ the forward of the prefix in steps that computed it, shared by all ranks
+ reads of the cache at memcpy speed

"The compute floor" in ``docs/architecture.md`` gives the definition and its reasons. t0 is of the same code on the same
ranks: what slows all steps alike lowers no share of the floor in the time trained, and a run without freezing has a
share below 1 too (noise, data, the steps' bookkeeping). Only both runs' shares together tell what being elastic cost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pipetransformer.pipe.measure.profile_file import Profile
from pipetransformer.pipe.measure.static_layouts import StaticLayouts
from pipetransformer.pipe.planner.costs import UnitCosts


@dataclass(frozen=True, slots=True)
class ComputeFloor:
    """Gives the parts of a run's compute floor, in seconds: 0 for lengths that were not timed, as all are by default.

    Attributes:
        step_seconds: t0 by padded length: seconds of a full step of the best static layout, measured before training.
        costs: unit costs by padded length.
        timed_samples: number of samples of the step that t0 belongs to.
        world_size: number of ranks.
        memcpy_bytes_per_second: speed of copies in the host's memory, of one rank.
        first_timed: first unit that trains in the timed step, which computes those before it; above 0 where some are
            frozen from the start.
    """

    step_seconds: Mapping[int, float] = field(default_factory=dict)
    costs: Mapping[int, UnitCosts] = field(default_factory=dict)
    timed_samples: int = 1
    world_size: int = 1
    memcpy_bytes_per_second: float = 1.0
    first_timed: int = 0

    @classmethod
    def measured(cls, layouts: StaticLayouts, profile: Profile, *, world_size: int) -> ComputeFloor:
        """From what was measured before training."""
        return cls(
            step_seconds=layouts.floor_seconds,
            costs=profile.measured if layouts.rounds else {},
            timed_samples=layouts.timed_samples,
            world_size=world_size,
            memcpy_bytes_per_second=profile.memcpy_bytes_per_second,
            first_timed=layouts.plans[layouts.best_pp].first_active,
        )

    def of_step(self, *, length: int, num_samples: int, first_active: int, enters: int, read_bytes: int) -> float:
        """The part of one step of all replicas.

        Args:
            length: padded length of the samples.
            num_samples: number of real samples of the global batch.
            first_active: first unit that trains.
            enters: first unit of the prefix that the step computed.
            read_bytes: bytes read from the cache for the global batch.
        """
        if length not in self.step_seconds:
            return 0.0
        costs = self.costs[length]
        first = self.first_timed
        share = sum(costs.step_ns[first_active:]) / (sum(costs.prefix_ns[:first]) + sum(costs.step_ns[first:]))
        step = self.step_seconds[length] * num_samples / self.timed_samples * share
        prefix = costs.prefix_seconds(enters, first_active, num_samples=num_samples)
        return step + (prefix + read_bytes / self.memcpy_bytes_per_second) / self.world_size

    def of_advance(self, *, length: int, num_samples: int, first: int, stop: int) -> float:
        """The part of the forward of units first .. stop - 1 for ``num_samples`` samples, in an advance pass."""
        if length not in self.costs:
            return 0.0
        return self.costs[length].prefix_seconds(first, stop, num_samples=num_samples) / self.world_size
