"""The layouts that a plan may have: every pipeline length, schedule and M that the constraints allow.

The search predicts a step of each with its best cut, and the cheapest one gives M.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from pipetransformer.pipe.planner.constraints import Constraints
from pipetransformer.plan import ParallelPlan
from pipetransformer.plan.schedules import why_not
from pipetransformer.plan.units import Numbering


def microbatch_choices(share: int, *, pp: int, fixed: int | None = None) -> tuple[int, ...]:
    """Candidates for M, for a replica with ``share`` rows of the global batch: ``fixed``, or else by pp.

    A plain loop (pp = 1) may split its rows to save memory, or because small micro-batches stay in a CPU's cache. A
    pipeline tries pp, 2 pp and 4 pp. A larger M would save less than a tenth of a step. No micro-batch is empty.
    """
    if fixed is not None:
        return (fixed,)
    candidates = (1, 2, 4, 8) if pp == 1 else (pp, 2 * pp, 4 * pp)
    return tuple(m for m in candidates if m <= share)


def uncut_plans(
    frozen: int, *, cached: int | None, constraints: Constraints, numbering: Numbering
) -> Iterator[ParallelPlan]:
    """All that ``constraints`` allow, each with its leftmost boundaries: one unit in every stage but the last.

    The places of the prefix follow each other in the order of the bytes that they move.
    """
    first_active = max(numbering.behind(frozen), int(constraints.stem_frozen))
    places = _places(first_active, frozen=frozen, cached=cached, constraints=constraints)
    for prefix, pp in product(places, constraints.pipeline_lengths):
        first = 0 if prefix == "in_place" else first_active
        share = constraints.share(pp)
        choices = microbatch_choices(share, pp=pp, fixed=constraints.fixed_microbatches(pp))
        # Note: a plain loop has no schedule, whatever is written in its plan.
        schedules = constraints.schedules if pp > 1 else ((constraints.schedules[0][0], 1),)
        for (schedule, per_rank), num_microbatches in product(schedules, choices):
            if num_microbatches > share or first + pp * per_rank > numbering.num_units:
                continue
            borrows = constraints.shard == "full" and constraints.world_size > pp
            if pp > 1 and schedule == "zero_bubble" and (prefix == "in_place" or borrows):
                continue
            numbers = {"num_microbatches": num_microbatches, "stages_per_rank": per_rank}
            if pp == 1 or why_not(schedule, num_ranks=pp, **numbers) is None:
                yield ParallelPlan(
                    frozen=frozen,
                    pp=pp,
                    dp=constraints.world_size // pp,
                    boundaries=tuple(range(first + 1, first + pp * per_rank)),
                    schedule=schedule,
                    cached=cached,
                    num_blocks=numbering.num_blocks,
                    units_per_block=numbering.units_per_block,
                    stem_frozen=constraints.stem_frozen,
                    prefix=prefix,
                    shard=constraints.shard,
                    **numbers,
                )


def _places(first_active: int, *, frozen: int, cached: int | None, constraints: Constraints) -> Iterator[str]:
    """Where the prefix of such a plan may be."""
    for prefix in constraints.prefixes:
        on_no_device = prefix in ("cached", "streamed")
        if prefix == "replicated" or first_active and (cached == frozen if on_no_device else cached is None):
            yield prefix
