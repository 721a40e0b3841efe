"""What a pipeline over a graph refuses before it begins, on all ranks alike: one that gave up alone would leave the
others waiting."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import torch

from pipetransformer.adapter import MODES, sends_without_gradients
from pipetransformer.errors import UserError
from pipetransformer.graphs.graph.graph import Graph
from pipetransformer.plan.schedules import SCHEDULES, admits

__all__ = ["check_gradients", "check_recomputation", "check_schedule"]


def check_schedule(kind: str, *, num_stages: int, num_ranks: int, num_microbatches: int, stages_per_rank: int) -> None:
    """Raises UserError where the schedule does not run with these numbers; one stage alone needs none."""
    if kind not in SCHEDULES:
        raise UserError(f"kind: {kind} is no schedule; give one of {', '.join(SCHEDULES)}")
    if num_stages == stages_per_rank == 1:
        return
    if not any(_admits(kind, m, num_ranks, stages_per_rank) for m in range(1, num_ranks + 1)):
        allowed = "at least 2 stages" if kind == "interleaved" else "1 stage"
        raise UserError(
            f"stages_per_rank: {stages_per_rank} is not allowed; schedule {kind} has {allowed} a rank, give that or "
            "another kind"
        )
    if num_stages != num_ranks * stages_per_rank:
        raise UserError(
            f"boundaries: {num_stages - 1} cuts make {num_stages} stages; {num_ranks} ranks of {stages_per_rank} "
            f"stages each take {num_ranks * stages_per_rank - 1} cuts"
        )
    if not _admits(kind, num_microbatches, num_ranks, stages_per_rank):
        fewer = [m for m in range(1, num_microbatches) if _admits(kind, m, num_ranks, stages_per_rank)][-1:]
        more = next(m for m in count(num_microbatches + 1) if _admits(kind, m, num_ranks, stages_per_rank))
        raise UserError(
            f"num_microbatches: {num_microbatches} is not allowed; schedule {kind} over {num_ranks} ranks takes "
            f"{' or '.join(map(str, [*fewer, more]))}"
        )


def _admits(kind: str, num_microbatches: int, num_ranks: int, stages_per_rank: int) -> bool:
    return num_microbatches > 0 and admits(
        kind, num_ranks=num_ranks, num_microbatches=num_microbatches, stages_per_rank=stages_per_rank
    )


def check_recomputation(mode: str, graph: Graph) -> None:
    """Raises UserError where ``mode`` is none, or a forward that runs twice would not do the same."""
    if mode not in MODES:
        raise UserError(f"checkpoint: {mode} is not allowed; give one of {', '.join(MODES)}")
    if mode != "never" and graph.program.changing:
        raise UserError(
            f"checkpoint: {mode} would change the buffer {graph.program.changing[0]} twice, which the model changes in "
            "its forward; give never"
        )


def check_gradients(graph: Graph, boundaries: Sequence[int]) -> None:
    """Raises UserError where a cut sends a tensor that has no gradient, and this version of torch cannot."""
    without = next((t.name for cut in boundaries for t in graph.crossing(cut) if not t.requires_grad), None)
    if without is not None and not sends_without_gradients():
        raise UserError(
            f"the cut sends {without}, which has no gradient, and pipelines of torch {torch.__version__} cannot; "
            "update torch or cut elsewhere"
        )
