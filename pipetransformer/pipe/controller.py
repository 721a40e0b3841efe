"""AutoPipe: measures the costs of units and layouts, corrects them during training, and asks the planner for plans.

The pure ``Planner`` is in ``pipe/planner/choice.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING

from pipetransformer.config.calendar import Calendar
from pipetransformer.data import Batch
from pipetransformer.models import Chain
from pipetransformer.pipe.measure.profile import measure_profile
from pipetransformer.pipe.measure.profile_file import Profile
from pipetransformer.pipe.measure.static_layouts import StaticLayouts, time_static_layouts
from pipetransformer.pipe.measure.watch import CostWatch
from pipetransformer.pipe.measure.workload import Workload
from pipetransformer.pipe.planner.checks import check_layout
from pipetransformer.pipe.planner.choice import Choice, Outlook, Planner, Settled
from pipetransformer.pipe.planner.constraints import divisors
from pipetransformer.pipe.planner.search import predict
from pipetransformer.plan import ParallelPlan
from pipetransformer.plan.prefix import PrefixWork
from pipetransformer.process.device import device_memory
from pipetransformer.process.world import World

if TYPE_CHECKING:
    from pipetransformer.config import Config
    from pipetransformer.engine import Engine, PhaseSeconds


Offers = Callable[[int], Mapping[int | None, Sequence[PrefixWork]]]
"""Gives, for a number of frozen blocks, the possible boundaries of the cache (None: no cache) and their forwards."""


class AutoPipe:
    """Chooses the plan for n frozen blocks, with costs measured before and during training.

    Attributes:
        layouts: timed static layouts; None before ``measure``.
        profile: costs of units, links and updates of weights. During training, unit costs are scaled to the measured
            times of the stages.
        workload: the measured micro-batches.
    """

    profile: Profile
    workload: Workload

    def __init__(self, config: Config, planner: Planner, *, world: World, calendar: Calendar) -> None:
        self._config, self._planner, self._world, self._calendar = config, planner, world, calendar
        self._watch: CostWatch | None = None
        self._fastest_move = inf
        self._corrections: dict[int, float] = {}
        self.layouts: StaticLayouts | None = None

    @classmethod
    def of(cls, config: Config, *, chain: Chain, world: World, calendar: Calendar) -> AutoPipe:
        """The controller for a job of this configuration.

        Raises:
            UserError: for settings that no layout of the job can have.
        """
        check_layout(config, world_size=world.size, local_size=world.local_size, num_units=chain.num_units)
        planner = Planner.of(
            config,
            num_blocks=chain.num_blocks,
            world_size=world.size,
            local_size=world.local_size,
            device_memory=device_memory(world.device),
        )
        return cls(config, planner, world=world, calendar=calendar)

    def measure(self, engine: Engine, batches: Sequence[Batch]) -> None:
        """Collective. Measures unit costs, and the step time of every static layout.

        The step time of the best one is also t0 of the compute floor.

        Args:
            batches: the global batches of an epoch.

        Raises:
            UserError: if no layout fits.
        """
        microbatches, batch_size = self._config.pipe.microbatches, self._config.train.batch_size
        self.workload = Workload.of(
            batches,
            global_batch_size=batch_size,
            num_ranks=self._world.size,
            pipeline_lengths=divisors(self._world.local_size),
            num_microbatches=microbatches if isinstance(microbatches, int) else None,
        )
        profile = measure_profile(
            engine.chain,
            engine.datasets["train"],
            batches=batches,
            workload=self.workload,
            config=self._config,
            world=self._world,
        )
        self.profile = profile.at_lengths(self.workload.counts)
        self._planner.first_plan(self.profile.job, {})  # raises UserError if no layout fits
        self.layouts = time_static_layouts(
            self._planner.static_layouts(self.profile.job), engine=engine, workload=self.workload, batches=batches
        )
        self._fastest_move = self.layouts.fastest_move
        self._corrections = dict(self.layouts.corrections)
        if self._world.device.type == "cpu":
            self._watch = CostWatch(self.profile, self.workload, rank=self._world.rank, global_batch_size=batch_size)

    # ---- observation of the training -------------------------------------------------------------------------------

    def spent(self, seconds: PhaseSeconds) -> None:
        """Takes note of this rank's seconds by phase in some steps."""
        if self._watch is not None:
            self._watch.spent(seconds)

    def trained(self, plan: ParallelPlan, batches: Sequence[Batch]) -> None:
        """Takes note of the plan and the global batches of these steps."""
        if self._watch is not None:
            self._watch.trained(plan, batches)

    def entered(self) -> None:
        """Deletes the notes: they belong to the stages of the plan before."""
        if self._watch is not None:
            self._watch.clear()

    # ---- plans -----------------------------------------------------------------------------------------------------

    def first_plan(self) -> Choice:
        """The plan to start with, with nothing frozen.

        Raises:
            UserError: if no plan fits.
        """
        return self._planner.first_plan(self.profile.job, self._corrections)

    def settle(self, wanted: int, *, step: int, current: ParallelPlan, offers: Offers) -> Settled:
        """Collective. Decides how many of the ``wanted`` blocks freeze, and the plan for the rest of the run.

        If n stays, another plan is chosen only if it pays by new costs from training.

        Args:
            wanted: number of frozen blocks that AutoFreeze wants.
            step: number of steps done.
            current: the present plan.
            offers: gives the possible boundaries of the cache for a number of frozen blocks, each with its forwards.
        """
        has_news = self._remeasure()
        remaining_steps = self._calendar.total_steps - step
        outlook = Outlook(self.profile.job, remaining_steps, self._corrections, self._fastest_move)
        settled = self._planner.settle(
            wanted,
            current=current,
            options=lambda frozen: {cached: self._seconds(work) for cached, work in offers(frozen).items()},
            outlook=outlook,
        )
        if not has_news or settled.tried:
            return settled
        better = self._planner.better_plan(current, outlook=outlook)
        return settled if better is None else replace(settled, choice=better, because="measured")

    def _seconds(self, work: Sequence[PrefixWork]) -> float:
        """Predicted seconds of ``work``, shared by all ranks."""
        by_length, seconds = self.profile.measured, 0.0
        for part in work:
            costs = by_length.get(part.length) or by_length[max(by_length)]
            forward = costs.prefix_seconds(part.first, part.stop, num_samples=part.num_samples) / self._world.size
            seconds += part.times * forward
        return seconds

    def _remeasure(self) -> bool:
        """Collective. Updates the costs, and the corrections of the timed layouts, by the stages' times in training.

        Returns whether there were enough steps for new costs.
        """
        profile = self._watch.take() if self._watch is not None else None
        if profile is None:
            return False
        assert self.layouts is not None
        self.profile, batch_size = profile, self._config.train.batch_size
        for pp, plan in self.layouts.plans.items():
            expected = predict(plan, costs=profile.job, global_batch_size=batch_size).step_seconds
            self._corrections[pp] = self.layouts.seconds[pp][self.workload.modal_length] / expected
        return True
