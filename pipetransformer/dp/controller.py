"""AutoDP: the holders of every unit. It moves weights and optimizer state to the ranks of a new plan, and makes the
plan's process groups where pp changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from pipetransformer.config import Config
from pipetransformer.dp.mesh import Mesh
from pipetransformer.dp.optimizer_state import OptimizerState, empty_state, state_keys
from pipetransformer.dp.transfer import Holders, execute_transfers, transfers_of
from pipetransformer.models import Chain
from pipetransformer.plan import ParallelPlan
from pipetransformer.process.world import World


@dataclass(frozen=True, slots=True)
class Arrival:
    """The result of a move: a rank with everything that its new plan needs.

    Attributes:
        mesh: process groups of the plan.
        state: optimizer state by parameter name, without the parameters that no optimizer step has changed yet.
        num_bytes: bytes that this rank received.
    """

    mesh: Mesh
    state: OptimizerState
    num_bytes: int


class AutoDP:
    """Moves the same ranks from plan to plan. A move to a longer pipeline (after unfreezing) is the same as any other.

    Every rank knows the holders of all units, so that transfers need no negotiation. A unit that nobody holds yet has
    the weights of before training, which every rank can have from the model's files, or by drawing them.

    Attributes:
        weights: holders of the weights of each unit.
        parked: this rank's optimizer state of frozen units by parameter name, kept while they may unfreeze.

    Args:
        keeps_frozen_state: whether the optimizer state of frozen units is kept for a later unfreezing.
    """

    def __init__(self, config: Config, *, chain: Chain, world: World, keeps_frozen_state: bool) -> None:
        self._train, self._chain, self._world = config.train, chain, world
        self._keeps_frozen_state = keeps_frozen_state
        self._mesh: Mesh | None = None
        self._begin()

    def forget(self) -> None:
        """Returns to the start: nobody holds weights or optimizer state."""
        self._chain.release(range(self._chain.num_units))
        self._begin()

    def _begin(self) -> None:
        self.weights: Holders = {}
        self._state: dict[int, range] = {}
        self.parked: OptimizerState = {}

    def restore(self, plan: ParallelPlan, state_holders: Holders) -> OptimizerState:
        """Makes room for what a checkpoint of ``plan`` gives this rank: weights, and optimizer state by its holders.

        Returns:
            Uninitialised optimizer state of this rank by parameter name, to be filled from the checkpoint and given to
            the next ``enter``. The weights are uninitialised too.
        """
        self.forget()
        self.weights, self._state = self._needed(plan), dict(state_holders)
        self._chain.materialize(unit for unit, ranks in self.weights.items() if self._world.rank in ranks)
        mine = [unit for unit, ranks in state_holders.items() if self._world.rank in ranks]
        return {
            name: empty_state(self._train, parameter, device=self._chain.device)
            for name, parameter in self._chain.named_parameters(mine).items()
        }

    def state_holders(self, active: ParallelPlan | None) -> dict[int, range]:
        """Holders of the optimizer state of each unit, parked or active. A unit without optimizer steps has none.

        Args:
            active: the present plan, if a step was taken under it; None before the first step.
        """
        if not state_keys(self._train):
            return {}
        return {**self._state, **(active.ranks_by_unit() if active is not None else {})}

    def enter(self, plan: ParallelPlan, *, state: OptimizerState, stepped: ParallelPlan | None) -> Arrival:
        """Collective. Takes this rank to ``plan``.

        Args:
            state: its optimizer state by parameter name, from the old plan or from a checkpoint.
            stepped: the old plan, if a step was taken under it, else None.
        """
        if self._mesh is not None and self._mesh.pp != plan.pp:
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
        if self._mesh is None:
            self._mesh = Mesh.build(pp=plan.pp, world_size=self._world.size, timeout=self._world.timeout)
        return Arrival(self._mesh, state, num_bytes)

    def let_go(self, plan: ParallelPlan) -> None:
        """Deletes the optimizer state of the units that are frozen under ``plan``: they will not thaw."""
        active = plan.ranks_by_unit()
        self._state = {unit: ranks for unit, ranks in self._state.items() if unit in active}
        self.parked = {}

    def close(self) -> None:
        """Frees the groups. Every rank must call it, and none may use the groups any longer."""
        if self._mesh is not None:
            self._mesh.close()
            self._mesh = None

    def _needed(self, plan: ParallelPlan) -> Holders:
        """Holders of the weights of each unit under ``plan``: those of the prefix are all ranks."""
        active = plan.ranks_by_unit()
        return {unit: active.get(unit, range(self._world.size)) for unit in range(plan.num_units)}

    def _move(self, plan: ParallelPlan, state: OptimizerState) -> int:
        """Brings the missing units to this rank, and frees the memory of those that it no longer needs.

        Weights of the prefix go to every rank. ``state`` is filled in place. Returns the bytes that this rank received.
        """
        chain, rank, units = self._chain, self._world.rank, range(plan.num_units)
        needed, active = self._needed(plan), plan.ranks_by_unit()
        state_needed = {unit: ranks for unit, ranks in active.items() if unit in self._state}
        mine = [unit for unit in units if rank in needed[unit]]
        chain.fill(unit for unit in mine if unit not in self.weights)
        chain.materialize(mine)
        parameters = {unit: chain.named_parameters([unit]) for unit in units}
        for unit in mine:
            if rank in state_needed.get(unit, ()) and rank not in self._state[unit]:
                for name, parameter in parameters[unit].items():
                    state[name] = empty_state(self._train, parameter, device=chain.device)

        def weights_of(unit: int) -> Iterator[Tensor]:
            return (parameter.data for parameter in parameters[unit].values())

        def state_of(unit: int) -> Iterator[Tensor]:
            return (state[name][key] for name in parameters[unit] for key in state_keys(self._train))

        num_bytes = 0
        for held, wanted, tensors in ((self.weights, needed, weights_of), (self._state, state_needed, state_of)):
            transfers = transfers_of(rank, held, wanted, ranks_per_node=self._world.local_size)
            num_bytes += execute_transfers(transfers, rank=rank, tensors=tensors)
        chain.release(unit for unit in units if unit not in mine)
        self.weights = needed
        return num_bytes
