"""The micro-batches that a plan may have: every pipeline length, schedule and M that the constraints allow.

The search predicts a step of each with its best cut, and the cheapest one gives M.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

from pipetransformer.pipe.planner.constraints import Constraints
from pipetransformer.plan.schedules import Work, orders, why_not

PLAIN = "1f1b"
"""The schedule of a plain loop: the backward of each micro-batch follows its forward."""


def microbatch_choices(share: int, *, pp: int) -> tuple[int, ...]:
    """Candidates for M, for a replica with ``share`` rows of the global batch. No micro-batch is empty.

    A plain loop (pp = 1) may split its rows to save memory, or because small micro-batches stay in a CPU's cache. A
    pipeline tries pp, 2 pp and 4 pp. A larger M would save less than a tenth of a step.
    """
    candidates = (1, 2, 4, 8) if pp == 1 else (pp, 2 * pp, 4 * pp)
    return tuple(m for m in candidates if m <= share)


class Shape(NamedTuple):
    """A plan without its cut; ``share`` is the number of rows of a replica."""

    pp: int
    schedule: str
    stages_per_rank: int
    num_microbatches: int
    share: int

    @property
    def orders(self) -> list[list[Work]]:
        return orders_of(self.schedule, self.pp, self.num_microbatches, self.stages_per_rank)


def shapes(constraints: Constraints, *, num_active: int) -> Iterator[Shape]:
    """All that ``constraints`` allow with so many units that train."""
    for pp in constraints.pipeline_lengths:
        share = -(-constraints.global_batch_size // (constraints.world_size // pp))
        fixed = constraints.num_microbatches
        choices: Sequence[int] = microbatch_choices(share, pp=pp) if fixed is None else (fixed,)
        # Note: a plain loop has no schedule, whatever is written in its plan.
        schedules = constraints.schedules if pp > 1 else ((constraints.schedules[0][0], 1),)
        for (schedule, per_rank), num_microbatches in product(schedules, choices):
            reason = why_not(
                schedule if pp > 1 else PLAIN,
                num_ranks=pp,
                num_microbatches=num_microbatches,
                stages_per_rank=per_rank,
            )
            if reason is None and pp * per_rank <= num_active and num_microbatches <= share:
                yield Shape(pp, schedule, per_rank, num_microbatches, share)


def orders_of(schedule: str, pp: int, num_microbatches: int, stages_per_rank: int) -> list[list[Work]]:
    """The work of each rank of one pipeline, in order."""
    return orders(
        schedule if pp > 1 else PLAIN,
        num_ranks=pp,
        num_microbatches=num_microbatches,
        stages_per_rank=stages_per_rank,
    )
