"""The tools of one rank under one plan: the parameters to train, optimizer, gradient reducer and executor."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

from pipetransformer.config import Config
from pipetransformer.dp import EMA, RECENT, Arrival, GradientReducer, LentWeights, OptimizerState, take_state
from pipetransformer.engine.average import Average, recent, warmed_up
from pipetransformer.engine.executor import Executor, build_executor
from pipetransformer.engine.objective import Objective
from pipetransformer.engine.optim import build_optimizer, lr_scale, tables_by_row
from pipetransformer.models import Chain
from pipetransformer.plan import ParallelPlan


class Layout:
    """One rank's tools for one plan: built after AutoDP has brought the units, closed before the next plan.

    Args:
        arrival: the result of AutoDP's move to ``plan``.

    Attributes:
        plan: the plan.
        mesh: process groups of the plan.
        parameters: those of this rank's active units that train, by the model's names.
        updated: those of them that this rank updates: all, or its share where replicas share out the optimizer's state.
        part_index: the part of each of ``updated`` [len(updated)]: 0 for the stem, i + 1 for block i, L + 1 for the
            head.
        norm_group: the ranks whose gradients after the reduction are those of one model; None for this rank alone.
        optimizer: the optimizer of ``updated``.
        averages: moving averages of their weights; without the one that blocks freeze with, once none will (``rest``).
        reducer: the sum of gradients over the replicas.
        executor: forward and backward of this rank's stages.
        stepped: the plan, once an optimizer step was taken under it; None before.
    """

    def __init__(
        self,
        plan: ParallelPlan,
        arrival: Arrival,
        *,
        chain: Chain,
        config: Config,
        rank: int,
        objective: Objective,
    ) -> None:
        self.plan = plan
        self.mesh = arrival.mesh
        updaters, is_full = plan.state_ranks(), plan.shares_state and plan.shard == "full"
        self._lent: LentWeights | None = None
        if is_full:
            assert self.mesh.dp_group is not None
            lenders = {unit: updaters[unit][0] for unit in plan.units_of(rank)}
            self._lent = LentWeights(chain, lenders, group=self.mesh.dp_group)
        chain.freeze(plan.frozen, stem=plan.stem_frozen)
        self.parameters = chain.trained_parameters(plan.units_of(rank))
        units = self._units = {name: chain.unit_of(name) for name in self.parameters}
        owners = {name: updaters[unit] for name, unit in units.items()}
        self.updated = {name: parameter for name, parameter in self.parameters.items() if rank in owners[name]}
        self.norm_group = dist.group.WORLD if plan.shares_state else self.mesh.pp_group
        parts = [chain.numbering.part_of(units[name]) for name in self.updated]
        self.part_index = torch.tensor(parts, dtype=torch.int64, device=chain.device)
        scales = [lr_scale(config.train, part, num_blocks=chain.num_blocks) for part in parts]
        self._has_state = {name for name in self.updated if name in arrival.state}
        decays = {EMA: warmed_up(config.train.ema or 0.0), RECENT: recent}
        self.averages = tuple(
            Average(self.updated, arrival.state, key=key, decay=decays[key]) for key in config.averages
        )
        of_optimizer = {name: _without_averages(kept) for name, kept in arrival.state.items()}
        self.optimizer = build_optimizer(
            config.train, self.updated, of_optimizer, lr_scales=dict(zip(self.updated, scales, strict=True))
        )
        tables = tables_by_row(config.train, chain) if not plan.shares_state else frozenset[str]()
        self.reducer = GradientReducer(
            self.parameters,
            group=self.mesh.dp_group,
            owners={name: ranks[0] for name, ranks in owners.items()} if plan.shares_state else None,
            units=units if is_full else None,
            tables=tables,
        )
        chain.give_rows(tables)
        self._chain = chain
        self.executor: Executor = build_executor(
            objective,
            chain=chain,
            plan=plan,
            rank=rank,
            group=self.mesh.pp_group,
            recompute=config.pipe.recompute,
            lent=self._lent,
        )
        self.stepped: ParallelPlan | None = None
        self._rests = False

    def rest(self) -> None:
        """Drops the average that blocks would freeze with, because none will freeze any more."""
        self._rests = self._rests or self._average(RECENT) is not None
        self.averages = tuple(average for average in self.averages if average.key != RECENT)

    def state(self) -> OptimizerState:
        """This rank's optimizer state, by parameter name."""
        state = take_state(self.optimizer, self.updated)
        kept = {average.key: average.state() for average in self.averages}
        if self._rests:  # for a run that goes on with another policy
            kept[RECENT] = {name: parameter.detach().clone() for name, parameter in self.updated.items()}
        for key, tensors in kept.items():
            for name, tensor in tensors.items():
                if self.stepped is not None or name in self._has_state:
                    state.setdefault(name, {})[key] = tensor
        return state

    def forget_state(self) -> None:
        """Deletes the optimizer's state, as if no step had been taken."""
        self.optimizer.state.clear()
        self.stepped, self._has_state = None, set()
        for average in self.averages:
            average.begin_again()

    def update_averages(self, step: int) -> None:
        """Takes note of the weights after step ``step``, from 0."""
        for average in self.averages:
            average.update(step)

    def averaged(self) -> AbstractContextManager[None]:
        """A context in which the weights are those to evaluate and save: their averages, where there are such."""
        evaluated = self._average(EMA)
        return nullcontext() if evaluated is None else evaluated.in_place()

    def settle(self) -> None:
        """Puts the weights to evaluate and save in the place of the others, for good."""
        if (evaluated := self._average(EMA)) is not None:
            evaluated.settle()

    def calm(self, *, before: int) -> None:
        """Collective. Gives the units before ``before``, which freeze now, their averages, where there are such."""
        if (average := self._average(RECENT)) is not None and before > self.plan.first_active:
            average.copy_to([name for name in self.updated if self._units[name] < before])
            self.share()

    def _average(self, key: str) -> Average | None:
        return next((average for average in self.averages if average.key == key), None)

    def gradients(self) -> list[Tensor]:
        """The local gradients in the order of ``updated``."""
        return [parameter.grad for parameter in self.updated.values() if parameter.grad is not None]

    def share(self) -> None:
        """Has all replicas compute with the weights that their owners have updated, from now on."""
        if self._lent is None:
            self.reducer.share()
        else:
            self._lent.take_back()

    def close(self) -> None:
        """Removes the reducer's hooks from the parameters, and gives borrowed weights back."""
        self.reducer.close()
        self._chain.give_rows(())
        if self._lent is not None:
            self._lent.close()


def _without_averages(kept: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: value for key, value in kept.items() if key not in (EMA, RECENT)}
