"""AutoPipe: the cheapest layout (pp, boundaries, M) for n frozen blocks that fits in memory. A pure function.

Predicted step time of a layout, from measured costs: a pipeline of K stages and M micro-batches takes
(M + K - 1) times its slowest stage (forward + backward + what it sends and receives), then the gradients of the largest
stage are summed over the replicas and its weights updated. The prefix runs in front of stage 0 where it is not cached.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipetransformer.pipe.costs import JobCosts
from pipetransformer.pipe.partition import bottleneck, partition
from pipetransformer.plan import ParallelPlan, first_active

__all__ = ["Constraints", "Prediction", "best_plan", "divisors", "microbatch_choices"]


@dataclass(frozen=True, slots=True)
class Constraints:
    """What a plan must keep to.

    Attributes:
        microbatches: a fixed M, or None for the planner's choice.
        pipeline_lengths: the pp that may be taken.
        memory_limit: bytes a rank, or None.
        fixed_cut: boundaries that are kept as far as the prefix allows (AutoPipe switched off), or None.
    """

    world_size: int
    global_batch_size: int
    schedule: str
    microbatches: int | None
    pipeline_lengths: tuple[int, ...]
    memory_limit: int | None
    fixed_cut: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Prediction:
    """A plan with what is expected of it: seconds of a full step, bytes on the fullest rank."""

    plan: ParallelPlan
    step_seconds: float
    memory_bytes: int


def divisors(number: int) -> tuple[int, ...]:
    return tuple(d for d in range(1, number + 1) if number % d == 0)


def microbatch_choices(share: int, *, pp: int) -> tuple[int, ...]:
    """Candidate M for a replica's share of ``share`` rows; each micro-batch keeps at least one row.

    A plain loop (pp = 1) may split its share for memory, or because small micro-batches stay in a CPU's cache. A
    pipeline tries pp, 2 pp and 4 pp: more gains less than a tenth of the step.
    """
    candidates = (1, 2, 4, 8) if pp == 1 else (pp, 2 * pp, 4 * pp)
    return tuple(m for m in candidates if m <= share)


def best_plan(
    frozen: int,
    *,
    cached: int | None,
    costs: JobCosts,
    constraints: Constraints,
    num_blocks: int,
    calibration: Mapping[int, float],
) -> tuple[Prediction | None, tuple[Prediction, ...]]:
    """The fastest plan for ``frozen`` blocks and every other one that was weighed.

    Args:
        cached: boundary that is read from the cache (None: the prefix is computed in the step).
        calibration: measured over predicted step time by pp, from the static layouts timed before training; 1 where
            there is none.

    Returns:
        (best, all candidates that fit, fastest first); best is None where nothing fits.
    """
    num_active = num_blocks + 2 - first_active(frozen)
    weighed: list[Prediction] = []
    for pp in constraints.pipeline_lengths:
        if pp > num_active:
            continue
        share = -(-constraints.global_batch_size // (constraints.world_size // pp))
        choices: Sequence[int] = (
            (constraints.microbatches,) if constraints.microbatches is not None else microbatch_choices(share, pp=pp)
        )
        for num_microbatches in choices:
            prediction = _predict(
                pp,
                num_microbatches=num_microbatches,
                share=share,
                frozen=frozen,
                cached=cached,
                costs=costs,
                constraints=constraints,
                num_blocks=num_blocks,
                correction=calibration.get(pp, 1.0),
            )
            if prediction is not None:
                weighed.append(prediction)
    weighed.sort(key=lambda p: (p.step_seconds, p.plan.pp, p.plan.num_microbatches))
    return (weighed[0] if weighed else None), tuple(weighed)


def _predict(
    pp: int,
    *,
    num_microbatches: int,
    share: int,
    frozen: int,
    cached: int | None,
    costs: JobCosts,
    constraints: Constraints,
    num_blocks: int,
    correction: float,
) -> Prediction | None:
    """The best cut for this (pp, M); None where the schedule, the batch or the memory does not admit one."""
    if (constraints.schedule == "1f1b" and num_microbatches < pp) or num_microbatches > share:
        return None
    first = first_active(frozen)
    dp = constraints.world_size // pp
    rows = -(-share // num_microbatches)
    known = min(costs.by_rows, key=lambda have: (abs(have - rows), have))
    unit, scale = costs.by_rows[known], rows / known
    step_ns = [round(ns * scale) for ns in unit.step_ns[first:]]
    sends = [round(costs.send_latency_ns + costs.send_ns_per_byte * b * scale) * 2 for b in unit.boundary_bytes[first:]]
    weights = costs.parameter_bytes[first:]
    prefix_bytes = sum(costs.parameter_bytes[:first])
    memory = [
        [
            round(own * (1 + costs.optimizer_factor)) + round(kept * scale) * alive
            for own, kept in zip(weights, unit.activation_bytes[first:])
        ]
        for alive in _microbatches_alive(constraints.schedule, pp=pp, num_microbatches=num_microbatches)
    ]
    limit = None if constraints.memory_limit is None else constraints.memory_limit - prefix_bytes
    if constraints.fixed_cut is not None:
        cut = _kept_cut(constraints.fixed_cut, first=first, num_units=num_blocks + 2)
    else:
        cut = partition(step_ns, num_stages=pp, crossing=sends, memory=memory, memory_limit=limit)
    if cut is None:
        return None
    stages = list(zip((0, *cut), (*cut, len(step_ns))))
    stage_bytes = max(sum(row[a:b]) for row, (a, b) in zip(memory, stages))
    if limit is not None and stage_bytes > limit:
        return None
    uncached_ns = sum(unit.prefix_ns[cached + 1 if cached else 0 : first])
    largest = max(sum(weights[a:b]) for a, b in stages)
    slowest_ns = bottleneck(step_ns, cut, crossing=sends)
    compute_ns = (num_microbatches + pp - 1) * slowest_ns + round(uncached_ns * scale * num_microbatches)
    total_ns = compute_ns + largest * costs.update_ns_per_byte
    if dp > 1:
        total_ns += largest * costs.reduce_ns_per_byte
    total_ns *= correction
    plan = ParallelPlan(
        frozen=frozen,
        pp=pp,
        dp=dp,
        boundaries=tuple(first + c for c in cut),
        num_microbatches=num_microbatches,
        schedule=constraints.schedule,
        cached=cached,
        num_blocks=num_blocks,
    )
    return Prediction(plan=plan, step_seconds=round(total_ns) / 1e9, memory_bytes=prefix_bytes + stage_bytes)


def _microbatches_alive(schedule: str, *, pp: int, num_microbatches: int) -> list[int]:
    """By stage: the most micro-batches whose activations wait for their backward at once."""
    if schedule == "gpipe" and pp > 1:
        return [num_microbatches] * pp
    return [min(num_microbatches, pp - stage) for stage in range(pp)]


def _kept_cut(cut: tuple[int, ...], *, first: int, num_units: int) -> tuple[int, ...] | None:
    """The old boundaries, relative to ``first``, moved right only as far as keeps every stage non-empty."""
    kept: list[int] = []
    for boundary in cut:
        kept.append(max(boundary, (kept[-1] if kept else first) + 1))
    return tuple(b - first for b in kept) if not kept or kept[-1] < num_units else None
