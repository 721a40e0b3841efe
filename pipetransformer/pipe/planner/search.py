"""The search for the fastest layout (pp, boundaries, M, schedule) for n frozen blocks that fits in memory.

It is a pure function. For each pipeline length, schedule and M, the exact partitioner makes the cut, and the simulator
of the schedule predicts the time of a step from measured costs: forwards, backwards, sends, the sum of gradients over
the replicas, and the update of weights. The uncached part of the prefix runs in front of stage 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from pipetransformer.pipe.planner.calibration import AS_SIMULATED, Line
from pipetransformer.pipe.planner.constraints import Constraints
from pipetransformer.pipe.planner.costs import JobCosts, UnitCosts, total
from pipetransformer.pipe.planner.memory import (
    advance_bytes,
    cut_bytes,
    prefix_bytes,
    rank_bytes,
    uneven_bytes,
    unit_bytes,
    widest_boundary,
    works_of,
)
from pipetransformer.pipe.planner.microbatches import uncut_plans
from pipetransformer.pipe.planner.partition import partition
from pipetransformer.pipe.planner.step_simulator import StageCosts, Timeline, simulate
from pipetransformer.plan import ParallelPlan
from pipetransformer.plan.schedules import peak_alive
from pipetransformer.plan.units import Numbering


@dataclass(frozen=True, slots=True)
class Prediction:
    """A plan with its predicted figures.

    Attributes:
        plan: the plan.
        step_seconds: seconds of a step on a full global batch.
        memory_bytes: the most bytes in use on each rank of a pipeline [pp].
        bubble: the share of a pipeline's time in which its ranks wait for each other, 0 to 1.
    """

    plan: ParallelPlan
    step_seconds: float
    memory_bytes: tuple[int, ...]
    bubble: float


def best_plans(
    frozen: int,
    *,
    cached: int | None,
    costs: JobCosts,
    constraints: Constraints,
    num_blocks: int,
    lines: Mapping[int, Line],
) -> tuple[Prediction, ...]:
    """The best plans for ``frozen`` blocks, one for each pipeline length, schedule and M that fits, fastest first.

    Args:
        cached: boundary of the cache, in blocks; None for a prefix computed in the step.
        costs: costs of blocks, or of their halves.
        lines: real seconds of a step from simulated ones, by pp; the same where there is none.
    """
    numbering = Numbering.of(num_blocks=num_blocks, num_units=len(costs.parameter_bytes))
    weighed: list[Prediction] = []
    limit, found = constraints.memory_limit, set[tuple[int, str, int]]()
    for plan in uncut_plans(frozen, cached=cached, constraints=constraints, numbering=numbering):
        layout = (plan.pp, plan.schedule, plan.num_microbatches)
        for boundaries in _cuts(plan, costs=costs, constraints=constraints) if layout not in found else ():
            prediction = predict(
                replace(plan, boundaries=boundaries),
                costs=costs,
                global_batch_size=constraints.global_batch_size,
                line=lines.get(plan.pp, AS_SIMULATED),
            )
            if limit is None or max(prediction.memory_bytes) <= limit:
                weighed.append(prediction)
                found.add(layout)
                break
    return tuple(sorted(weighed, key=lambda p: (p.step_seconds, p.plan.pp, p.plan.num_microbatches)))


def predict(plan: ParallelPlan, *, costs: JobCosts, global_batch_size: int, line: Line = AS_SIMULATED) -> Prediction:
    """The predicted figures of a full step of ``plan``.

    Args:
        line: real seconds of a step from simulated ones, for plans of this pp.
    """
    unit = unit_costs(plan, costs, global_batch_size=global_batch_size)
    timeline = simulate_plan(plan, costs=costs, global_batch_size=global_batch_size)
    units = unit_bytes(plan, unit, costs)
    before, widest = prefix_bytes(plan, unit, costs), widest_boundary(units[plan.first_staged :])
    frozen_bytes = _frozen_bytes(plan, costs)
    advance = advance_bytes(plan, unit, costs, rows=-(-global_batch_size // plan.world_size))
    memory = []
    for rank, work in enumerate(works_of(plan, costs)):
        stages = {stage: [units[u] for u in plan.stage_units(stage)] for stage in plan.stages_of(rank)}
        in_step = rank_bytes(work, stages, before=0 if rank else before, widest=widest)
        lasting = sum(unit.lasting for stage in stages.values() for unit in stage)
        uneven = uneven_bytes(plan, costs, place=rank)
        memory.append(frozen_bytes + max(in_step, lasting + advance) + uneven)
    return Prediction(plan, line.ns(timeline.total) / 1e9, tuple(memory), timeline.bubble)


def simulate_plan(plan: ParallelPlan, *, costs: JobCosts, global_batch_size: int) -> Timeline:
    """The simulated step of one pipeline of ``plan``; all replicas are alike."""
    unit = unit_costs(plan, costs, global_batch_size=global_batch_size)
    share = costs.recomputed_share(plan.num_microbatches)  # each micro-batch takes the mean
    stages = []
    for stage in range(plan.num_stages):
        units = plan.stage_units(stage)
        active = range(max(units.start, min(plan.first_active, units.stop)), units.stop)
        frozen = range(units.start, active.start)
        received = unit.boundary_bytes[units.start - 1] if stage else 0
        lent, given = _moved_ns(plan, costs, active) if plan.shard == "full" else (0, 0)
        backward = total(unit.backward_ns, active) + round(total(unit.recompute_ns, active) * share)
        # The first stage needs no gradients of inputs: the second half of a split backward is all of it. A backward
        # with recomputation is not split (see ``adapter/stage.py``).
        apart = total(unit.weight_ns, active) if costs.recompute == "never" else 0
        stages.append(
            StageCosts(
                forward=total(unit.prefix_ns, frozen) + total(unit.forward_ns, active) + lent,
                backward=backward + lent + given,  # the weights once more
                weight=apart if stage else backward,
                send=costs.send.bytes_ns(unit.boundary_bytes[units.stop - 1]),
                send_back=costs.send.bytes_ns(received),
            )
        )
    of_units = costs.summed_bytes if costs.summed_bytes is not None and not plan.shares_state else costs.gradient_bytes
    gradients = [sum(of_units[unit] for unit in plan.units_of(rank)) for rank in range(plan.pp)]
    sums = [costs.reduction_ns(num_bytes, num_replicas=plan.dp) for num_bytes in gradients]
    updates = [round(most_updated(plan, costs, place=rank) * costs.update_ns_per_byte) for rank in range(plan.pp)]
    if plan.shares_state and plan.shard == "full":
        sums = [0] * plan.pp
    elif plan.shares_state:  # half of the moves is the sum on one replica, the other brings its new weights to all
        updates = [update + whole // 2 for update, whole in zip(updates, sums)]
        sums = [whole - whole // 2 for whole in sums]
    computed = range(plan.first_computed, plan.first_staged)
    return simulate(
        plan.run_schedule,
        stages,
        num_ranks=plan.pp,
        num_microbatches=plan.num_microbatches,
        latency=costs.send.latency_ns,
        first=total(unit.prefix_ns, computed) * plan.num_microbatches,
        reduce=sums,
        update=updates,
        overlap=costs.overlap,
        contention=costs.busy_factors(plan.pp) if plan.pp > 1 else None,
        receives_late=costs.receives_late,
    )


def _frozen_bytes(plan: ParallelPlan, costs: JobCosts) -> int:
    replicas = plan.dp if plan.shares_state else 1
    return costs.frozen_bytes(plan.first_active, keeps_prefix=plan.keeps_prefix, replicas=replicas)


def _moved_ns(plan: ParallelPlan, costs: JobCosts, units: range) -> tuple[int, int]:
    """Nanoseconds in which the owners lend the weights of ``units``, and in which they are given the gradients: half of
    those of a sum over the replicas, which moves both ways."""
    lent, given = (
        sum(costs.reduction_ns(column[unit], num_replicas=plan.dp) // 2 for unit in units)
        for column in (costs.parameter_bytes, costs.gradient_bytes)
    )
    return lent, given


def most_updated(plan: ParallelPlan, costs: JobCosts, *, place: int) -> int:
    """Bytes of the weights that the replica with most of them updates at a place of the pipeline."""
    by_replica = plan.units_of_replicas(place) if plan.shares_state else [plan.units_of(place)]
    return max(sum(costs.gradient_bytes[unit] for unit in units) for units in by_replica)


def unit_costs(plan: ParallelPlan, costs: JobCosts, *, global_batch_size: int) -> UnitCosts:
    """The unit costs of the plan's micro-batches."""
    share = -(-global_batch_size // plan.dp)
    return costs.unit_costs(-(-share // plan.num_microbatches))


def _cuts(plan: ParallelPlan, *, costs: JobCosts, constraints: Constraints) -> list[tuple[int, ...]]:
    """Cuts (boundaries) of ``plan`` to be tried in this order until one fits in memory.

    A fixed cut moves to the right only where a stage would be empty. Else, with one stage per rank there is one cut:
    the fastest that fits. With several stages per rank, the memory limit holds for the stages of a rank together, which
    the partitioner cannot check. So there are two: the fastest cut without a limit, then the cut whose largest stage is
    smallest. A faster cut between these two may be missed.
    """
    if constraints.fixed_cut is not None:
        return [tuple(map(max, constraints.fixed_cut, plan.boundaries))]
    first = plan.first_staged
    unit = unit_costs(plan, costs, global_batch_size=constraints.global_batch_size)
    share = costs.recomputed_share(plan.num_microbatches)
    active = slice(plan.first_active, None)
    of_active = [step + round(again * share) for step, again in zip(unit.step_ns[active], unit.recompute_ns[active])]
    fastest = partial(
        partition,
        [*unit.prefix_ns[first : plan.first_active], *of_active],
        num_stages=plan.num_stages,
        crossing=[2 * costs.send.ns(num_bytes) for num_bytes in unit.boundary_bytes[first:]],
    )
    units = unit_bytes(plan, unit, costs)[first:]
    lasting = _frozen_bytes(plan, costs)
    if constraints.memory_limit is None:
        cuts = [fastest()]
    elif (limit := constraints.memory_limit - lasting) < 0:
        return []  # even what the prefix keeps does not fit
    elif plan.stages_per_rank == 1:
        memory, largest = cut_bytes(works_of(plan, costs), units, before=prefix_bytes(plan, unit, costs), limit=limit)
        cuts = [fastest(memory=memory, largest=largest, memory_limit=limit)]
        if cuts[0] is not None and plan.shares_state:  # which shares out evenly; once more for what it shares unevenly
            cut = replace(plan, boundaries=tuple(first + boundary for boundary in cuts[0]))
            uneven = max(uneven_bytes(cut, costs, place=place) for place in range(plan.pp))
            cuts.append(fastest(memory=memory, largest=largest, memory_limit=limit - uneven))
    else:
        alive = peak_alive(plan.orders()[0]) / plan.stages_per_rank
        sizes = [u.lasting + u.gradients + round(alive * u.kept) for u in units]
        cuts = [fastest(), partition(sizes, num_stages=plan.num_stages)]
    return [tuple(first + boundary for boundary in cut) for cut in cuts if cut is not None]
