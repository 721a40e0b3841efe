"""AutoPipe: measures the costs of units and layouts, corrects them during training, and asks the planner for plans.

The pure ``Planner`` is in ``pipe/planner/choice.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import starmap
from time import perf_counter
from typing import TYPE_CHECKING

from pipetransformer.config.calendar import Calendar
from pipetransformer.data import Batch
from pipetransformer.errors import UserError
from pipetransformer.models import Chain
from pipetransformer.pipe.measure.counted import counted_profile, predicted_layouts
from pipetransformer.pipe.measure.profile import measure_profile
from pipetransformer.pipe.measure.profile_file import Profile
from pipetransformer.pipe.measure.static_layouts import (
    TIMED_STEPS,
    StaticLayouts,
    round_seconds,
    time_static_layouts,
    time_steps,
)
from pipetransformer.pipe.measure.watch import FEWEST_STEPS, CostWatch
from pipetransformer.pipe.measure.workload import Workload
from pipetransformer.pipe.planner.answers import Ahead, Choice, Outlook, Settled
from pipetransformer.pipe.planner.calibration import Line, Observed, lines_of
from pipetransformer.pipe.planner.checks import check_layout
from pipetransformer.pipe.planner.choice import LEAST_MARGIN, MOST_MARGIN, Planner
from pipetransformer.pipe.planner.constraints import divisors
from pipetransformer.pipe.planner.costs import JobCosts
from pipetransformer.pipe.planner.search import predict
from pipetransformer.plan import PREFIXES, ParallelPlan
from pipetransformer.plan.prefix import PrefixWork
from pipetransformer.process.collectives import slowest, smallest
from pipetransformer.process.device import device_memory
from pipetransformer.process.world import World

if TYPE_CHECKING:
    from pipetransformer.config import Config
    from pipetransformer.engine import Engine, PhaseSeconds


MEASURING_SHARE = 0.05
"""The most of a run, as predicted, that measuring may take; the fastest layout by prediction is always timed."""

Offers = Callable[[int], Mapping[int | None, Sequence[PrefixWork]]]
"""Gives, for a number of frozen blocks, the possible boundaries of the cache (None: no cache) and their forwards."""


class AutoPipe:
    """Chooses the plan for n frozen blocks, with costs measured before and during training.

    Making it is collective: all ranks plan for the smallest device.

    Attributes:
        layouts: timed static layouts.
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
        self._config, self._chain, self._world, self._calendar = config, chain, world, calendar
        self._watch: CostWatch | None = None
        self._observed: dict[ParallelPlan, Observed] = {}
        self._recent = _Recent()
        self._is_measured = False
        self._planner = Planner.of(
            config,
            num_blocks=chain.num_blocks,
            world_size=world.size,
            local_size=world.local_size,
            device_memory=smallest(device_memory(world.device)),
        )

    def measure(
        self,
        engine: Engine,
        batches: Sequence[Batch],
        *,
        first_step: int = 0,
        spent_seconds: float = 0.0,
        disk_ns: float = 0.0,
    ) -> None:
        """Collective. Measures unit costs, and the step time of every static layout; counts them without
        ``pipe.measure``.

        The step time of the best one is also t0 of the compute floor.

        Args:
            batches: the global batches of an epoch.
            first_step: the number of steps that are done.
            spent_seconds: seconds that other measurements of this job have taken.
            disk_ns: mean nanoseconds that a byte of the cache takes longer to be read than from memory.

        Raises:
            UserError: if no layout fits.
        """
        config, world, began = self._config, self._world, perf_counter()
        workload = Workload.of(batches, config, num_ranks=world.size, local_size=world.local_size)
        num_steps = self._calendar.total_steps - first_step
        timed, measures = partial(measure_profile, num_steps=num_steps), config.pipe.measure and num_steps > 0
        costs = timed if measures else counted_profile
        profile = costs(engine.chain, engine.datasets["train"], workload=workload, config=config, world=world)
        profile = replace(profile, job=profile.job.with_disk(disk_ns))
        self.workload, self.profile = workload, profile.at_lengths(workload.counts)
        self._planner.first_plan(self.profile.job, {})  # raises UserError if no layout fits
        self._is_measured = True
        job = self.profile.job
        predictions = self._planner.static_layouts(job)
        if not measures:
            self.layouts = predicted_layouts(predictions, workload)
            return
        run_seconds = num_steps * min(prediction.step_seconds for prediction in predictions)
        self.layouts = time_static_layouts(
            predictions,
            self._planner.shortest_steps(job),
            engine=engine,
            workload=workload,
            budget_seconds=MEASURING_SHARE * run_seconds - slowest(spent_seconds + perf_counter() - began),
        )
        if world.device.type == "cpu":
            self._watch = CostWatch(self.profile, workload, rank=world.rank, global_batch_size=config.train.batch_size)

    def time_again(self, engine: Engine) -> tuple[float, ...]:
        """Collective. Seconds of the best static layout's step at the end of training, in as many rounds as before it:
        how far the machine's speed has moved. Leaves the engine in that layout, with the weights as they were.
        """
        layouts, example = self.layouts, self.workload.examples[self.workload.modal_length]
        if layouts.rounds:
            engine.enter(layouts.plans[layouts.best_pp])
        return tuple(time_steps(engine, example, num_steps=TIMED_STEPS) for _ in layouts.rounds)

    # ---- observation of the training -------------------------------------------------------------------------------

    def spent(self, seconds: PhaseSeconds) -> None:
        """Takes note of this rank's seconds by phase in some steps."""
        if self._watch is not None:
            self._watch.spent(seconds)

    def trained(self, plan: ParallelPlan, batches: Sequence[Batch], *, seconds: float) -> None:
        """Takes note of the plan, the global batches and the seconds of these steps."""
        if not self._is_measured:  # a replay may do without
            return
        if self._watch is not None:
            self._watch.trained(plan, batches)
        work = sum(self._full_steps(batch.length, len(batch.ids)) for batch in batches)
        self._recent = self._recent.plus(len(batches), work=work, seconds=seconds)

    def _full_steps(self, length: int, num_samples: int) -> float:
        """The work of samples of one padded length, in steps of full batches of the most common length, which are what
        is timed and predicted."""
        costs = self.profile.measured
        share = sum(costs[length].step_ns) / sum(costs[self.workload.modal_length].step_ns)
        return share * num_samples / self.layouts.timed_samples

    @property
    def _mean_step(self) -> float:
        """The work of a mean step, likewise: of texts, most of which are short, far below 1."""
        counts = self.workload.counts
        return sum(starmap(self._full_steps, counts.items())) / self._calendar.batches_per_epoch

    def entered(self) -> None:
        """Deletes the notes: they belong to the stages of the plan before."""
        self._recent = _Recent()
        if self._watch is not None:
            self._watch.clear()

    # ---- plans -----------------------------------------------------------------------------------------------------

    def first_plan(self) -> Choice:
        """The plan to start with, with nothing frozen that can train.

        Raises:
            UserError: if no plan fits.
        """
        return self._planner.first_plan(self.profile.job, self.lines())

    def resumed_plan(self, old: ParallelPlan, *, step: int, untouched: int) -> Choice:
        """The plan for ranks that go on where others were under ``old``: with the same blocks frozen.

        Args:
            step: number of steps done.
            untouched: number of leading units that no step had trained.

        Raises:
            UserError: if no plan fits.
        """
        costs = self.profile.job.trained_from(untouched)
        outlook = Outlook(costs, max(1, self._calendar.total_steps - step) * self._mean_step, self.lines())
        return self._planner.resumed_plan(old.frozen, cached=old.cached, outlook=outlook)

    def exceeds(self, plan: ParallelPlan, *, untouched: int) -> bool:
        """Whether ``plan`` is predicted to take more of a rank than the limit.

        Args:
            untouched: as for ``resumed_plan``.
        """
        limit = self._planner.first.memory_limit
        return limit is not None and self._most_bytes(plan, self.profile.job.trained_from(untouched)) > limit

    def smaller(self, current: ParallelPlan, *, step: int) -> tuple[int, Smaller | UserError]:
        """The most bytes that ``current`` is predicted to take of a rank; and a plan that takes a tenth less, or the
        reason for none. Not collective.
        """
        outlook = self._outlook(step, current)
        taken = self._most_bytes(current, outlook.costs)
        limit = taken * 9 // 10
        planner = replace(self._planner, first=replace(self._planner.first, memory_limit=limit, prefixes=PREFIXES))
        try:
            choice = planner.resumed_plan(current.frozen, cached=current.cached, outlook=outlook)
        except UserError as error:
            return taken, error
        return taken, Smaller(choice.plan, limit)

    def _most_bytes(self, plan: ParallelPlan, costs: JobCosts) -> int:
        return max(predict(plan, costs=costs, global_batch_size=self._config.train.batch_size).memory_bytes)

    def settle(
        self,
        wanted: int,
        *,
        step: int,
        current: ParallelPlan,
        offers: Offers,
        tentative_from: int | None = None,
        is_confirmed: bool = False,
    ) -> Settled:
        """Collective. Decides how many of the ``wanted`` blocks freeze, and the plan for the rest of the run.

        If n stays, another plan is chosen only if it pays by new costs from training.

        Args:
            wanted: number of frozen blocks that AutoFreeze wants.
            step: number of steps done.
            current: the present plan.
            offers: gives the possible boundaries of the cache for a number of frozen blocks, each with its forwards.
            tentative_from: number of blocks before a freeze that may yet be undone, whose optimizer state stays; None
                where there is none.
            is_confirmed: whether a tentative freeze was kept, so that the cache may advance now.
        """
        parked_from = None
        if tentative_from is not None:
            parked_from = max(current.numbering.behind(tentative_from), int(current.stem_frozen))
        has_news = self._remeasure(current)
        return self._planner.settle(
            wanted,
            current=current,
            options=partial(self._options, offers),
            outlook=self._outlook(step, current, parked_from=parked_from),
            has_news=has_news,
            is_confirmed=is_confirmed,
        )

    def gains(
        self, frozen: int, *, step: int, current: ParallelPlan, offers: Offers, judged_at: int | None = None
    ) -> tuple[float, float]:
        """Predicted (seconds saved, seconds spent) over the rest of the run by ``frozen`` blocks in place of those of
        now. The other arguments are those of ``settle``.

        Args:
            judged_at: the step before which the cache stays where it is, because the guard has not judged them; None
                where it may advance at once.
        """
        return self._planner.gains(
            frozen,
            current=current,
            options=partial(self._options, offers),
            outlook=self._outlook(step, current),
            tentative_steps=0.0 if judged_at is None else (judged_at - step) * self._mean_step,
        )

    def ahead(self, frozen: int, *, step: int, current: ParallelPlan, offers: Offers) -> Ahead | None:
        """The run from ``step`` on with ``frozen`` blocks, as it is predicted from ``current``; None where no plan
        fits, or nothing is measured. Not collective. The other arguments are those of ``settle``.
        """
        if not self._is_measured:
            return None
        outlook, plan, move = self._outlook(step, current), current, 0.0
        if frozen == current.frozen:
            seconds = self._planner.stay(current, outlook)
        else:
            options = self._options(offers, frozen)
            choice = self._planner.next_plan(frozen, cached_options=options, current=current, outlook=outlook)
            if choice is None:
                return None
            plan, seconds, move = choice.plan, choice.prediction.step_seconds, choice.transition_seconds
        mean = self._mean_step
        forward = self.profile.measured[self.workload.modal_length].forward_ns
        share = sum(forward[plan.numbering.behind(plan.cached) if plan.cached else 0 :]) / max(1, sum(forward))
        whole = seconds * mean / 3 * self._calendar.batches_per_epoch  # a forward is a third of a step's work
        return Ahead(step, seconds * mean, move, whole * share, plan.cached)

    @property
    def seconds_behind_training(self) -> float:
        """Predicted seconds of what is timed when training is over."""
        return sum(round_seconds(seconds, num_steps=TIMED_STEPS) for seconds in self.layouts.rounds)

    def _options(self, offers: Offers, frozen: int) -> Mapping[int | None, float]:
        return {cached: self.seconds_of(work) for cached, work in offers(frozen).items()}

    def _outlook(self, step: int, current: ParallelPlan, *, parked_from: int | None = None) -> Outlook:
        """The rest of the run behind ``step`` steps, the last of them under ``current``."""
        layouts, untouched = self.layouts, self._chain.untouched
        if step:
            untouched = min(untouched, current.first_active)
        return Outlook(
            replace(self.profile.job, parked_from=parked_from).trained_from(untouched),
            (self._calendar.total_steps - step) * self._mean_step,
            self.lines(),
            fixed_seconds=layouts.fastest_move,
            margin=MOST_MARGIN if layouts.spread is None else min(max(LEAST_MARGIN, layouts.spread), MOST_MARGIN),
        )

    def seconds_of(self, work: Sequence[PrefixWork]) -> float:
        """Predicted seconds of ``work``, shared by all ranks, as fast as its units were measured."""
        by_length, seconds = self.profile.measured, 0.0
        for part in work:
            costs = by_length.get(part.length) or by_length[max(by_length)]
            forward = costs.prefix_seconds(part.first, part.stop, num_samples=part.num_samples) / self._world.size
            seconds += part.times * forward
        return seconds

    def lines(self) -> dict[int, Line]:
        """Real seconds of a step from simulated ones, by pp, from all that was timed so far."""
        job, batch_size = self.profile.job, self._config.train.batch_size

        def simulated(plan: ParallelPlan) -> float:
            return predict(plan, costs=job, global_batch_size=batch_size).step_seconds

        lengths = divisors(self._world.local_size)
        return lines_of(self.layouts.timed, self._observed, lengths=lengths, simulated=simulated)

    def _remeasure(self, current: ParallelPlan) -> bool:
        """Collective. Takes up the steps of the present plan, and the times of its stages.

        Returns whether there were enough steps for new costs.
        """
        profile = self._watch.take() if self._watch is not None else None
        if profile is not None:
            self.profile = profile
        recent = self._recent
        if recent.num_steps < FEWEST_STEPS:
            return False
        self._recent = _Recent()
        seconds = slowest(recent.seconds) / recent.num_steps
        self._observed.pop(current, None)  # the latest plan comes last
        self._observed[current] = Observed(recent.work / recent.num_steps, seconds)
        return True


@dataclass(frozen=True, slots=True)
class Smaller:
    """A plan for less memory.

    Attributes:
        plan: the plan.
        limit: bytes that it takes of a rank at most.
    """

    plan: ParallelPlan
    limit: int


@dataclass(frozen=True, slots=True)
class _Recent:
    """Steps under the present plan that no line has taken up: their number, work and seconds."""

    num_steps: int = 0
    work: float = 0.0
    seconds: float = 0.0

    def plus(self, num_steps: int, *, work: float, seconds: float) -> _Recent:
        return _Recent(self.num_steps + num_steps, self.work + work, self.seconds + seconds)
