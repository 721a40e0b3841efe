"""AutoPipe: the cheapest layout (pp, boundaries, M) for n frozen blocks that fits in memory. A pure function.

Predicted step time of a layout, from measured costs: a pipeline of K stages and M micro-batches takes
(M + K - 1) times its slowest stage (forward + backward + what it sends and receives), then the gradients of the largest
stage are summed over the replicas and its weights updated. The prefix runs in front of stage 0 where it is not cached.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipetransformer.pipe.costs import JobCosts
from pipetransformer.pipe.partition import partition
from pipetransformer.plan import ParallelPlan

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
    """Candidate M for a replica's share of ``share`` rows, best first where time says nothing.

    A plain loop (pp = 1) splits its share only where memory asks for it. A pipeline tries pp, 2 pp and 4 pp: more gains
    less than a tenth of the step, and each micro-batch keeps at least one row.
    """
    candidates = (1, 2, 4, 8, 16) if pp == 1 else (pp, 2 * pp, 4 * pp)
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
    first_active = frozen + 1 if frozen else 0
    num_units = num_blocks + 2
    weighed: list[Prediction] = []
    for pp in constraints.pipeline_lengths:
        if pp > num_units - first_active:
            continue
        dp = constraints.world_size // pp
        share = -(-constraints.global_batch_size // dp)
        choices: Sequence[int] = (
            (constraints.microbatches,)
            if constraints.microbatches is not None
            else microbatch_choices(share, pp=pp)
        )
        for num_microbatches in choices:
            prediction = _predict(
                frozen, cached, pp, dp, num_microbatches, share, costs, constraints, num_blocks, calibration
            )
            if prediction is not None:
                weighed.append(prediction)
                if pp == 1:
                    break
    weighed.sort(key=lambda p: (p.step_seconds, p.plan.pp, p.plan.num_microbatches))
    return (weighed[0] if weighed else None), tuple(weighed)


def _predict(
    frozen: int,
    cached: int | None,
    pp: int,
    dp: int,
    num_microbatches: int,
    share: int,
    costs: JobCosts,
    constraints: Constraints,
    num_blocks: int,
    calibration: Mapping[int, float],
) -> Prediction | None:
    if (constraints.schedule == "1f1b" and num_microbatches < pp) or num_microbatches > share:
        return None
    first = frozen + 1 if frozen else 0
    rows = max(1, share // num_microbatches)
    known = min(costs.by_rows, key=lambda have: (abs(have - rows), have))
    unit, scale = costs.by_rows[known], rows / known
    step_ns = [round(ns * scale) for ns in unit.step_ns[first:]]
    sends = [round(costs.send_latency_ns + costs.send_ns_per_byte * b * scale) * 2 for b in unit.boundary_bytes[first:]]
    weights = costs.parameter_bytes[first:]
    activations = [round(b * scale) for b in unit.activation_bytes[first:]]
    prefix_bytes = sum(costs.parameter_bytes[:first])

    def in_flight(stage: int) -> int:
        return num_microbatches if constraints.schedule == "gpipe" and pp > 1 else min(num_microbatches, pp - stage)

    def stage_bytes(start: int, stop: int, stage: int) -> int:
        own = sum(weights[start:stop])
        return round(own * (1 + costs.optimizer_factor)) + sum(activations[start:stop]) * in_flight(stage)

    if constraints.fixed_cut is not None:
        cut: tuple[int, ...] | None = _kept_cut(constraints.fixed_cut, first=first, num_units=num_blocks + 2)
    else:
        limit, memory, limits = constraints.memory_limit, None, None
        if limit is not None:
            # Exact for 1F1B's deepest stage and GPipe alike: every unit is counted with the most micro-batches that
            # any stage keeps alive, so a partition that passes here passes below.
            memory = [stage_bytes(i, i + 1, 0) for i in range(len(weights))]
            limits = [limit - prefix_bytes] * pp
        cut = partition(step_ns, num_stages=pp, crossing=sends, memory=memory, memory_limits=limits)
    if cut is None:
        return None
    cuts = (0, *cut, len(step_ns))
    stages = list(zip(cuts, cuts[1:]))
    slowest = max(
        sum(step_ns[a:b]) + (sends[a - 1] if a else 0) + (sends[b - 1] if b < len(step_ns) else 0) for a, b in stages
    )
    memory_bytes = prefix_bytes + max(stage_bytes(a, b, stage) for stage, (a, b) in enumerate(stages))
    if constraints.memory_limit is not None and memory_bytes > constraints.memory_limit:
        return None
    uncached = unit.forward_ns[cached + 1 if cached else 0 : first]
    largest = max(sum(weights[a:b]) for a, b in stages)
    compute = (num_microbatches + pp - 1) * slowest + round(sum(uncached) * scale * num_microbatches)
    total = compute * calibration.get(pp, 1.0) + largest * costs.update_ns_per_byte
    if dp > 1:
        total += largest * costs.reduce_ns_per_byte
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
    return Prediction(plan=plan, step_seconds=round(total) / 1e9, memory_bytes=memory_bytes)


def _kept_cut(cut: tuple[int, ...], *, first: int, num_units: int) -> tuple[int, ...] | None:
    """The old boundaries, relative to ``first``, moved right only as far as keeps every stage non-empty."""
    kept: list[int] = []
    for boundary in cut:
        kept.append(max(boundary, (kept[-1] if kept else first) + 1))
    return tuple(b - first for b in kept) if not kept or kept[-1] < num_units else None
