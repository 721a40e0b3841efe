"""AutoDP: the holders of every unit. It moves weights and optimizer state to the ranks of a new plan, and makes the
plan's process groups where pp changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from pipetransformer.config import Config
from pipetransformer.dp.mesh import Mesh
from pipetransformer.dp.optimizer_state import OptimizerState, empty_state, has_state, state_keys
from pipetransformer.dp.transfer import Holders, execute_transfers, transfers_of
from pipetransformer.models import Chain
from pipetransformer.plan import ParallelPlan
from pipetransformer.process.world import World

_MOVED_TOGETHER = 2**26  # bytes of weights
_LEAST_PARTS = 16  # of ``pipe.memory_limit``: so few bytes move together where it is small


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

    Every rank knows the holders of all units, so that transfers need no negotiation. A unit that nobody holds and whose
    weights wait nowhere has those of before training, which every rank can have from the model's files, or by drawing
    them.

    Attributes:
        weights: holders of the weights of each unit that is in use.
        waiting: the rank in whose host's memory the weights of a unit wait that is not in use, by unit.
        parked: this rank's optimizer state of frozen units by parameter name, kept while they may unfreeze.

    Args:
        keeps_frozen_state: whether the optimizer state of frozen units is kept for a later unfreezing.
    """

    def __init__(self, config: Config, *, chain: Chain, world: World, keeps_frozen_state: bool) -> None:
        self._config, self._chain, self._world = config, chain, world
        self._memory = config.pipe.memory_limit
        self._keeps_frozen_state = keeps_frozen_state
        self._mesh: Mesh | None = None
        self._begin()

    def forget(self) -> None:
        """Returns to the start: nobody holds weights or optimizer state."""
        self._chain.release(range(self._chain.num_units))
        self._chain.forget_training()
        self._begin()

    def _begin(self) -> None:
        self._is_restored = False
        self.weights: dict[int, range] = {}
        self.waiting: dict[int, int] = {}
        self._state: dict[int, range] = {}
        self.parked: OptimizerState = {}

    def restore(self, plan: ParallelPlan, state_holders: Holders, *, untouched: int) -> OptimizerState:
        """Makes room for what a checkpoint of ``plan`` gives this rank: weights, and optimizer state by its holders.

        Args:
            untouched: number of leading units that no step had trained.

        Returns:
            Uninitialised optimizer state of this rank by parameter name, to be filled from the checkpoint and given to
            the next ``enter``. The weights are uninitialised too.
        """
        self.forget()
        self._is_restored = True
        self._chain.forget_training(untouched=untouched, frozen=plan.first_active)
        size, prefix = self._world.size, range(plan.first_active)
        unused = {unit: range(unit % size, unit % size + 1) for unit in prefix}
        self.weights, self._state = {**unused, **plan.holders()}, dict(state_holders)
        self._chain.materialize(unit for unit, ranks in self.weights.items() if self._world.rank in ranks)
        mine = [unit for unit, ranks in state_holders.items() if self._world.rank in ranks]
        return {
            name: empty_state(self._config, parameter, device=self._chain.device)
            for name, parameter in self._chain.trained_parameters(mine).items()
        }

    def state_holders(self, active: ParallelPlan | None) -> dict[int, range]:
        """Holders of the optimizer state of each unit, parked or active. A unit without optimizer steps has none.

        Args:
            active: the present plan, if a step was taken under it; None before the first step.
        """
        if not has_state(self._config):
            return {}
        return {**self._state, **(active.state_ranks() if active is not None else {})}

    def untouched(self, active: ParallelPlan | None) -> int:
        """The number of leading units that no step has trained.

        Args:
            active: as for ``state_holders``.
        """
        return self._chain.untouched if active is None else min(self._chain.untouched, active.first_active)

    def enter(self, plan: ParallelPlan, *, state: OptimizerState, stepped: ParallelPlan | None) -> Arrival:
        """Collective. Takes this rank to ``plan``.

        Args:
            state: its optimizer state by parameter name, from the old plan or from a checkpoint.
            stepped: the old plan, if a step was taken under it, else None.
        """
        if self._mesh is not None and self._mesh.pp != plan.pp:
            self.close()
        self._state = self.state_holders(stepped)
        self._chain.untouched = self.untouched(stepped)
        state = {**self.parked, **state}
        num_bytes = self._move(plan, state)
        self._chain.settle_types(plan.first_active)
        active = plan.state_ranks()
        self.parked = {}
        for unit in [*self._state]:
            if unit in active:
                self._state[unit] = active[unit]
            elif not self._keeps_frozen_state:
                del self._state[unit]
            elif self._world.rank in self._state[unit]:
                self.parked |= {name: state[name] for name in self._chain.trained_parameters([unit])}
        if self._mesh is None:
            self._mesh = Mesh.build(pp=plan.pp, world_size=self._world.size, timeout=self._world.timeout)
        return Arrival(self._mesh, state, num_bytes)

    def let_go(self, plan: ParallelPlan) -> None:
        """Deletes the optimizer state of the units that are frozen under ``plan``: they will not thaw."""
        active = plan.state_ranks()
        self._state = {unit: ranks for unit, ranks in self._state.items() if unit in active}
        self.parked = {}

    def close(self) -> None:
        """Frees the groups. Every rank must call it, and none may use the groups any longer."""
        if self._mesh is not None:
            self._mesh.close()
            self._mesh = None

    @contextmanager
    def lent(self, units: range) -> Iterator[None]:
        """Collective. Every rank has the weights of ``units``, for the time of the context, in eval mode."""
        missing = [unit for unit in units if unit not in self.weights]
        held = self._taken_up(missing)
        self._bring(held, dict.fromkeys(missing, range(self._world.size)))
        try:
            yield
        finally:
            self.waiting |= {unit: ranks[0] for unit, ranks in held.items()}  # what waits has not changed
            self._chain.release(missing)

    def saved_by(self, unit: int) -> int:
        """The rank that has the weights of a unit to save: one that holds them, or where they wait. All can have those
        of before training: they take turns."""
        ranks = self.weights.get(unit)
        return ranks[0] if ranks else self.waiting.get(unit, unit % self._world.size)

    def written_by(self, unit: int) -> int:
        """The rank that writes the weights of a unit to a checkpoint: its holders take turns, unit by unit."""
        ranks = self.weights.get(unit)
        return ranks[unit % len(ranks)] if ranks else self.saved_by(unit)

    def _taken_up(self, units: Iterable[int]) -> dict[int, range]:
        """Takes those of ``units`` that wait from their hosts' memory. Returns their holders."""
        held = {unit: range(rank, rank + 1) for unit in units if (rank := self.waiting.pop(unit, None)) is not None}
        self._chain.fill(unit for unit, ranks in held.items() if self._world.rank in ranks)
        return held

    def _lay_down(self, held: Holders) -> None:
        """Leaves each unit in the host's memory of one of its holders, which take turns; those that no step has trained
        are in the model's files, unless they came from a checkpoint."""
        for unit, ranks in held.items():
            if unit < self._chain.untouched and not self._is_restored:
                continue
            self.waiting[unit] = ranks[unit % len(ranks)]
            if self.waiting[unit] == self._world.rank:
                self._chain.keep([unit])

    def _bring(self, held: Holders, needed: Holders) -> int:
        """Brings the weights of units that this rank needs and does not hold. Returns the bytes that it received."""
        chain, rank = self._chain, self._world.rank
        mine = [unit for unit, ranks in needed.items() if rank in ranks]
        chain.fill(unit for unit in mine if unit not in held)
        chain.materialize(mine)

        def weights_of(unit: int) -> Iterator[Tensor]:
            return (parameter.data for parameter in chain.named_parameters([unit]).values())

        transfers = transfers_of(rank, held, needed, ranks_per_node=self._world.local_size)
        return execute_transfers(transfers, rank=rank, tensors=weights_of)

    def _move(self, plan: ParallelPlan, state: OptimizerState) -> int:
        """Brings the missing units to this rank, and frees the memory of those that it no longer needs.

        A few units at a time, so that no rank holds much more than the larger of what it had and what it gets. Entries
        of ``state`` come and go in place. Returns the bytes that this rank received.
        """
        active = plan.state_ranks()
        num_bytes, in_use = 0, plan.holders()
        for units in self._groups():
            needed = {unit: in_use[unit] for unit in units if unit in in_use}
            held = {unit: self.weights[unit] for unit in units if unit in self.weights} | self._taken_up(needed)
            num_bytes += self._bring(held, needed)
            self._lay_down({unit: ranks for unit, ranks in held.items() if unit not in needed})
            self._chain.release(unit for unit in units if self._world.rank not in needed.get(unit, ()))
            trained = {unit: active[unit] for unit in units if unit in active and unit in self._state}
            num_bytes += self._bring_state(trained, state)
            for unit in units:
                keeps = unit not in active and self._keeps_frozen_state
                if not keeps and self._world.rank not in active.get(unit, ()):
                    for name in self._chain.trained_parameters([unit]):
                        state.pop(name, None)
        self.weights = in_use
        return num_bytes

    def _groups(self) -> Iterator[list[int]]:
        """All units, so many at a time as have a bounded number of bytes, the same on every rank."""
        group, num_bytes = list[int](), 0
        most = _MOVED_TOGETHER if self._memory is None else min(_MOVED_TOGETHER, self._memory // _LEAST_PARTS)
        for unit in range(self._chain.num_units):
            of_unit = sum(parameter.nbytes for parameter in self._chain.named_parameters([unit]).values())
            if group and num_bytes + of_unit > most:
                yield group
                group, num_bytes = [], 0
            group.append(unit)
            num_bytes += of_unit
        yield group

    def _bring_state(self, needed: Holders, state: OptimizerState) -> int:
        """Brings the optimizer state of units that this rank trains and did not before, into ``state``. Returns the
        bytes that it received."""
        rank, parameters = self._world.rank, {unit: self._chain.trained_parameters([unit]) for unit in needed}
        for unit, ranks in needed.items():
            if rank in ranks and rank not in self._state[unit]:
                for name, parameter in parameters[unit].items():
                    state[name] = empty_state(self._config, parameter, device=self._chain.device)

        def state_of(unit: int) -> Iterator[Tensor]:
            named = parameters[unit].items()
            return (state[name][key] for name, parameter in named for key in state_keys(self._config, parameter))

        transfers = transfers_of(rank, self._state, needed, ranks_per_node=self._world.local_size)
        return execute_transfers(transfers, rank=rank, tensors=state_of)
