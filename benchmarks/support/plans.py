"""Plans for layouts that are timed as they are."""

from __future__ import annotations

from pipetransformer.plan import ParallelPlan

__all__ = ["even_plan"]


def even_plan(pp: int, *, num_ranks: int, num_blocks: int, num_microbatches: int) -> ParallelPlan:
    """Nothing frozen, stages of as many units each as can be."""
    boundaries = tuple(round(stage * (num_blocks + 2) / pp) for stage in range(1, pp))
    return ParallelPlan(0, pp, num_ranks // pp, boundaries, num_microbatches, "1f1b", None, num_blocks)
