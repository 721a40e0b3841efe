"""The lines that a run prints of its decisions, as text."""

from __future__ import annotations

from collections.abc import Sequence

from pipetransformer.freeze import Verdict, transfer
from pipetransformer.pipe.measure.static_layouts import StaticLayouts

__all__ = ["of_layouts", "of_probe", "of_verdict"]


def of_layouts(layouts: StaticLayouts) -> str:
    """The static layouts that were timed, and the best."""
    told = ", ".join(
        f"pp {pp} x dp {plan.dp} (M {plan.num_microbatches}) {layouts.mean_seconds[pp] * 1e3:.0f} ms"
        for pp, plan in layouts.plans.items()
    )
    rounds = [f"{seconds * 1e3:.0f}" for seconds in layouts.rounds]
    most_common = f"its steps of the most common size took {', '.join(rounds)} ms"
    left_out = f"; not timed, to save time: pp {', '.join(map(str, layouts.left_out))}" if layouts.left_out else ""
    best = f"best is pp {layouts.best_pp}, {most_common}"
    return f"static layouts, a full step of mean length: {told}; {best}{left_out}"


def of_probe(scores: Sequence[float] | None, *, free: int, seconds: float) -> str:
    """The scores of the linear probe at every boundary, and the number of blocks to start with."""
    if scores is None:
        return "linear probe: there is none for questions, whose labels are positions"
    each = " ".join(f"{score:.2f}" for score in scores)
    advice = f"start with {free} of {len(scores) - 1} blocks frozen" if free else "do not freeze here"
    return (
        f"linear probe: a linear head behind the stem and each block explains {each} of the labels' variance; the "
        f"blocks compute {transfer(scores):.2f} of what the stem leaves open: {advice} ({seconds:.1f} s)"
    )


def of_verdict(verdict: Verdict) -> str:
    """The guard's answer to a tentative freeze."""
    what = "undone" if verdict.undone else "kept"
    return (
        f"step {verdict.step}: the freeze is {what}: loss of the samples set aside {verdict.loss:.4f}, "
        f"predicted {verdict.predicted:.4f} ± {verdict.error:.4f}"
    )
