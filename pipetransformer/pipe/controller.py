"""AutoPipe: which plan to take for n frozen blocks, from measured costs, within what the configuration allows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pipetransformer.errors import UserError
from pipetransformer.pipe.costs import JobCosts
from pipetransformer.pipe.planner import Constraints, Prediction, best_plan, divisors
from pipetransformer.plan import ParallelPlan

if TYPE_CHECKING:
    from pipetransformer.config import Config

__all__ = ["AutoPipe", "Choice"]


@dataclass(frozen=True, slots=True)
class Choice:
    """A plan and why.

    Attributes:
        predicted_step_seconds: of a full step. weighed: (pp, M, cached, predicted seconds) of all candidates.
    """

    plan: ParallelPlan
    predicted_step_seconds: float
    weighed: tuple[tuple[int, int, int | None, float], ...]


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
        self._first = Constraints(
            world_size=world_size,
            global_batch_size=config.train.batch_size,
            schedule=pipe.schedule,
            microbatches=pipe.microbatches if isinstance(pipe.microbatches, int) else None,
            pipeline_lengths=(pipe.initial_length,) if isinstance(pipe.initial_length, int) else divisors(local_size),
            memory_limit=self._memory_limit,
        )
        self._later = replace(self._first, pipeline_lengths=divisors(local_size))

    def max_frozen(self, first_plan: ParallelPlan) -> int:
        """The most blocks that may freeze: all, or as many as leave the kept pipeline a unit a stage."""
        most = self._num_blocks + 1 - first_plan.pp if self._keeps_length else self._num_blocks
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
            limit = "" if self._memory_limit is None else f" and pipe.memory_limit ({self._memory_limit} bytes)"
            lengths = ", ".join(str(pp) for pp in self._first.pipeline_lengths)
            raise UserError(
                f"pipe: no layout with a pipeline of {lengths} fits schedule {self._first.schedule}, "
                f"pipe.microbatches{limit}; raise the limit, or set pipe.microbatches to auto"
            )
        return choice

    def next_plan(
        self,
        frozen: int,
        *,
        cached_options: Mapping[int | None, float],
        remaining_steps: int,
        current: ParallelPlan,
        costs: JobCosts,
        calibration: Mapping[int, float],
    ) -> Choice | None:
        """The plan for ``frozen`` blocks over the ``remaining_steps``; None where none fits.

        Args:
            cached_options: boundaries that could be read from the cache (None: no cache), each with the seconds that
                it costs to get there and outside of steps.
        """
        constraints = self._later
        if self._keeps_length:
            constraints = replace(constraints, pipeline_lengths=(current.pp,))
        if self._keeps_cut:
            constraints = replace(constraints, fixed_cut=current.boundaries, microbatches=current.num_microbatches)
        return self._choose(frozen, cached_options, remaining_steps, constraints, costs, calibration)

    def _choose(
        self,
        frozen: int,
        cached_options: Mapping[int | None, float],
        remaining_steps: int,
        constraints: Constraints,
        costs: JobCosts,
        calibration: Mapping[int, float],
    ) -> Choice | None:
        best: tuple[float, Prediction] | None = None
        weighed: list[Prediction] = []
        for cached, extra_seconds in cached_options.items():
            prediction, candidates = best_plan(
                frozen,
                cached=cached,
                costs=costs,
                constraints=constraints,
                num_blocks=self._num_blocks,
                calibration=calibration,
            )
            weighed += candidates
            if prediction is not None:
                total = prediction.step_seconds * remaining_steps + extra_seconds
                if best is None or total < best[0]:
                    best = (total, prediction)
        if best is None:
            return None
        evidence = tuple((p.plan.pp, p.plan.num_microbatches, p.plan.cached, round(p.step_seconds, 6)) for p in weighed)
        return Choice(best[1].plan, best[1].step_seconds, evidence)
