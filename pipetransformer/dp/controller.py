"""AutoDP: who holds what. It moves weights and optimizer state to where a plan needs them, and re-meshes the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from pipetransformer.dp.mesh import Mesh
from pipetransformer.dp.optimizer_state import OptimizerState, empty_state, state_keys
from pipetransformer.dp.transfer import execute_transfers, plan_transfers
from pipetransformer.models import Chain
from pipetransformer.plan import ParallelPlan
from pipetransformer.process.world import World

if TYPE_CHECKING:
    from pipetransformer.config import Config, TrainConfig

__all__ = ["Arrival", "AutoDP"]

Holders = dict[int, frozenset[int]]
"""Ranks by unit."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A rank where a new plan wants it.

    Attributes:
        mesh: the groups of the plan.
        state: optimizer state by parameter name; nothing for parameters that were never stepped.
        num_bytes: bytes that this rank received.
    """

    mesh: Mesh
    state: OptimizerState
    num_bytes: int


class AutoDP:
    """The same ranks under one plan after the other; growing back (unfreezing) is the same move.

    Every rank knows who holds what, so that transfers need no negotiation.

    Attributes:
        weights: ranks that hold the weights of each unit; at first all, because every rank builds the whole model.
        parked: this rank's optimizer state of frozen units, kept while they may unfreeze.

    Args:
        keeps_frozen_state: keep the optimizer state of frozen units for a later unfreezing.
    """

    def __init__(self, train: TrainConfig, *, chain: Chain, world: World, keeps_frozen_state: bool) -> None:
        self._train, self._chain, self._world = train, chain, world
        self._keeps_frozen_state = keeps_frozen_state
        self._mesh: Mesh | None = None
        self.forget()

    @classmethod
    def of(cls, config: Config, *, chain: Chain, world: World, keeps_frozen_state: bool) -> AutoDP:
        return cls(config.train, chain=chain, world=world, keeps_frozen_state=keeps_frozen_state)

    def forget(self) -> None:
        """Back to the start, as before a checkpoint is read: every rank has room for all units, and no optimizer
        state."""
        everyone = frozenset(range(self._world.size))
        self._chain.materialize(range(self._chain.num_units))
        self.weights: Holders = dict.fromkeys(range(self._chain.num_units), everyone)
        self._state: Holders = {}
        self.parked: OptimizerState = {}

    def restore(self, state_holders: Mapping[int, frozenset[int]]) -> OptimizerState:
        """Takes the holders of optimizer state from a checkpoint.

        Returns:
            Room for this rank's, to be filled from the checkpoint and given to the next ``enter``.
        """
        self._state = dict(state_holders)
        mine = [unit for unit, ranks in state_holders.items() if self._world.rank in ranks]
        return {
            name: empty_state(self._train, parameter, device=self._chain.device)
            for name, parameter in self._chain.named_parameters(mine).items()
        }

    def state_holders(self, active: ParallelPlan | None) -> Holders:
        """Ranks that hold optimizer state of each unit, parked and active; a unit that was never stepped has none.

        Args:
            active: the plan whose units the optimizers at work have stepped; None before the first step.
        """
        return {**self._state, **(active.ranks_by_unit() if active is not None else {})}

    def enter(self, plan: ParallelPlan, *, state: OptimizerState, stepped: ParallelPlan | None) -> Arrival:
        """Collective. Takes this rank from where it is to ``plan``.

        Args:
            state: its optimizer state now, by parameter name: of the plan that it leaves, or of a checkpoint.
            stepped: the plan that it leaves, if any step was taken under it.
        """
        self.close()
        self._state = self.state_holders(stepped)
        state = {**self.parked, **state}
        num_bytes = self._move(plan, state)
        active = plan.ranks_by_unit()
        self.parked = {}
        for unit in [*self._state]:
            if unit in active:
                self._state[unit] = active[unit]
            elif not self._keeps_frozen_state:
                del self._state[unit]
            elif self._world.rank in self._state[unit]:
                self.parked |= {name: state[name] for name in self._chain.named_parameters([unit])}
        timeout = self._world.timeout.total_seconds()
        self._mesh = Mesh.build(pp=plan.pp, world_size=self._world.size, timeout_seconds=timeout)
        return Arrival(self._mesh, state, num_bytes)

    def close(self) -> None:
        """Frees the groups. Collective in effect: no rank may still use them."""
        if self._mesh is not None:
            self._mesh.close()
            self._mesh = None

    def _move(self, plan: ParallelPlan, state: OptimizerState) -> int:
        """Brings the units that this rank lacks, and gives back the memory of those that it no longer needs.

        Weights of the prefix go to every rank. ``state`` is filled in place.
        """
        chain, rank, units = self._chain, self._world.rank, range(plan.num_units)
        everyone, active = frozenset(range(self._world.size)), plan.ranks_by_unit()
        needed = {unit: active.get(unit, everyone) for unit in units}
        state_needed = {unit: ranks for unit, ranks in active.items() if unit in self._state}
        mine = [unit for unit in units if rank in needed[unit]]
        chain.materialize(mine)
        names = {unit: list(chain.named_parameters([unit])) for unit in units}
        parameters = chain.named_parameters(units)
        for unit in mine:
            if rank in state_needed.get(unit, ()) and rank not in self._state[unit]:
                for name in names[unit]:
                    state[name] = empty_state(self._train, parameters[name], device=chain.device)

        def weights_of(unit: int) -> Iterator[Tensor]:
            return (parameters[name].data for name in names[unit])

        def state_of(unit: int) -> Iterator[Tensor]:
            return (state[name][key] for name in names[unit] for key in state_keys(self._train))

        num_bytes = 0
        for held, wanted, tensors in ((self.weights, needed, weights_of), (self._state, state_needed, state_of)):
            transfers = plan_transfers(held, wanted, ranks_per_node=self._world.local_size)
            num_bytes += execute_transfers(transfers, rank=rank, tensors=tensors)
        chain.release(unit for unit in units if unit not in mine)
        self.weights = needed
        return num_bytes
