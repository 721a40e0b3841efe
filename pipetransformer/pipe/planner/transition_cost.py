"""The predicted cost of a transition: pure, for the choice of a plan and for simulated runs."""

from __future__ import annotations

from math import lcm

from pipetransformer.pipe.planner.costs import JobCosts
from pipetransformer.plan import ParallelPlan


def transition_bytes(old: ParallelPlan, new: ParallelPlan, *, costs: JobCosts) -> int:
    """The most bytes that a rank receives: weights that it does not hold, and optimizer state of units new to it.

    Weights of the prefix go to every rank, for good or for the advance pass, unless they stay in stages. The places of
    ranks under the two plans repeat after lcm(old.pp, new.pp) ranks, so that only these are looked at; all of them
    where replicas share out.
    """
    if old.shares_state or new.shares_state:
        return _most_received(old, new, costs=costs)
    moments = costs.optimizer_factor - 1.0
    most = 0
    for rank in range(lcm(old.pp, new.pp)):
        trained, trains = set(old.units_of(rank)), set(new.units_of(rank))
        held, holds = (_held(plan, rank) for plan in (old, new))
        if _advances(old, new):
            holds |= set(range(new.first_active))
        weights = sum(_weight_bytes(unit, new, costs) for unit in holds - held)
        state = sum(costs.gradient_bytes[unit] for unit in trains - trained if unit >= old.first_active)
        most = max(most, weights + round(moments * state))
    return most


def _most_received(old: ParallelPlan, new: ParallelPlan, *, costs: JobCosts) -> int:
    """The same, unit by unit, from the ranks that hold it and that update it."""
    received, everyone = [0] * new.world_size, range(new.world_size)
    borrowed = dict.fromkeys(range(new.first_active), everyone) if _advances(old, new) else {}
    held, state = old.holders(), old.state_ranks()
    for unit, ranks in {**new.holders(), **borrowed}.items():
        for rank in ranks:
            received[rank] += 0 if rank in held.get(unit, ()) else _weight_bytes(unit, new, costs)
    for unit, ranks in new.state_ranks().items():
        moments = round((costs.optimizer_factor - 1.0) * costs.gradient_bytes[unit])
        for rank in ranks if unit in state else ():
            received[rank] += 0 if rank in state[unit] else moments
    return max(received)


def _weight_bytes(unit: int, plan: ParallelPlan, costs: JobCosts) -> int:
    return (costs.kept_bytes if unit < plan.first_active else costs.parameter_bytes)[unit]


def _advances(old: ParallelPlan, new: ParallelPlan) -> bool:
    """Whether the weights of the prefix go to every rank for an advance pass."""
    return new.prefix in ("cached", "streamed") and (old.cached, old.frozen) != (new.cached, new.frozen)


def _held(plan: ParallelPlan, rank: int) -> set[int]:
    """Units whose weights a rank has."""
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
