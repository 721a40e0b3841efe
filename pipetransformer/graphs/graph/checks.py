"""Checks before a pipeline over a graph begins, on all ranks alike.

One rank that gave up alone would leave the others waiting.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pipetransformer.adapter import MODES, sends_without_gradients
from pipetransformer.errors import UserError
from pipetransformer.graphs.graph.graph import Graph
from pipetransformer.plan.schedules import SCHEDULES, why_not


def check_schedule(kind: str, *, num_stages: int, num_ranks: int, num_microbatches: int, stages_per_rank: int) -> None:
    """Refuses a schedule that does not run with these numbers; one stage alone needs none. Raises UserError."""
    if kind not in SCHEDULES:
        raise UserError(f"kind: {kind} is no schedule; give one of {', '.join(SCHEDULES)}")
    if num_stages == stages_per_rank == 1:
        return
    if (reason := why_not(kind, num_ranks=1, num_microbatches=1, stages_per_rank=stages_per_rank)) is not None:
        raise UserError(
            f"stages_per_rank: {stages_per_rank} is not allowed; schedule {kind} {reason}, give that or another kind"
        )
    if num_stages != num_ranks * stages_per_rank:
        raise UserError(
            f"boundaries: {num_stages - 1} cuts make {num_stages} stages; {num_ranks} ranks of {stages_per_rank} "
            f"stages each take {num_ranks * stages_per_rank - 1} cuts"
        )
    numbers = {"num_ranks": num_ranks, "num_microbatches": num_microbatches, "stages_per_rank": stages_per_rank}
    if (reason := why_not(kind, **numbers)) is not None:
        raise UserError(f"num_microbatches: {num_microbatches} is not allowed; schedule {kind} {reason}")


def check_recomputation(mode: str, graph: Graph) -> None:
    """Refuses an unknown ``mode``, and one that repeats a forward with changes of its own. Raises UserError."""
    if mode not in MODES:
        raise UserError(f"recompute: {mode} is not allowed; give one of {', '.join(MODES)}")
    if mode != "never" and graph.program.changing:
        raise UserError(
            f"recompute: {mode} would change the buffer {graph.program.changing[0]} twice, which the model changes in "
            "its forward; give never"
        )


def check_gradients(graph: Graph, boundaries: Sequence[int]) -> None:
    """Refuses a cut that sends a tensor without a gradient where this version of torch cannot. Raises UserError."""
    without = next((t.name for cut in boundaries for t in graph.crossing(cut) if not t.requires_grad), None)
    if without is not None and not sends_without_gradients():
        raise UserError(
            f"the cut sends {without}, which has no gradient, and pipelines of torch {torch.__version__} cannot; "
            "update torch or cut elsewhere"
        )
