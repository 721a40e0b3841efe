"""What a change of plans costs: pure, for the choice of a plan and for runs that are simulated."""

from __future__ import annotations

from math import lcm

from pipetransformer.pipe.planner.costs import JobCosts
from pipetransformer.plan import ParallelPlan

__all__ = ["transition_bytes", "transition_seconds"]


def transition_bytes(old: ParallelPlan, new: ParallelPlan, *, costs: JobCosts) -> int:
    """The most bytes that a rank receives: weights that it did not hold, and the optimizer state of those it trains.

    The pattern of places repeats with both lengths, so that one such group of ranks tells for all. Weights of the
    prefix go to every rank.
    """
    moments = costs.optimizer_factor - 1.0
    most = 0
    for rank in range(lcm(old.pp, new.pp)):
        trained, trains = set(old.units_of(rank)), set(new.units_of(rank))
        held = trained | set(range(old.first_active))
        holds = trains | set(range(new.first_active))
        weights = sum(costs.parameter_bytes[unit] for unit in holds - held)
        state = sum(costs.parameter_bytes[unit] for unit in trains - trained if unit >= old.first_active)
        most = max(most, weights + round(moments * state))
    return most


def transition_seconds(old: ParallelPlan, new: ParallelPlan, *, costs: JobCosts, fixed_seconds: float = 0.0) -> float:
    """From the last step of ``old`` to the first of ``new``, without a cache's advance.

    A node holds whole pipelines, so that what a rank lacks comes over a link inside.

    Args:
        fixed_seconds: what any transition takes: groups, stages, optimizer.
    """
    if old == new:
        return 0.0
    return fixed_seconds + costs.send.ns(transition_bytes(old, new, costs=costs)) / 1e9
