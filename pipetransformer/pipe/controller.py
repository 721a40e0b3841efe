"""AutoPipe: measures what units and layouts take, keeps these costs true, and asks the pure planner for a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING

from pipetransformer.config.calendar import Calendar
from pipetransformer.data import Batch
from pipetransformer.models import Chain
from pipetransformer.pipe.measure.profile import Measurements, measure_profile
from pipetransformer.pipe.measure.static_layouts import StaticLayouts, time_static_layouts
from pipetransformer.pipe.measure.watch import CostWatch
from pipetransformer.pipe.measure.workload import Workload
from pipetransformer.pipe.planner.checks import check_layout
from pipetransformer.pipe.planner.choice import Choice, Planner, Settled
from pipetransformer.pipe.planner.search import divisors, predict
from pipetransformer.plan import ParallelPlan
from pipetransformer.plan.prefix import PrefixWork
from pipetransformer.process.device import device_memory
from pipetransformer.process.world import World

if TYPE_CHECKING:
    from pipetransformer.config import Config
    from pipetransformer.engine import Engine, PhaseSeconds

__all__ = ["AutoPipe"]

Offers = Callable[[int], Mapping[int | None, Sequence[PrefixWork]]]
"""By frozen blocks: the boundaries that may be read (None: no cache), each with the forwards that it costs."""


class AutoPipe:
    """Which plan to take for n frozen blocks. It measures once, and again while the job trains.

    Attributes:
        layouts: the static layouts that were timed; None before ``measure``.
        costs: units, links and updates; stages' costs follow what they took in training.
    """

    costs: Measurements

    def __init__(self, config: Config, planner: Planner, *, world: World, calendar: Calendar) -> None:
        self._config, self._planner, self._world, self._calendar = config, planner, world, calendar
        self._watch: CostWatch | None = None
        self._fastest_move = inf
        self._corrections: dict[int, float] = {}
        self.layouts: StaticLayouts | None = None

    @classmethod
    def of(cls, config: Config, *, chain: Chain, world: World, calendar: Calendar) -> AutoPipe:
        """Raises UserError for settings that no layout of the job can have."""
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
        """Collective. Measures costs, and the step time of every static layout: the evidence, and the floor's t0.

        Args:
            batches: an epoch's.

        Raises:
            UserError: where no layout fits.
        """
        microbatches, batch_size = self._config.pipe.microbatches, self._config.train.batch_size
        workload = Workload.of(
            batches,
            global_batch_size=batch_size,
            num_ranks=self._world.size,
            pipeline_lengths=divisors(self._world.local_size),
            microbatches=microbatches if isinstance(microbatches, int) else None,
        )
        profile = measure_profile(
            engine.chain,
            engine.datasets["train"],
            batches=batches,
            workload=workload,
            config=self._config,
            world=self._world,
        )
        self.costs = Measurements.of(profile, workload)
        self._planner.first_plan(self.costs.job, {})  # where none fits, this tells so
        self.layouts = time_static_layouts(
            self._planner.static_layouts(self.costs.job), engine=engine, costs=self.costs, batches=batches
        )
        self._fastest_move = self.layouts.fastest_move
        self._corrections = dict(self.layouts.corrections)
        if self._world.device.type == "cpu":
            self._watch = CostWatch(self.costs, rank=self._world.rank, global_batch_size=batch_size)

    # ---- what it sees of the training ------------------------------------------------------------------------------

    def spent(self, seconds: PhaseSeconds) -> None:
        """This rank's stages computed so long in some steps."""
        if self._watch is not None:
            self._watch.spent(seconds)

    def trained(self, plan: ParallelPlan, batches: Sequence[Batch]) -> None:
        """These were the batches of these steps."""
        if self._watch is not None:
            self._watch.trained(plan, batches)

    def entered(self) -> None:
        """Another plan is at work: its stages do not take what the ones before took."""
        if self._watch is not None:
            self._watch.clear()

    # ---- plans -----------------------------------------------------------------------------------------------------

    def first_plan(self) -> Choice:
        """The plan to start with, nothing frozen."""
        return self._planner.first_plan(self.costs.job, self._corrections)

    def settle(self, wanted: int, *, step: int, current: ParallelPlan, offers: Offers) -> Settled:
        """Collective. How many of the ``wanted`` blocks freeze, and the plan for the rest of the run.

        Where n stays, another plan is chosen if costs that were measured in training make it pay.
        """
        has_news = self._remeasure()
        remaining_steps = self._calendar.total_steps - step
        settled = self._planner.settle(
            wanted,
            current=current,
            options=lambda frozen: {cached: self._seconds(work) for cached, work in offers(frozen).items()},
            remaining_steps=remaining_steps,
            costs=self.costs.job,
            corrections=self._corrections,
            fixed_seconds=self._fastest_move,
        )
        if not has_news or settled.tried:
            return settled
        better = self._planner.better_plan(
            current,
            remaining_steps=remaining_steps,
            costs=self.costs.job,
            corrections=self._corrections,
            fixed_seconds=self._fastest_move,
        )
        return settled if better is None else replace(settled, choice=better, because="measured")

    def _seconds(self, work: Sequence[PrefixWork]) -> float:
        """Predicted seconds of ``work``, shared by all ranks."""
        by_length, seconds = self.costs.by_length, 0.0
        for part in work:
            costs = by_length.get(part.length) or by_length[max(by_length)]
            forward = costs.prefix_seconds(part.first, part.stop, num_samples=part.num_samples) / self._world.size
            seconds += part.times * forward
        return seconds

    def _remeasure(self) -> bool:
        """Collective. From now on plans are chosen by what stages took in training; whether that was news.

        The corrections are those of the timed layouts, by the costs as they are now.
        """
        costs = self._watch.take() if self._watch is not None else None
        if costs is None:
            return False
        assert self.layouts is not None
        self.costs, batch_size = costs, self._config.train.batch_size
        for pp, plan in self.layouts.plans.items():
            expected = predict(plan, costs=costs.job, global_batch_size=batch_size).step_seconds
            self._corrections[pp] = self.layouts.seconds[pp][costs.modal_length] / expected
        return True
