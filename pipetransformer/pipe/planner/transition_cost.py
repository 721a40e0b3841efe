"""The predicted cost of a transition: pure, for the choice of a plan and for simulated runs."""

from __future__ import annotations

from math import lcm

from pipetransformer.pipe.planner.costs import JobCosts
from pipetransformer.plan import ParallelPlan


def transition_bytes(old: ParallelPlan, new: ParallelPlan, *, costs: JobCosts) -> int:
    """The most bytes that a rank receives: weights that it does not hold, and optimizer state of units new to it.

    Weights of the prefix go to every rank, for good or for the advance pass, unless they stay in stages. The places of
    ranks under the two plans repeat after lcm(old.pp, new.pp) ranks, so that only these are looked at, also where
    replicas share out: a few of them, whose state counts as if each had all of its stage.
    """
    moments = costs.optimizer_factor - 1.0
    most = 0
    for rank in range(lcm(old.pp, new.pp)):
        trained, trains = set(old.units_of(rank)), set(new.units_of(rank))
        held, holds = (_held(plan, rank) for plan in (old, new))
        if new.prefix in ("cached", "streamed") and (old.cached, old.frozen) != (new.cached, new.frozen):
            holds |= set(range(new.first_active))
        weights = sum(costs.parameter_bytes[unit] for unit in holds - held)
        state = sum(costs.parameter_bytes[unit] for unit in trains - trained if unit >= old.first_active)
        most = max(most, weights + round(moments * state))
    return most


def _held(plan: ParallelPlan, rank: int) -> set[int]:
    """Units whose weights a rank has."""
    if plan.shares_state and plan.shard == "full":
        return {unit for unit, ranks in plan.holders().items() if rank in ranks}
    prefix = range(plan.first_active if plan.keeps_prefix else 0)
    return {*prefix, *(unit for units in plan.staged_units_of(rank) for unit in units)}


def transition_seconds(old: ParallelPlan, new: ParallelPlan, *, costs: JobCosts, fixed_seconds: float = 0.0) -> float:
    """Seconds from the last step of ``old`` to the first step of ``new``, without the advance pass of the cache.

    A pipeline never spans two nodes, so that every missing unit comes over a link inside the node.

    Args:
        fixed_seconds: seconds of any transition: groups, stages, optimizer.
    """
    if old == new:
        return 0.0
    return fixed_seconds + costs.send.ns(transition_bytes(old, new, costs=costs)) / 1e9
