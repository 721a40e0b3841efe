"""AutoPipe: measures the costs of units and layouts, corrects them during training, and asks the planner for plans.

The pure ``Planner`` is in ``pipe/planner/choice.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
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
from pipetransformer.pipe.planner.search import predict
from pipetransformer.plan import ParallelPlan
from pipetransformer.plan.prefix import PrefixWork
from pipetransformer.process.collectives import smallest
from pipetransformer.process.device import device_memory
from pipetransformer.process.world import World

if TYPE_CHECKING:
    from pipetransformer.config import Config
    from pipetransformer.engine import Engine, PhaseSeconds


Offers = Callable[[int], Mapping[int | None, Sequence[PrefixWork]]]
"""Gives, for a number of frozen blocks, the possible boundaries of the cache (None: no cache) and their forwards."""


class AutoPipe:
    """Chooses the plan for n frozen blocks, with costs measured before and during training.

    Making it is collective: all ranks plan for the smallest device.

    Attributes:
        layouts: timed static layouts, with corrections that follow the profile.
        profile: costs of units, links and updates of weights. During training, unit costs are scaled to the measured
            times of the stages.
        workload: the measured micro-batches.

    Note: there are none of them before ``measure``.

    Raises:
        UserError: for settings that no layout of the job can have.
    """

    layouts: StaticLayouts
    profile: Profile
    workload: Workload

    def __init__(self, config: Config, *, chain: Chain, world: World, calendar: Calendar) -> None:
        check_layout(config, world_size=world.size, local_size=world.local_size, num_units=chain.num_units)
        self._config, self._world, self._calendar = config, world, calendar
        self._watch: CostWatch | None = None
        self._planner = Planner.of(
            config,
            num_blocks=chain.num_blocks,
            world_size=world.size,
            local_size=world.local_size,
            device_memory=smallest(device_memory(world.device)),
        )

    def measure(self, engine: Engine, batches: Sequence[Batch]) -> None:
        """Collective. Measures unit costs, and the step time of every static layout.

        The step time of the best one is also t0 of the compute floor.

        Args:
            batches: the global batches of an epoch.

        Raises:
            UserError: if no layout fits.
        """
        config, world = self._config, self._world
        workload = Workload.of(batches, config, num_ranks=world.size, local_size=world.local_size)
        profile = measure_profile(engine.chain, engine.datasets["train"], workload=workload, config=config, world=world)
        self.workload, self.profile = workload, profile.at_lengths(workload.counts)
        self._planner.first_plan(self.profile.job, {})  # raises UserError if no layout fits
        self.layouts = time_static_layouts(
            self._planner.static_layouts(self.profile.job), engine=engine, workload=workload
        )
        if world.device.type == "cpu":
            self._watch = CostWatch(self.profile, workload, rank=world.rank, global_batch_size=config.train.batch_size)

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
        return self._planner.first_plan(self.profile.job, self.layouts.corrections)

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
        remaining_steps, layouts = self._calendar.total_steps - step, self.layouts
        return self._planner.settle(
            wanted,
            current=current,
            options=lambda frozen: {cached: self._seconds(work) for cached, work in offers(frozen).items()},
            outlook=Outlook(self.profile.job, remaining_steps, layouts.corrections, layouts.fastest_move),
            has_news=has_news,
        )

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
        self.profile, batch_size = profile, self._config.train.batch_size
        corrections = {
            pp: self.layouts.seconds[pp][self.workload.modal_length]
            / predict(plan, costs=profile.job, global_batch_size=batch_size).step_seconds
            for pp, plan in self.layouts.plans.items()
        }
        self.layouts = replace(self.layouts, corrections=corrections)
        return True
