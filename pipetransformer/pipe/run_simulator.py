"""A whole elastic run, simulated: which plan each freeze leads to, and what the run then takes. Pure and fast.

It asks the planner what the trainer would ask it, at every change of n, and adds up predicted steps, transitions, the
cache's advance passes and its reads. What it assumes is in docs/simulator.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from pipetransformer.pipe.costs import JobCosts, Link
from pipetransformer.pipe.planner import Constraints, Prediction, best_plan
from pipetransformer.pipe.transition import transition_seconds
from pipetransformer.plan import ParallelPlan

__all__ = ["Segment", "SimulatedRun", "simulate_run"]


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """What is trained, and how it freezes.

    Attributes:
        frozen: n by epoch, never falling. steps_per_epoch: of ``global_batch_size`` samples.
    """

    num_blocks: int
    frozen: tuple[int, ...]
    steps_per_epoch: int
    global_batch_size: int


@dataclass(frozen=True, slots=True)
class Segment:
    """Epochs under one plan.

    Attributes:
        transition_seconds, advance_seconds: spent before its first step.
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
    costs: JobCosts,
    first: Constraints,
    later: Constraints,
    cache: Link | None,
    keeps_length: bool = False,
    keeps_cut: bool = False,
    fixed_seconds: float = 0.0,
) -> tuple[Segment, ...] | None:
    """The run's segments; None where no plan fits in memory.

    Args:
        first, later: what the first plan and those after a freeze must keep to. cache: a device's link to its host,
            where the cache is; None runs without.
        keeps_length: pp and dp stay as they are (no AutoDP). keeps_cut: the boundaries stay, too (no AutoPipe).
        fixed_seconds: what any transition takes besides moving weights.
    """
    changes = [0, *(e for e in range(1, len(run.frozen)) if run.frozen[e] != run.frozen[e - 1]), len(run.frozen)]
    segments: list[Segment] = []
    for epoch, stop in pairwise(changes):
        current = segments[-1].prediction.plan if segments else None
        constraints = first if current is None else later
        if current is not None and (keeps_length or keeps_cut):
            constraints = replace(constraints, pipeline_lengths=(current.pp,))
        if current is not None and keeps_cut:
            constraints = replace(
                constraints,
                fixed_cut=current.boundaries,
                microbatches=current.num_microbatches,
                schedules=((current.schedule, current.stages_per_rank),),
            )
        # As the trainer does: where no layout takes so many frozen blocks, as many as one does.
        least = current.frozen if current is not None else run.frozen[epoch]
        candidates = (
            _enter(
                run,
                frozen,
                epochs=(epoch, stop),
                current=current,
                costs=costs,
                constraints=constraints,
                cache=cache,
                fixed_seconds=fixed_seconds,
            )
            for frozen in range(run.frozen[epoch], least - 1, -1)
        )
        segment = next((found for found in candidates if found is not None), None)
        if segment is None:
            return None
        segments.append(segment)
    return tuple(segments)


def _enter(
    run: SimulatedRun,
    frozen: int,
    *,
    epochs: tuple[int, int],
    current: ParallelPlan | None,
    costs: JobCosts,
    constraints: Constraints,
    cache: Link | None,
    fixed_seconds: float,
) -> Segment | None:
    """The cheapest way to go on with ``frozen`` blocks, counted over the rest of the run; None where none fits."""
    epoch, stop = epochs
    remaining = (len(run.frozen) - epoch) * run.steps_per_epoch
    boundary = current.cached if current is not None else None
    best: tuple[float, Segment] | None = None
    for cached in _options(frozen, boundary, cache=cache):
        _, weighed = best_plan(
            frozen, cached=cached, costs=costs, constraints=constraints, num_blocks=run.num_blocks, calibration={}
        )
        advance = 0.0
        if cached is not None and cached != boundary:
            advance = _advance_seconds(
                run, costs=costs, cache=cache, source=boundary, target=cached, num_ranks=constraints.world_size
            )
        for prediction in weighed:
            prediction = _with_reads(prediction, costs=costs, cache=cache, global_batch_size=run.global_batch_size)
            moves = 0.0
            if current is not None:
                moves = transition_seconds(current, prediction.plan, costs=costs, fixed_seconds=fixed_seconds)
            total = prediction.step_seconds * remaining + moves + advance
            if best is None or total < best[0]:
                num_steps = (stop - epoch) * run.steps_per_epoch
                best = (total, Segment(epoch, stop - epoch, num_steps, prediction, moves, advance))
    return None if best is None else best[1]


def _options(frozen: int, boundary: int | None, *, cache: Link | None) -> tuple[int | None, ...]:
    """Boundaries that could be read: as AutoCache offers them."""
    if cache is None or frozen == 0:
        return (None,)
    return (frozen,) if boundary == frozen else (boundary, frozen)


def _with_reads(prediction: Prediction, *, costs: JobCosts, cache: Link | None, global_batch_size: int) -> Prediction:
    """Reads are prefetched: they cost only what they take longer than the step that hides them."""
    plan = prediction.plan
    if plan.cached is None or cache is None:
        return prediction
    share = -(-global_batch_size // plan.dp)
    num_bytes = costs.unit_costs(share).boundary_bytes[plan.cached]
    return replace(prediction, step_seconds=max(prediction.step_seconds, cache.ns(num_bytes) / 1e9))


def _advance_seconds(
    run: SimulatedRun, *, costs: JobCosts, cache: Link | None, source: int | None, target: int, num_ranks: int
) -> float:
    """All ranks together take every sample from boundary ``source`` to ``target``, the frozen forward data-parallel."""
    assert cache is not None
    rows = -(-run.global_batch_size // num_ranks)
    unit = costs.unit_costs(rows)
    units = range(0 if source is None else source + 1, target + 1)
    moved = unit.boundary_bytes[target] + (0 if source is None else unit.boundary_bytes[source])
    batch_ns = sum(unit.prefix_ns[u] for u in units) + cache.ns(moved)
    return run.steps_per_epoch * batch_ns / 1e9
