"""The choice of a plan for n frozen blocks, from costs, under constraints. Pure: nothing but plain numbers.

It serves AutoPipe in a job, ``simulation/run.py`` for a simulated cluster, and the command ``plan``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from pipetransformer.config import Config
from pipetransformer.errors import UserError
from pipetransformer.pipe.planner.answers import Choice, Outlook, Settled
from pipetransformer.pipe.planner.calibration import AS_SIMULATED, Line
from pipetransformer.pipe.planner.constraints import Constraints, divisors
from pipetransformer.pipe.planner.costs import JobCosts
from pipetransformer.pipe.planner.obstacle import obstacle
from pipetransformer.pipe.planner.search import Prediction, best_plans, predict
from pipetransformer.pipe.planner.transition_cost import transition_seconds
from pipetransformer.plan import PREFIXES, ParallelPlan
from pipetransformer.plan.prefix import cached_choices
from pipetransformer.plan.schedules import fewest_stages
from pipetransformer.plan.units import Numbering

LEAST_MARGIN, MOST_MARGIN = 0.05, 0.2
"""Less gain than the first may be noise wherever times were measured; more than the second is none, however noisy."""
SPLIT_MARGIN = 0.1
"""The gain below which a plain loop keeps its rows together: a shape that was not timed counts in proportion, though
small products are slower, and a shape that seemed 2 to 7 % faster was 21 to 25 % slower in live runs."""

_CACHE_MARGIN = 0.02
"""Less gain than this, over the rest of the run, is not worth another boundary of the cache: disks and memory cost what
no prediction tells."""


def schedules_of(config: Config) -> tuple[tuple[str, int], ...]:
    """The schedules that plans may have, each with its stages per rank."""
    schedule = config.pipe.schedule
    names = ("1f1b", "interleaved", "zero_bubble") if schedule == "auto" else (schedule,)
    return tuple((name, config.pipe.stages_per_rank or fewest_stages(name)) for name in names)


_PLACES = {"replicated": "on every rank", "cached": "cached", "streamed": "streamed", "in_place": "in its stages"}


@dataclass(frozen=True)
class Planner:
    """Chooses plans under the constraints of a job.

    Where the pipeline length is kept, every stage needs an active unit. So not all blocks can freeze: see
    ``max_frozen``.

    Attributes:
        first: constraints of the first plan. Plans after a freeze may have any pp that divides ``local_size``.
        num_blocks: number of blocks of the model (L).
        local_size: number of ranks of a node; a pipeline never spans two nodes.
        keeps_length: whether pp and dp stay, so that only the cut can move (AutoDP switched off).
        keeps_cut: whether the first cut stays too, as far as the prefix allows (AutoPipe switched off).
        limit_key: the setting that gives the memory limit; None for the device's own memory.
        least_frozen: number of leading blocks in which nothing can train: they are frozen in every plan.
    """

    first: Constraints
    num_blocks: int
    local_size: int
    keeps_length: bool = False
    keeps_cut: bool = False
    limit_key: str | None = None
    least_frozen: int = 0

    @classmethod
    def of(
        cls, config: Config, *, num_blocks: int, world_size: int, local_size: int, device_memory: int | None = None
    ) -> Planner:
        """The planner for a job of this configuration.

        Args:
            device_memory: bytes per rank that plans may use if ``pipe.memory_limit`` is not set; None for no limit.
        """
        pipe, limit = config.pipe, config.pipe.memory_limit
        if limit is None and device_memory is not None:
            limit = max(device_memory - (config.cache.device_budget or 0), 0)
        first = Constraints(
            world_size=world_size,
            global_batch_size=config.train.batch_size,
            schedules=schedules_of(config),
            num_microbatches=config.fixed_microbatches(2),
            plain_microbatches=config.fixed_microbatches(1),
            pipeline_lengths=(pipe.initial_length,) if isinstance(pipe.initial_length, int) else divisors(local_size),
            memory_limit=limit,
            stem_frozen=config.freezes_stem,
            shard=config.dp.shard,
            prefixes=PREFIXES if limit is not None and pipe.enabled else PREFIXES[:1],
        )
        return cls(
            first,
            num_blocks=num_blocks,
            local_size=local_size,
            keeps_length=not config.dp.enabled,
            keeps_cut=not pipe.enabled,
            limit_key=None if pipe.memory_limit is None else "pipe.memory_limit",
            least_frozen=config.model.least_frozen(num_blocks),
        )

    def max_frozen(self, first_plan: ParallelPlan) -> int:
        """The most blocks that may freeze: all, or as many as leave one unit for each stage of a kept pipeline."""
        if not (self.keeps_length or self.keeps_cut):
            return self.num_blocks
        fewest = first_plan.num_stages
        if not self.keeps_cut and first_plan.pp > 1:
            fewest = first_plan.pp * min(per_rank for _, per_rank in self.first.schedules)
        blocks = -(-(fewest - 1) // first_plan.units_per_block)  # active blocks; the head is one more unit
        return max(self.num_blocks - blocks, self.least_frozen)

    def static_layouts(self, costs: JobCosts) -> tuple[Prediction, ...]:
        """The best plan of each pipeline length, shortest first, with nothing frozen that can train; lengths that do
        not fit are left out."""
        by_length = (
            self._candidates(self.least_frozen, None, replace(self.first, pipeline_lengths=(pp,)), Outlook(costs, 1))
            for pp in divisors(self.local_size)
        )
        return tuple(candidates[0] for candidates in by_length if candidates)

    def shortest_steps(self, costs: JobCosts) -> tuple[Prediction, ...]:
        """For each pipeline length, the best plan with as many frozen blocks as leave every stage a unit, read from a
        cache; lengths that do not fit are left out.
        """
        found = []
        for pp in divisors(self.local_size):
            allowed = replace(self.first, pipeline_lengths=(pp,), fixed_cut=None)
            for frozen in range(self.num_blocks, self.least_frozen, -1):
                if candidates := self._candidates(frozen, frozen, allowed, Outlook(costs, 1)):
                    found.append(candidates[0])
                    break
        return tuple(found)

    def first_plan(self, costs: JobCosts, lines: Mapping[int, Line]) -> Choice:
        """The plan to start with, with nothing frozen that can train.

        Args:
            lines: real seconds of a step from simulated ones, by pp.

        Raises:
            UserError: if no plan fits.
        """
        choice = self._choose(self.least_frozen, {None: 0.0}, self.first, Outlook(costs, 1, lines))
        if choice is None:
            raise UserError(self._obstacle(costs))
        return choice

    def resumed_plan(self, frozen: int, *, cached: int | None, outlook: Outlook) -> Choice:
        """The plan to go on with where ``frozen`` blocks are frozen, on ranks that had no plan before.

        Args:
            cached: boundary of the cache; None for no cache.

        Raises:
            UserError: if no plan fits.
        """
        is_freed = frozen > self.least_frozen and not (self.keeps_length or self.keeps_cut)
        allowed = replace(self.first, pipeline_lengths=divisors(self.local_size)) if is_freed else self.first
        for option in dict.fromkeys((cached, None)):
            choice = self._choose(frozen, {option: 0.0}, allowed, outlook)
            if choice is not None:
                return choice
        raise UserError(self._obstacle(outlook.costs))

    def _obstacle(self, costs: JobCosts) -> str:
        def fits(limit: int | None, microbatches: int | None, shard: str | None = None) -> bool:
            freed = replace(self.first, memory_limit=limit, num_microbatches=microbatches)
            freed = freed if shard is None else replace(freed, shard=shard)
            return bool(self._candidates(self.least_frozen, None, freed, Outlook(costs, 1)))

        numbering = Numbering.of(num_blocks=self.num_blocks, num_units=len(costs.parameter_bytes))
        num_units = numbering.num_units - max(numbering.behind(self.least_frozen), int(self.first.stem_frozen))

        def place_at(limit: int) -> str:
            best, *_ = self._candidates(
                self.least_frozen, None, replace(self.first, memory_limit=limit), Outlook(costs, 1)
            )
            return _PLACES[best.plan.prefix] if best.plan.first_active else ""

        return obstacle(self.first, fits=fits, limit_key=self.limit_key, num_units=num_units, place_at=place_at)

    def next_plan(
        self,
        frozen: int,
        *,
        cached_options: Mapping[int | None, float],
        current: ParallelPlan,
        outlook: Outlook,
    ) -> Choice | None:
        """The plan with the least predicted time for the rest of the run; None if none fits.

        Args:
            frozen: number of frozen blocks.
            cached_options: possible boundaries of the cache (None: no cache), each with its seconds outside of
                training steps, as measured: advance pass and evaluations.
            current: the present plan, where the transition starts.
        """
        constraints = self.first
        if self.keeps_length or self.keeps_cut:
            constraints = replace(constraints, pipeline_lengths=(current.pp,))
        elif frozen > self.least_frozen or current.frozen > self.least_frozen:
            constraints = replace(constraints, pipeline_lengths=divisors(self.local_size))
        if self.keeps_cut:
            constraints = replace(
                constraints,
                fixed_cut=current.boundaries,
                num_microbatches=current.num_microbatches,
                schedules=((current.schedule, current.stages_per_rank),),
            )
        return self._choose(frozen, cached_options, constraints, outlook, current)

    def settle(
        self,
        wanted: int,
        *,
        current: ParallelPlan,
        options: Callable[[int], Mapping[int | None, float]],
        outlook: Outlook,
        has_news: bool = False,
        is_confirmed: bool = False,
    ) -> Settled:
        """Decides how many of the ``wanted`` blocks freeze, and the plan for them.

        Where the prefix must be on every rank, a longer one may break the memory limit in all layouts. Then n is the
        largest number that fits. If ``wanted`` is below the present n, blocks unfreeze, or nothing changes.

        Args:
            options: gives ``cached_options`` of ``next_plan`` for a number of frozen blocks.
            has_news: whether costs are new, so that another plan for the present n may pay.
            is_confirmed: whether another boundary of the cache may pay for the present n.
        """
        now = current.frozen
        most = min(wanted, self.max_frozen(current))
        candidates = range(most, now, -1) if most > now else range(most, min(most + 1, now))
        plans = (
            self.next_plan(frozen, cached_options=options(frozen), current=current, outlook=outlook)
            for frozen in candidates
        )
        choice, reason = next(filter(None, plans), None), ""
        frozen = now if choice is None else choice.plan.frozen
        if frozen != wanted:
            is_kept = frozen == most
            reason = "the pipeline that is kept needs a unit for each stage" if is_kept else "no layout fits in memory"
        if most == now and is_confirmed:
            other = self.next_plan(now, cached_options=options(now), current=current, outlook=outlook)
            choice = other if other is not None and other.plan != current else None
        elif most == now and has_news:
            other = self.next_plan(now, cached_options={current.cached: 0.0}, current=current, outlook=outlook)
            choice = other if other is not None and self.pays(other, current=current, outlook=outlook) else None
        return Settled(choice, frozen, reason)

    def gains(
        self,
        frozen: int,
        *,
        current: ParallelPlan,
        options: Callable[[int], Mapping[int | None, float]],
        outlook: Outlook,
        tentative_steps: float = 0.0,
    ) -> tuple[float, float]:
        """(Seconds saved, seconds spent) over the rest of the run by ``frozen`` blocks in place of the present ones:
        those of steps, and those of the transition and of all else. (0, infinity) where no plan fits.

        Args:
            options: as in ``settle``.
            tentative_steps: the first of the remaining steps, in which the cache stays where it is.
        """
        there = options(frozen)
        if tentative_steps:
            held = {cached: seconds for cached, seconds in there.items() if cached in (None, current.cached)}
            behind = outlook.remaining_steps - tentative_steps
            first, rest = (replace(outlook, remaining_steps=steps) for steps in (tentative_steps, behind))
            saved, moved = self.gains(frozen, current=current, options=lambda _: held, outlook=first)
            later, spent = self.gains(frozen, current=current, options=options, outlook=rest)
            return saved + later, max(moved, spent)
        choice = self.next_plan(frozen, cached_options=there, current=current, outlook=outlook)
        if choice is None:
            return 0.0, math.inf
        go, stay = choice.prediction, self.stay(current, outlook)
        others = outlook.slope * (there[go.plan.cached] - there.get(current.cached, there[None]))  # evaluations too
        return (stay - go.step_seconds) * outlook.remaining_steps, choice.transition_seconds + max(others, 0.0)

    def stay(self, current: ParallelPlan, outlook: Outlook) -> float:
        """Predicted seconds of a step of the present plan."""
        costs, line = outlook.costs, outlook.lines.get(current.pp, AS_SIMULATED)
        stay = predict(current, costs=costs, global_batch_size=self.first.global_batch_size, line=line)
        return self._with_reads(stay, costs).step_seconds

    def pays(self, choice: Choice, *, current: ParallelPlan, outlook: Outlook) -> bool:
        """Whether a plan with the same n pays: for the rest of the run, transition included, it gains more than the
        margin over ``current`` (``LEAST_MARGIN`` at least)."""
        stay_seconds = self.stay(current, outlook) * outlook.remaining_steps
        go_seconds = choice.prediction.step_seconds * outlook.remaining_steps + choice.transition_seconds
        return go_seconds < (1.0 - max(outlook.margin, LEAST_MARGIN)) * stay_seconds

    def steady_plan(self, frozen: int, costs: JobCosts, *, has_cache: bool) -> Prediction | None:
        """The fastest plan for ``frozen`` blocks without the costs of the transition; None where none fits."""
        cached = cached_choices(frozen, held=None) if has_cache and frozen else (None,)
        is_freed = frozen > self.least_frozen
        allowed = replace(self.first, pipeline_lengths=divisors(self.local_size)) if is_freed else self.first
        choice = self._choose(frozen, dict.fromkeys(cached, 0.0), allowed, Outlook(costs, remaining_steps=10**9))
        return None if choice is None else choice.prediction

    def steady_plans(self, costs: JobCosts, *, has_cache: bool) -> tuple[Prediction, ...]:
        """By n, the fastest plan without the costs of the transition; numbers for which none fits are left out.

        Raises:
            UserError: if no plan fits with nothing frozen.
        """
        first = self.first_plan(costs, {})
        outlook = Outlook(costs.trained_from(first.plan.first_active), remaining_steps=10**9)

        def options(frozen: int) -> Mapping[int | None, float]:
            return dict.fromkeys(cached_choices(frozen, held=None) if has_cache else (None,), 0.0)

        found, wanted = [], self.num_blocks
        while wanted > self.least_frozen:
            settled = self.settle(wanted, current=first.plan, options=options, outlook=outlook)
            if settled.choice is None:
                break
            found.append(settled.choice.prediction)
            wanted = settled.frozen - 1
        return (first.prediction, *reversed(found))

    def _choose(
        self,
        frozen: int,
        cached_options: Mapping[int | None, float],
        constraints: Constraints,
        outlook: Outlook,
        current: ParallelPlan | None = None,
    ) -> Choice | None:
        costs = outlook.costs
        weighed = [
            self._with_reads(prediction, costs)
            for cached in cached_options
            for prediction in self._candidates(frozen, cached, constraints, outlook)
        ]

        def moves(plan: ParallelPlan) -> float:  # none where no plan was before
            return transition_seconds(current or plan, plan, costs=costs, fixed_seconds=outlook.fixed_seconds)

        def total(prediction: Prediction) -> float:
            outside = outlook.slope * cached_options[prediction.plan.cached] + moves(prediction.plan)
            return prediction.step_seconds * outlook.remaining_steps + outside

        if not weighed:
            return None
        able, held = weighed, current.cached if current else None
        as_it_is = [prediction for prediction in weighed if prediction.plan.cached in (None, held)]
        if as_it_is and min(map(total, weighed)) >= (1.0 - _CACHE_MARGIN) * min(map(total, as_it_is)):
            able = as_it_is
        best = min(able, key=total)
        kept = min((p for p in able if current and _is_alike(p.plan, current)), key=total, default=best)
        if total(best) >= (1.0 - outlook.margin) * total(kept):
            best = kept
        evidence = tuple(
            (p.plan.pp, p.plan.schedule, p.plan.num_microbatches, p.plan.cached, round(p.step_seconds, 6))
            for p in weighed
        )
        return Choice(best, moves(best.plan), evidence)

    def _candidates(
        self, frozen: int, cached: int | None, constraints: Constraints, outlook: Outlook
    ) -> tuple[Prediction, ...]:
        """The plans that fit, fastest first, without plain loops that split their rows for nothing."""
        fitting = best_plans(
            frozen,
            cached=cached,
            costs=outlook.costs,
            constraints=constraints,
            num_blocks=self.num_blocks,
            lines=outlook.lines,
        )
        loops: list[Prediction] = []
        for prediction in sorted(fitting, key=lambda prediction: prediction.plan.num_microbatches):
            is_faster = not loops or prediction.step_seconds < (1.0 - SPLIT_MARGIN) * loops[-1].step_seconds
            if prediction.plan.pp == 1 and is_faster:
                loops.append(prediction)
        return tuple(prediction for prediction in fitting if prediction.plan.pp > 1 or prediction in loops)

    def _with_reads(self, prediction: Prediction, costs: JobCosts) -> Prediction:
        """The prediction with reads of the cache. They run during the step, and count where they are longer than it."""
        plan = prediction.plan
        if plan.cached is None or costs.read is None:
            return prediction
        unit = costs.unit_costs(self.first.share(plan.pp))
        seconds = costs.read.ns(unit.boundary_bytes[plan.first_computed - 1]) / 1e9
        return replace(prediction, step_seconds=max(prediction.step_seconds, seconds))


def _is_alike(plan: ParallelPlan, other: ParallelPlan) -> bool:
    """Whether two plans run alike, but for the units that train."""
    return (plan.pp, plan.num_microbatches, plan.schedule, plan.stages_per_rank) == (
        *(other.pp, other.num_microbatches, other.schedule, other.stages_per_rank),
    )
