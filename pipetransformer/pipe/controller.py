"""What AutoPipe is asked with: measured costs, what is left of the run, what the cache offers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

from pipetransformer.cache import AutoCache
from pipetransformer.config import Config
from pipetransformer.config.calendar import Agenda
from pipetransformer.data import Batch, Dataset
from pipetransformer.engine.feed import Feed
from pipetransformer.engine.layout import Layout, Move
from pipetransformer.engine.step import PhaseSeconds, Stepper
from pipetransformer.models import Chain
from pipetransformer.pipe.measure.profile import Measurements, measure_profile
from pipetransformer.pipe.measure.static_layouts import Calibration, calibrate
from pipetransformer.pipe.measure.watch import CostWatch
from pipetransformer.pipe.measure.workload import Workload
from pipetransformer.pipe.planner.choice import AutoPipe, Choice, cached_choices
from pipetransformer.pipe.planner.search import divisors, predict
from pipetransformer.plan import ParallelPlan
from pipetransformer.process.world import World

__all__ = ["Planning"]


class Planning:
    """Calibrates once, and asks AutoPipe for a plan whenever n changes or costs have.

    Attributes:
        calibration: None before ``calibrate``.
    """

    def __init__(
        self, config: Config, *, autopipe: AutoPipe, autocache: AutoCache, agenda: Agenda, world: World
    ) -> None:
        self._config, self._autopipe, self._autocache = config, autopipe, autocache
        self._agenda, self._world = agenda, world
        self._watch: CostWatch | None = None
        self._fastest_move = inf
        self.calibration: Calibration | None = None

    def calibrate(
        self,
        chain: Chain,
        data: Dataset,
        *,
        batches: Sequence[Batch],
        stepper: Stepper,
        enter_plan: Callable[[ParallelPlan], tuple[Move, Layout, Feed]],
    ) -> None:
        """Collective. Measures costs, and the step time of every static layout: the evidence, and the floor's t0.

        Raises:
            UserError: where no layout fits.
        """
        microbatches = self._config.pipe.microbatches
        batch_size = self._config.train.batch_size
        workload = Workload.of(
            batches,
            global_batch_size=batch_size,
            num_ranks=self._world.size,
            pipeline_lengths=divisors(self._world.local_size),
            microbatches=microbatches if isinstance(microbatches, int) else None,
        )
        profile = measure_profile(
            chain, data, batches=batches, workload=workload, config=self._config, world=self._world
        )
        self._costs = Measurements.of(profile, workload)
        self._autopipe.first_plan(self._costs.job, {})  # where none fits, this tells so

        def enter(plan: ParallelPlan) -> tuple[Layout, Feed]:
            move, layout, feed = enter_plan(plan)
            self._fastest_move = min(self._fastest_move, move.seconds)
            return layout, feed

        self.calibration = calibrate(
            self._autopipe.static_layouts, enter_plan=enter, stepper=stepper, measurements=self._costs, batches=batches
        )
        self._corrections = dict(self.calibration.corrections)
        if self._world.device.type == "cpu":
            self._watch = CostWatch(self._costs, rank=self._world.rank, global_batch_size=batch_size)

    def spent(self, seconds: PhaseSeconds) -> None:
        """What this rank's stages computed in some steps."""
        if self._watch is not None:
            self._watch.spent(seconds)

    def trained(self, plan: ParallelPlan, batches: Sequence[Batch]) -> None:
        """The batches of these steps."""
        if self._watch is not None:
            self._watch.trained(plan, batches)

    def entered(self) -> None:
        """Another plan is at work: what its stages take is not what the ones before took."""
        if self._watch is not None:
            self._watch.clear()

    def remeasure(self) -> bool:
        """Collective. From now on plans are chosen by what stages took in training; whether that was news.

        The corrections are those of the timed layouts, by the costs as they are now.
        """
        costs = self._watch.take() if self._watch is not None else None
        if costs is None:
            return False
        assert self.calibration is not None
        self._costs, batch_size = costs, self._config.train.batch_size
        for pp, plan in self.calibration.static_plans.items():
            expected = predict(plan, costs=costs.job, global_batch_size=batch_size).step_seconds
            self._corrections[pp] = self.calibration.static_seconds[pp][costs.modal_length] / expected
        return True

    def first(self) -> Choice:
        """The plan to start with."""
        return self._autopipe.first_plan(self._costs.job, self._corrections)

    def choose(self, frozen: int, *, step: int, current: ParallelPlan) -> Choice | None:
        """The plan for ``frozen`` blocks over the rest of the run; None where no layout fits in memory."""
        evaluations = self._agenda.evaluations_from(step)

        def forward(first: int, stop: int, length: int, num_samples: int) -> float:
            by_length = self._costs.by_length
            costs = by_length.get(length) or by_length[max(by_length)]
            return costs.prefix_seconds(first, stop, num_samples=num_samples) / self._world.size

        choices = (None,) if self._autocache.declined else cached_choices(frozen, held=self._autocache.boundary)
        options = {
            cached: self._autocache.outside_seconds(frozen, cached, evaluations=evaluations, forward=forward)
            for cached in choices
        }
        return self._ask(frozen, options, step=step, current=current)

    def replan(self, *, step: int, current: ParallelPlan) -> Choice | None:
        """Another plan for the blocks that are frozen already, where costs measured in training make it pay."""
        choice = self._ask(current.frozen, {current.cached: 0.0}, step=step, current=current)
        if choice is None or not self._autopipe.pays(
            choice,
            current=current,
            remaining_steps=self._agenda.total_steps - step,
            costs=self._costs.job,
            calibration=self._corrections,
        ):
            return None
        return choice

    def _ask(self, frozen: int, options: dict[int | None, float], *, step: int, current: ParallelPlan) -> Choice | None:
        assert self.calibration is not None
        return self._autopipe.next_plan(
            frozen,
            cached_options=options,
            remaining_steps=self._agenda.total_steps - step,
            current=current,
            costs=self._costs.job,
            calibration=self._corrections,
            fixed_seconds=self._fastest_move,
        )
