"""The tools of one rank under one plan: the parameters to train, optimizer, gradient reducer and executor."""

from __future__ import annotations

import torch
from torch import Tensor

from pipetransformer.config import Config
from pipetransformer.dp import Arrival, GradientReducer, OptimizerState, take_state
from pipetransformer.engine.executor import Executor, build_executor
from pipetransformer.engine.objective import Objective
from pipetransformer.engine.optim import build_optimizer, lr_scale
from pipetransformer.models import Chain
from pipetransformer.plan import ParallelPlan


class Layout:
    """One rank's tools for one plan: built after AutoDP has brought the units, closed before the next plan.

    Args:
        arrival: the result of AutoDP's move to ``plan``.

    Attributes:
        plan: the plan.
        mesh: process groups of the plan.
        parameters: parameters of this rank's active units, by the model's names.
        part_index: the part of each parameter [len(parameters)]: 0 for the stem, i + 1 for block i, L + 1 for the
            head.
        optimizer: the optimizer of ``parameters``.
        reducer: the sum of their gradients over the replicas.
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
        chain.freeze(plan.frozen, stem=plan.stem_frozen)
        self.parameters = chain.named_parameters(plan.units_of(rank))
        parts = [chain.numbering.part_of(chain.unit_of(name)) for name in self.parameters]
        self.part_index = torch.tensor(parts, dtype=torch.int64, device=chain.device)
        scales = [lr_scale(config.train, part, num_blocks=chain.num_blocks) for part in parts]
        self.optimizer = build_optimizer(
            config.train, self.parameters, arrival.state, lr_scales=dict(zip(self.parameters, scales, strict=True))
        )
        self.reducer = GradientReducer(self.parameters, group=self.mesh.dp_group)
        self.executor: Executor = build_executor(
            objective,
            chain=chain,
            plan=plan,
            rank=rank,
            group=self.mesh.pp_group,
            recompute=config.pipe.recompute,
        )
        self.stepped: ParallelPlan | None = None

    def state(self) -> OptimizerState:
        """This rank's optimizer state, by parameter name."""
        return take_state(self.optimizer, self.parameters)

    def forget_state(self) -> None:
        """Deletes the optimizer's state, as if no step had been taken."""
        self.optimizer.state.clear()
        self.stepped = None

    def gradients(self) -> list[Tensor]:
        """The local gradients in the order of ``parameters``."""
        return [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]

    def close(self) -> None:
        """Removes the reducer's hooks from the parameters."""
        self.reducer.close()
