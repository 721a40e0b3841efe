"""What one rank holds under a plan, and the transition from one plan to the next inside the running job.

close the old layout -> plan the fewest transfers -> move weights and optimizer state by name -> new groups
-> freeze, release what is not needed -> new optimizer (same state), reducer, stage
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from pipetransformer.dp import GradientReducer, Mesh, execute_transfers, plan_transfers
from pipetransformer.dp.optimizer_state import OptimizerState, empty_state, state_keys, take_state
from pipetransformer.engine.executor import Executor, build_executor
from pipetransformer.engine.objective import Objective
from pipetransformer.engine.optim import build_optimizer
from pipetransformer.models import Chain
from pipetransformer.plan import ParallelPlan
from pipetransformer.process.device import synchronize
from pipetransformer.process.world import World

if TYPE_CHECKING:
    from pipetransformer.config import TrainConfig

__all__ = ["Layout", "Move", "Ownership", "initial_ownership", "move"]

Holders = dict[int, frozenset[int]]


@dataclass(slots=True)
class Ownership:
    """Which ranks hold which units; every rank knows it, so that transfers need no negotiation.

    Attributes:
        weights, state: ranks by unit. ``state`` counts optimizer state, active or parked; a unit that was never
            stepped has none.
        parked: this rank's optimizer state of frozen units, kept while the policy may unfreeze.
    """

    weights: Holders
    state: Holders = field(default_factory=dict)
    parked: OptimizerState = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Move:
    """What a transition cost: seconds of the slowest rank, bytes received by all ranks."""

    seconds: float
    num_bytes: int


class Layout:
    """One rank under one plan. ``move`` makes the next; the old one is closed by it.

    Attributes:
        parameters: of the active units that this rank trains, by the model's names, and part_index the part of each:
            0 for the stem, i + 1 for block i.
    """

    def __init__(
        self,
        plan: ParallelPlan,
        *,
        chain: Chain,
        train: TrainConfig,
        world: World,
        objective: Objective,
        mesh: Mesh,
        state: OptimizerState,
        recompute: str,
    ) -> None:
        self.plan = plan
        self.mesh = mesh
        chain.freeze(plan.frozen)
        self.parameters = chain.named_parameters(plan.units_of(world.rank))
        parts = [chain.numbering.part_of(chain.unit_of(name)) for name in self.parameters]
        self.part_index = torch.tensor(parts, device=chain.device)
        self.optimizer = build_optimizer(train, self.parameters, state)
        self.reducer = GradientReducer(self.parameters, group=mesh.dp_group)
        self.executor: Executor = build_executor(
            objective, chain=chain, plan=plan, rank=world.rank, group=mesh.pp_group, recompute=recompute
        )
        self.has_stepped = False

    def state(self) -> OptimizerState:
        """This rank's optimizer state, by parameter name."""
        return take_state(self.optimizer, self.parameters)

    def state_holders(self, ownership: Ownership) -> Holders:
        """The ranks that hold optimizer state of each unit now, parked and active."""
        return {**ownership.state, **(self.plan.ranks_by_unit() if self.has_stepped else {})}

    def forget_state(self) -> None:
        """Throws the optimizer's state away, as if no step had been taken."""
        self.optimizer.state.clear()
        self.has_stepped = False

    def gradients(self) -> list[Tensor]:
        """The local gradients in the order of ``parameters``."""
        return [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]

    def close(self) -> None:
        self.reducer.close()
        self.mesh.close()


def initial_ownership(chain: Chain, world: World) -> Ownership:
    """Every rank builds the whole model alike, so that at first everyone holds everything."""
    everyone = frozenset(range(world.size))
    return Ownership(weights=dict.fromkeys(range(chain.num_units), everyone))


def move(
    old: Layout | None,
    plan: ParallelPlan,
    *,
    ownership: Ownership,
    chain: Chain,
    train: TrainConfig,
    world: World,
    objective: Objective,
    keep_frozen_state: bool,
    state: OptimizerState | None = None,
    recompute: str = "never",
) -> tuple[Layout, Move]:
    """Collective. Takes the job from ``old`` to ``plan``; growing back (unfreezing) is the same code.

    Args:
        ownership: updated in place.
        keep_frozen_state: keep the optimizer state of frozen units for a later unfreezing.
        state: optimizer state that this rank already has (after a resume), instead of ``old``'s.
        recompute: which activations are recomputed, one of ``adapter.MODES``.
    """
    start = perf_counter()
    state = {**ownership.parked, **(state or {})}
    if old is not None:
        ownership.state = old.state_holders(ownership)
        state |= old.state()
        old.close()
    everyone = frozenset(range(world.size))
    active_ranks = plan.ranks_by_unit()
    weights_needed = {u: active_ranks.get(u, everyone) for u in range(plan.num_units)}
    state_needed = {u: ranks for u, ranks in active_ranks.items() if u in ownership.state}

    mine = [u for u in range(plan.num_units) if world.rank in weights_needed[u]]
    chain.materialize(mine)
    names = {u: list(chain.named_parameters([u])) for u in range(plan.num_units)}
    parameters = chain.named_parameters(range(plan.num_units))
    for unit in mine:
        if world.rank in state_needed.get(unit, ()) and world.rank not in ownership.state[unit]:
            for name in names[unit]:
                state[name] = empty_state(train, parameters[name], device=chain.device)

    def weights_of(unit: int) -> Iterator[Tensor]:
        return (parameters[name].data for name in names[unit])

    def state_of(unit: int) -> Iterator[Tensor]:
        return (state[name][key] for name in names[unit] for key in state_keys(train))

    num_bytes = 0
    for held, needed, tensors in (
        (ownership.weights, weights_needed, weights_of),
        (ownership.state, state_needed, state_of),
    ):
        transfers = plan_transfers(held, needed, ranks_per_node=world.local_size)
        num_bytes += execute_transfers(transfers, rank=world.rank, tensors=tensors)

    chain.release(u for u in range(plan.num_units) if u not in mine)
    ownership.weights = weights_needed
    ownership.parked = {}
    for unit in [*ownership.state]:
        if unit in active_ranks:
            ownership.state[unit] = active_ranks[unit]
        elif not keep_frozen_state:
            del ownership.state[unit]
        elif world.rank in ownership.state[unit]:
            ownership.parked |= {name: state[name] for name in names[unit]}
    mesh = Mesh.build(pp=plan.pp, world_size=world.size, timeout_seconds=world.timeout.total_seconds())
    layout = Layout(
        plan,
        chain=chain,
        train=train,
        world=world,
        objective=objective,
        mesh=mesh,
        state=state,
        recompute=recompute,
    )
    synchronize(chain.device)
    figures = torch.tensor([perf_counter() - start, float(num_bytes)], dtype=torch.float64, device=chain.device)
    slowest, total = figures[:1].clone(), figures[1:].clone()
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    dist.all_reduce(total)
    return layout, Move(seconds=float(slowest), num_bytes=int(total))
