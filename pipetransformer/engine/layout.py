"""One rank under one plan: the parameters that it trains, their optimizer, their gradients' sum, their executor."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pipetransformer.dp import Arrival, GradientReducer, OptimizerState, take_state
from pipetransformer.engine.executor import Executor, build_executor
from pipetransformer.engine.objective import Objective
from pipetransformer.engine.optim import build_optimizer
from pipetransformer.models import Chain
from pipetransformer.plan import ParallelPlan

if TYPE_CHECKING:
    from pipetransformer.config import Config

__all__ = ["Layout"]


class Layout:
    """Built where AutoDP has brought a rank; left before it goes on to the next plan.

    Attributes:
        parameters: of the active units that this rank trains, by the model's names.
        part_index: the part of each parameter: 0 for the stem, i + 1 for block i.
        has_stepped: a step was taken, so that the optimizer has state.
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
        chain.freeze(plan.frozen)
        self.parameters = chain.named_parameters(plan.units_of(rank))
        parts = [chain.numbering.part_of(chain.unit_of(name)) for name in self.parameters]
        self.part_index = torch.tensor(parts, device=chain.device)
        self.optimizer = build_optimizer(config.train, self.parameters, arrival.state)
        self.reducer = GradientReducer(self.parameters, group=self.mesh.dp_group)
        self.executor: Executor = build_executor(
            objective,
            chain=chain,
            plan=plan,
            rank=rank,
            group=self.mesh.pp_group,
            recompute=config.pipe.recompute,
        )
        self.has_stepped = False

    def state(self) -> OptimizerState:
        """This rank's optimizer state, by parameter name."""
        return take_state(self.optimizer, self.parameters)

    def forget_state(self) -> None:
        """Throws the optimizer's state away, as if no step had been taken."""
        self.optimizer.state.clear()
        self.has_stepped = False

    def gradients(self) -> list[Tensor]:
        """The local gradients in the order of ``parameters``."""
        return [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]

    def close(self) -> None:
        """Takes its hooks off the parameters."""
        self.reducer.close()
