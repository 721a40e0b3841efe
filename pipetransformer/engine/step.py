"""One optimizer step of one rank, the same for every plan; and where its seconds went."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from pipetransformer.adapter import gradient_norms
from pipetransformer.engine.executor import StepInput
from pipetransformer.engine.feed import Feed
from pipetransformer.engine.layout import Layout
from pipetransformer.engine.objective import Objective
from pipetransformer.engine.optim import clip_
from pipetransformer.models import Chain

if TYPE_CHECKING:
    from pipetransformer.config import TrainConfig

__all__ = ["PhaseSeconds", "Probe", "Stepper"]

_STEPS_TOGETHER = 64  # norms of so many steps are summed at once: few collectives, little memory

Probe = Callable[[int, Mapping[str, Tensor]], None]
"""Called with (step, local gradients by name) after the reduction and before clipping."""


@dataclass(slots=True)
class PhaseSeconds:
    """Seconds of a rank's steps by phase.

    ``prefix`` is the frozen forward in front of stage 0; ``wait`` sending to, receiving from and idling for neighbours;
    ``reduction`` what the backward did not hide. On a GPU, phases are those of launching; their sum is not the step.
    """

    data: float = 0.0
    prefix: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    wait: float = 0.0
    reduction: float = 0.0
    optimizer: float = 0.0

    def as_list(self) -> list[float]:
        return [getattr(self, name) for name in self.names()]

    @classmethod
    def names(cls) -> list[str]:
        return [field.name for field in fields(cls)]


class Stepper:
    """Forward, backward, reduction, clipping, update; gradient norms of blocks where AutoFreeze wants them.

    Attributes:
        seconds: phases since they were last replaced.
    """

    def __init__(
        self,
        chain: Chain,
        train: TrainConfig,
        *,
        objective: Objective,
        rank: int,
        needs_norms: bool,
        probe: Probe | None = None,
    ) -> None:
        self._train = train
        self._objective = objective
        self._rank = rank
        self._probe = probe
        self._needs_norms = needs_norms
        self._num_blocks = chain.num_blocks
        self._device = chain.device
        self.clear()
        self.seconds = PhaseSeconds()

    def run(self, layout: Layout, feed: Feed, batch: StepInput, *, step: int, lr: float) -> None:
        """One optimizer step. Dropout depends on (seed, step, rank) alone, so that a resumed run repeats it."""
        clock, seconds, executor = perf_counter, self.seconds, layout.executor
        start = clock()
        torch.manual_seed(_mix(self._train.seed, step, self._rank))
        self._objective.begin(step=step, global_count=batch.global_count)
        layout.reducer.begin(num_microbatches=layout.plan.num_microbatches)
        feed.enter(batch)
        entered = clock()
        executor.times.clear()
        executor.train(batch)
        computed = clock()
        layout.reducer.finish()
        reduced = clock()
        if self._probe is not None:
            self._probe(step, {n: p.grad for n, p in layout.parameters.items() if p.grad is not None})
        self._use_norms(layout)
        for group in layout.optimizer.param_groups:
            group["lr"] = lr
        layout.optimizer.step()
        layout.has_stepped = True
        busy = executor.times.forward + executor.times.backward
        seconds.prefix += entered - start
        seconds.forward += executor.times.forward
        seconds.backward += executor.times.backward
        seconds.wait += max(0.0, computed - entered - busy)
        seconds.reduction += reduced - computed
        seconds.optimizer += clock() - reduced

    def _use_norms(self, layout: Layout) -> None:
        if self._train.max_grad_norm is None and not self._needs_norms:
            return
        gradients = layout.gradients()
        norms = gradient_norms(gradients)
        if self._needs_norms:
            # Stem and head go to two slots beside the blocks' and are dropped.
            squares = torch.zeros(self._num_blocks + 2, dtype=torch.float64, device=norms.device)
            squares.index_add_(0, layout.part_index, norms.double().square())
            self._squares.append(squares[1:-1])
            if len(self._squares) == _STEPS_TOGETHER:
                self.settle_norms(layout)
        if self._train.max_grad_norm is not None:
            clip_(norms, gradients, max_norm=self._train.max_grad_norm, pp_group=layout.mesh.pp_group)

    def clear(self) -> None:
        """Forgets times and norms, as after steps that were only measured."""
        self.seconds = PhaseSeconds()
        self._squares: list[Tensor] = []  # of the steps that are in no sum yet
        self._norm_sums = torch.zeros(self._num_blocks, dtype=torch.float64, device=self._device)
        self._num_summed = 0

    def settle_norms(self, layout: Layout) -> None:
        """Collective. Sums norms up while the plan that they were made under is at work: call it before another is.

        Squares are summed over a pipeline's stages, which may share a block.
        """
        if not self._squares:
            return
        squares = torch.stack(self._squares)
        if layout.mesh.pp_group is not None:
            dist.all_reduce(squares, group=layout.mesh.pp_group)
        self._norm_sums += squares.sqrt().sum(dim=0)
        self._num_summed += len(self._squares)
        self._squares = []

    def take_norms(self, layout: Layout) -> tuple[list[float], int]:
        """Collective. Gradient norms by block summed over the steps since the last call, and how many steps.

        The norms are broadcast from rank 0, so that all ranks decide alike.
        """
        self.settle_norms(layout)
        sums, num_steps = self._norm_sums.clone(), self._num_summed
        if num_steps:
            dist.broadcast(sums, src=0)
        self._norm_sums.zero_()
        self._num_summed = 0
        return sums.tolist(), num_steps


def _mix(*numbers: int) -> int:
    """One 63-bit seed from several numbers, well mixed."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> np.uint64(1))
