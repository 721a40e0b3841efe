"""AutoPipe: which plan to take for n frozen blocks, from measured costs, within what the configuration allows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pipetransformer.errors import UserError
from pipetransformer.pipe.costs import JobCosts
from pipetransformer.pipe.partition import smallest_limit
from pipetransformer.pipe.planner import Constraints, Prediction, best_plan, divisors, predict
from pipetransformer.pipe.transition import transition_seconds
from pipetransformer.plan import ParallelPlan

if TYPE_CHECKING:
    from pipetransformer.config import Config

__all__ = ["AutoPipe", "Choice", "schedules_of"]

_NOISE = 0.05


@dataclass(frozen=True, slots=True)
class Choice:
    """A plan and why.

    Attributes:
        weighed: (pp, schedule, M, cached, predicted seconds of a step) of all candidates.
        transition_seconds: predicted, from the plan before.
    """

    prediction: Prediction
    transition_seconds: float
    weighed: tuple[tuple[int, str, int, int | None, float], ...]

    @property
    def plan(self) -> ParallelPlan:
        return self.prediction.plan


def schedules_of(config: Config) -> tuple[tuple[str, int], ...]:
    """The schedules that plans may take, each with its stages a rank."""
    schedule = config.pipe.schedule
    names = ("1f1b", "interleaved", "zero_bubble") if schedule == "auto" else (schedule,)
    return tuple((name, config.pipe.stages_per_rank or (2 if name == "interleaved" else 1)) for name in names)


class AutoPipe:
    """Knows the constraints of the first plan and of those after a freeze.

    With ``pipe.enabled`` false the first cut stays as far as the frozen prefix allows; with ``dp.enabled`` false pp and
    dp stay and only the cut moves. Either way a pipeline of K stages needs K active units: ``max_frozen`` says how many
    blocks may freeze.

    Args:
        local_size: ranks of a node, which holds whole pipelines.
        device_memory: bytes that a plan may take where ``pipe.memory_limit`` does not say.
    """

    def __init__(
        self, config: Config, *, num_blocks: int, world_size: int, local_size: int, device_memory: int | None = None
    ) -> None:
        pipe = config.pipe
        self._num_blocks = num_blocks
        self._memory_limit = device_memory if pipe.memory_limit is None else pipe.memory_limit
        self._keeps_length = not (pipe.enabled and config.dp.enabled)
        self._keeps_cut = not pipe.enabled
        self._schedule = pipe.schedule
        self._first = Constraints(
            world_size=world_size,
            global_batch_size=config.train.batch_size,
            schedules=schedules_of(config),
            microbatches=pipe.microbatches if isinstance(pipe.microbatches, int) else None,
            pipeline_lengths=(pipe.initial_length,) if isinstance(pipe.initial_length, int) else divisors(local_size),
            memory_limit=self._memory_limit,
        )
        self._later = replace(self._first, pipeline_lengths=divisors(local_size))

    def max_frozen(self, first_plan: ParallelPlan) -> int:
        """The most blocks that may freeze: all, or as many as leave the kept pipeline a unit a stage."""
        fewest = first_plan.num_stages
        if not self._keeps_cut and first_plan.pp > 1:
            fewest = first_plan.pp * min(per_rank for _, per_rank in self._first.schedules)
        most = self._num_blocks + 1 - fewest if self._keeps_length else self._num_blocks
        return min(max(most, 0), self._num_blocks)

    def static_layouts(self, costs: JobCosts) -> tuple[Prediction, ...]:
        """The best unfrozen plan of every pipeline length that fits, shortest first."""
        found = []
        for pp in self._later.pipeline_lengths:
            constraints = replace(self._first, pipeline_lengths=(pp,))
            best, _ = best_plan(
                0, cached=None, costs=costs, constraints=constraints, num_blocks=self._num_blocks, calibration={}
            )
            if best is not None:
                found.append(best)
        return tuple(found)

    def first_plan(self, costs: JobCosts, calibration: Mapping[int, float]) -> Choice:
        """The plan to start with, nothing frozen. Raises UserError where none fits."""
        choice = self._choose(0, {None: 0.0}, 1, self._first, costs, calibration)
        if choice is None:
            lengths = ", ".join(str(pp) for pp in self._first.pipeline_lengths)
            least = self._least_memory(costs)
            if least is None:
                raise UserError(
                    f"pipe: no layout with a pipeline of {lengths} fits schedule {self._schedule} and "
                    "pipe.microbatches; set pipe.microbatches to auto"
                )
            raise UserError(
                f"pipe: no layout with a pipeline of {lengths} fits schedule {self._schedule} and pipe.memory_limit "
                f"({self._memory_limit} bytes); give at least {least}"
            )
        return choice

    def _least_memory(self, costs: JobCosts) -> int | None:
        """The smallest limit that holds a first plan; None where the memory is not what is in the way."""

        def fits(limit: int | None) -> bool:
            return self._choose(0, {None: 0.0}, 1, replace(self._first, memory_limit=limit), costs, {}) is not None

        if self._memory_limit is None or not fits(None):
            return None
        return smallest_limit(fits, refused=self._memory_limit)

    def next_plan(
        self,
        frozen: int,
        *,
        cached_options: Mapping[int | None, float],
        remaining_steps: int,
        current: ParallelPlan,
        costs: JobCosts,
        calibration: Mapping[int, float],
        fixed_seconds: float = 0.0,
    ) -> Choice | None:
        """The plan for ``frozen`` blocks over the ``remaining_steps``, transition included; None where none fits.

        Args:
            cached_options: boundaries that could be read from the cache (None: no cache), each with the seconds that
                it costs to get there and outside of steps.
            fixed_seconds: what any transition takes beside moving weights.
        """
        constraints = self._later if frozen or current.frozen else self._first
        if self._keeps_length:
            constraints = replace(constraints, pipeline_lengths=(current.pp,))
        if self._keeps_cut:
            constraints = replace(
                constraints,
                fixed_cut=current.boundaries,
                microbatches=current.num_microbatches,
                schedules=((current.schedule, current.stages_per_rank),),
            )
        return self._choose(
            frozen, cached_options, remaining_steps, constraints, costs, calibration, current, fixed_seconds
        )

    def pays(
        self,
        choice: Choice,
        *,
        current: ParallelPlan,
        remaining_steps: int,
        costs: JobCosts,
        calibration: Mapping[int, float],
    ) -> bool:
        """Whether to leave ``current`` for a plan that freezes no more: the gain over the rest of the run exceeds the
        transition and a twentieth of the time, which may be noise."""
        stay = predict(
            current,
            costs=costs,
            global_batch_size=self._first.global_batch_size,
            correction=calibration.get(current.pp, 1.0),
        )
        go = choice.prediction.step_seconds * remaining_steps + choice.transition_seconds
        return go < (1.0 - _NOISE) * stay.step_seconds * remaining_steps

    def steady_plan(self, frozen: int, *, costs: JobCosts, has_cache: bool) -> Prediction | None:
        """The fastest plan for ``frozen`` blocks, whatever it takes to get there; None where none fits."""
        first = self.first_plan(costs, {})
        if frozen == 0:
            return first.prediction
        if frozen > self.max_frozen(first.plan):
            return None
        options: dict[int | None, float] = {None: 0.0, frozen: 0.0} if has_cache else {None: 0.0}
        choice = self.next_plan(
            frozen, cached_options=options, remaining_steps=10**9, current=first.plan, costs=costs, calibration={}
        )
        return None if choice is None else choice.prediction

    def _choose(
        self,
        frozen: int,
        cached_options: Mapping[int | None, float],
        remaining_steps: int,
        constraints: Constraints,
        costs: JobCosts,
        calibration: Mapping[int, float],
        current: ParallelPlan | None = None,
        fixed_seconds: float = 0.0,
    ) -> Choice | None:
        best: tuple[float, Prediction, float] | None = None
        weighed: list[Prediction] = []
        for cached, extra_seconds in cached_options.items():
            _, candidates = best_plan(
                frozen,
                cached=cached,
                costs=costs,
                constraints=constraints,
                num_blocks=self._num_blocks,
                calibration=calibration,
            )
            weighed += candidates
            for prediction in candidates:
                moves = 0.0
                if current is not None:
                    moves = transition_seconds(current, prediction.plan, costs=costs, fixed_seconds=fixed_seconds)
                total = prediction.step_seconds * remaining_steps + extra_seconds + moves
                if best is None or total < best[0]:
                    best = (total, prediction, moves)
        if best is None:
            return None
        evidence = tuple(
            (p.plan.pp, p.plan.schedule, p.plan.num_microbatches, p.plan.cached, round(p.step_seconds, 6))
            for p in weighed
        )
        return Choice(best[1], best[2], evidence)
