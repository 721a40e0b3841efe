"""A whole elastic run, simulated: the plan after each freeze, and the time of the run. Pure and fast.

It asks AutoPipe what the trainer would ask it, at every change of n, and adds up predicted steps, transitions and the
cache's advance passes. Its assumptions are in docs/simulator.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from pipetransformer.pipe.planner.choice import AutoPipe, Choice, cached_choices
from pipetransformer.pipe.planner.costs import JobCosts
from pipetransformer.pipe.planner.search import Prediction
from pipetransformer.plan import ParallelPlan

__all__ = ["Segment", "SimulatedRun", "simulate_run"]


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """A training and its freeze schedule.

    Attributes:
        frozen: n by epoch, never falling.
        steps_per_epoch: steps of ``global_batch_size`` samples.
        global_batch_size: samples of a step.
        cache_bytes: bytes of all nodes' caches together at most; None for no limit.
    """

    frozen: tuple[int, ...]
    steps_per_epoch: int
    global_batch_size: int
    cache_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Segment:
    """Epochs under one plan.

    Attributes:
        first_epoch: the first of its epochs, counted from 0.
        num_epochs: epochs under the plan.
        num_steps: steps under the plan.
        prediction: the plan, with the expected figures of its step.
        transition_seconds: time of the transition before its first step.
        advance_seconds: time of the cache's advance before its first step.
    """

    first_epoch: int
    num_epochs: int
    num_steps: int
    prediction: Prediction
    transition_seconds: float
    advance_seconds: float

    @property
    def seconds(self) -> float:
        return self.num_steps * self.prediction.step_seconds + self.transition_seconds + self.advance_seconds


def simulate_run(
    run: SimulatedRun,
    *,
    autopipe: AutoPipe,
    costs: JobCosts,
    has_cache: bool,
    fixed_seconds: float = 0.0,
) -> tuple[Segment, ...]:
    """The run's segments, from a start with nothing frozen, as training has.

    Args:
        fixed_seconds: time of any transition besides moving weights.

    Raises:
        UserError: no plan fits.
    """
    changes = [0, *(e for e in range(1, len(run.frozen)) if run.frozen[e] != run.frozen[e - 1]), len(run.frozen)]
    choice = autopipe.first_plan(costs, {})
    held: int | None = None  # what the cache has, read or not
    segments: list[Segment] = []
    for epoch, stop in pairwise(changes):
        current = choice.plan
        # As the trainer does: where no layout takes so many frozen blocks, as many as one does.
        candidates = (
            _choose(
                run, frozen, epoch=epoch, current=choice, held=held, autopipe=autopipe, costs=costs,
                has_cache=has_cache, fixed_seconds=fixed_seconds,
            )
            for frozen in range(min(run.frozen[epoch], autopipe.max_frozen(current)), current.frozen, -1)
        )  # fmt: skip
        choice, moves, advance = next((found for found in candidates if found is not None), (choice, 0.0, 0.0))
        held = held if choice.plan.cached is None else choice.plan.cached
        num_steps = (stop - epoch) * run.steps_per_epoch
        segments.append(Segment(epoch, stop - epoch, num_steps, choice.prediction, moves, advance))
    return tuple(segments)


def _choose(
    run: SimulatedRun,
    frozen: int,
    *,
    epoch: int,
    current: Choice,
    held: int | None,
    autopipe: AutoPipe,
    costs: JobCosts,
    has_cache: bool,
    fixed_seconds: float,
) -> tuple[Choice, float, float] | None:
    """AutoPipe's choice, with the seconds of the transition and of the cache's advance; None where nothing fits."""
    options = {
        cached: _advance_seconds(run, current.plan, costs=costs, held=held, target=cached)
        for cached in (cached_choices(frozen, held=held) if has_cache else (None,))
        if cached is None or _fits(run, current.plan, costs=costs, boundary=cached)
    }
    choice = autopipe.next_plan(
        frozen,
        cached_options=options,
        remaining_steps=(len(run.frozen) - epoch) * run.steps_per_epoch,
        current=current.plan,
        costs=costs,
        calibration={},
        fixed_seconds=fixed_seconds,
    )
    return None if choice is None else (choice, choice.transition_seconds, options[choice.plan.cached])


def _fits(run: SimulatedRun, plan: ParallelPlan, *, costs: JobCosts, boundary: int) -> bool:
    """Whether the nodes can keep a boundary of every sample."""
    step_bytes = costs.unit_costs(run.global_batch_size).boundary_bytes[plan.numbering.behind(boundary) - 1]
    return run.cache_bytes is None or run.steps_per_epoch * step_bytes <= run.cache_bytes


def _advance_seconds(
    run: SimulatedRun, current: ParallelPlan, *, costs: JobCosts, held: int | None, target: int | None
) -> float:
    """Time for all ranks together to take every sample to boundary ``target``, the frozen forward data-parallel."""
    if target is None or target == held:
        return 0.0
    unit = costs.unit_costs(-(-run.global_batch_size // current.world_size))
    first, stop = current.numbering.behind(held or 0), current.numbering.behind(target)
    moved = unit.boundary_bytes[stop - 1] + (unit.boundary_bytes[first - 1] if first else 0)
    batch_ns = sum(unit.prefix_ns[first:stop]) + (costs.read.ns(moved) if costs.read is not None else 0)
    return run.steps_per_epoch * batch_ns / 1e9
