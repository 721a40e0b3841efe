"""A whole elastic run, simulated: the plan that each freeze leads to, and the seconds of the run. Pure and fast.

It asks the planner as a job does, at every change of n, and adds up predicted steps, transitions and the cache's
advance passes. Its assumptions are in docs/simulator.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from pipetransformer.pipe.planner.choice import Outlook, Planner
from pipetransformer.pipe.planner.costs import JobCosts
from pipetransformer.pipe.planner.search import Prediction
from pipetransformer.plan import ParallelPlan
from pipetransformer.plan.prefix import cached_choices


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
    planner: Planner,
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
    prediction = planner.first_plan(costs, {}).prediction
    held: int | None = None  # the boundary that the cache has, read or not
    segments: list[Segment] = []
    for epoch, stop in pairwise(changes):
        current = prediction.plan
        options = partial(_options, run, current=current, costs=costs, held=held, has_cache=has_cache)
        outlook = Outlook(costs, (len(run.frozen) - epoch) * run.steps_per_epoch, fixed_seconds=fixed_seconds)
        choice = planner.settle(run.frozen[epoch], current=current, options=options, outlook=outlook).choice
        moves = advance = 0.0
        if choice is not None:
            prediction, moves = choice.prediction, choice.transition_seconds
            advance = options(choice.plan.frozen)[choice.plan.cached]
            held = held if choice.plan.cached is None else choice.plan.cached
        num_steps = (stop - epoch) * run.steps_per_epoch
        segments.append(Segment(epoch, stop - epoch, num_steps, prediction, moves, advance))
    return tuple(segments)


def _options(
    run: SimulatedRun, frozen: int, *, current: ParallelPlan, costs: JobCosts, held: int | None, has_cache: bool
) -> dict[int | None, float]:
    """Boundaries that may be read, each with the seconds of the advance pass to get there."""
    return {
        cached: _advance_seconds(run, current, costs=costs, held=held, target=cached)
        for cached in (cached_choices(frozen, held=held) if has_cache else (None,))
        if cached is None or _fits(run, current, costs=costs, boundary=cached)
    }


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
