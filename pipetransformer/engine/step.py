"""One optimizer step of one rank, the same for every plan, and its seconds by phase."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor

from pipetransformer.adapter import Span, divide, gradient_norms, scaled_step
from pipetransformer.config import TrainConfig
from pipetransformer.engine.executor import StepInput
from pipetransformer.engine.feed import Feed
from pipetransformer.engine.finite import are_finite
from pipetransformer.engine.layout import Layout
from pipetransformer.engine.loss_scale import LossScale
from pipetransformer.engine.objective import Objective
from pipetransformer.engine.optim import clip_scale, set_learning_rate
from pipetransformer.models import Chain
from pipetransformer.process.device import seed
from pipetransformer.process.whereabouts import HERE

_STEPS_TOGETHER = 64  # steps whose norms are summed at once: few collectives, little memory
_SAMPLED = 16  # a step in so many has norms where nothing but the dashboard wants them

Probe = Callable[[int, Mapping[str, Tensor]], None]
"""Called with (step, local gradients by name) after the reduction and before clipping."""


@dataclass(slots=True)
class PhaseSeconds:
    """Seconds of a rank's steps by phase.

    On a GPU these are the times of the kernels' launches, and their sum is not the time of the step.

    Attributes:
        data: waits for the next batch.
        prefix: forwards of the frozen units in front of stage 0, and copies to the device.
        forward: forwards of this rank's stages.
        backward: backwards of this rank's stages.
        wait: sends, receives and waits for other ranks of the pipeline.
        reduction: the part of the gradients' sum over replicas that the backward did not hide.
        optimizer: gradient norms, clipping and the update of weights.
    """

    data: float = 0.0
    prefix: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    wait: float = 0.0
    reduction: float = 0.0
    optimizer: float = 0.0


@dataclass(frozen=True, slots=True)
class NormSums:
    """Gradient norms of the blocks, of the data-parallel gradient before clipping, 0 for frozen blocks.

    Attributes:
        sums: sum over some steps [blocks].
        num_steps: number of these steps.
    """

    sums: list[float]
    num_steps: int

    @property
    def mean(self) -> list[float] | None:
        """Mean over the steps [blocks]; None for no step."""
        return [total / self.num_steps for total in self.sums] if self.num_steps else None


class Stepper:
    """Runs optimizer steps: forward, backward, reduction, clipping, update.

    Args:
        needs_norms: whether every step's gradient norms are summed up, for AutoFreeze; else they are where they cost
            nothing, because gradients are clipped, and of one step in 16 elsewhere.
        probe: called with (step, local gradients by name) after the reduction and before clipping.

    Attributes:
        seconds: seconds by phase since this attribute was last replaced.
        skipped: number of updates in a row that were skipped, up to now.
        loss_scale: the factor of the loss under float16; None elsewhere.
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
        self._chain = chain
        self.skipped = 0
        self.clear()

    def run(self, layout: Layout, feed: Feed, batch: StepInput, *, step: int, lr: float, probed: bool = True) -> None:
        """Runs one optimizer step.

        Dropout depends on nothing but (seed, step, rank), so that a resumed run repeats it.

        Raises:
            RuntimeError: if a parameter received no gradient.
        """
        clock, seconds, executor = perf_counter, self.seconds, layout.executor
        start = clock()
        seed(self._chain.device, _mix(self._train.seed, step, self._rank))
        factor = None if self.loss_scale is None else self.loss_scale.factor
        self._objective.begin(step=step, batch_size=self._train.batch_size, factor=factor)
        layout.reducer.begin(num_microbatches=layout.plan.num_microbatches)
        feed.enter(batch)
        entered = clock()
        executor.times.clear()
        executor.train(batch)
        computed = clock()
        HERE.enter("reduction")
        layout.reducer.finish()
        reduced = clock()
        HERE.enter("optimizer")
        if factor is not None:
            divide(layout.gradients(), factor)
        if self._probe is not None and probed:
            self._probe(step, {n: p.grad for n, p in layout.parameters.items() if p.grad is not None})
        if (self._train.not_finite == "skip" or self.loss_scale is not None) and self._is_skipped(layout):
            self.skipped += 1
            if self.loss_scale is not None:
                self.loss_scale.overflowed()
            return
        self.skipped = 0
        if self.loss_scale is not None:
            self.loss_scale.passed()
        scale = self._norms_and_scale(layout, step)
        set_learning_rate(layout.optimizer, lr)
        if scale is None:
            layout.optimizer.step()
        else:
            scaled_step(layout.optimizer, scale)
        layout.update_averages(step)
        layout.share()
        layout.stepped = layout.plan
        busy = executor.times.forward + executor.times.backward
        seconds.prefix += entered - start
        seconds.forward += executor.times.forward
        seconds.backward += executor.times.backward
        seconds.wait += max(0.0, computed - entered - busy)
        seconds.reduction += reduced - computed
        seconds.optimizer += (stepped := clock()) - reduced
        if executor.times.spans is not None:
            phases = zip(("prefix", "reduction", "optimizer"), (start, computed, reduced), (entered, reduced, stepped))
            executor.times.spans += [Span(*phase) for phase in phases]

    def _is_skipped(self, layout: Layout) -> bool:
        """Collective. Whether a loss or a gradient of any rank is not finite. Then the step leaves no figures."""
        is_good = self._objective.is_finite() and are_finite(layout.gradients())
        bad = torch.tensor(float(not is_good))
        dist.all_reduce(bad, op=dist.ReduceOp.MAX)
        if bad:
            self._objective.drop()
            layout.share()  # what was borrowed goes back
        return bool(bad)

    def _norms_and_scale(self, layout: Layout, step: int) -> Tensor | None:
        """Notes the norms. Returns the scale that clips the gradients; None where nothing is clipped."""
        max_norm = self._train.max_grad_norm
        if max_norm is None and not self._needs_norms and step % _SAMPLED:
            return None
        gradients = layout.gradients()  # none where all units are frozen in place
        none = torch.zeros(0, dtype=self._chain.dtype, device=self._chain.device)
        norms = gradient_norms(gradients) if gradients else none
        # One slot for each part; those of stem and head are dropped.
        squares = torch.zeros(self._chain.num_blocks + 2, dtype=torch.float64, device=norms.device)
        squares.index_add_(0, layout.part_index, norms.double().square())
        self._squares.append(squares[1:-1])
        if len(self._squares) == _STEPS_TOGETHER:
            self.settle_norms(layout)
        return None if max_norm is None else clip_scale(norms, max_norm=max_norm, group=layout.norm_group)

    def clear(self) -> None:
        """Deletes times and norms, as needed after steps that were only timed."""
        self.seconds = PhaseSeconds()
        self.loss_scale = LossScale() if self._train.precision == "float16" else None
        self._squares: list[Tensor] = []  # squared norms [num_blocks] of the steps that are not in the sums yet
        self._norm_sums = torch.zeros(self._chain.num_blocks, dtype=torch.float64, device=self._chain.device)
        self._num_summed = 0

    def settle_norms(self, layout: Layout) -> None:
        """Collective. Adds the norms of the last steps to the sums. Call it before the job leaves their plan.

        Squares are summed over the stages of a pipeline, because two stages may share a block, and over the replicas
        where they share out the gradients.
        """
        if not self._squares:
            return
        squares = torch.stack(self._squares)
        if layout.norm_group is not None:
            dist.all_reduce(squares, group=layout.norm_group)
        self._norm_sums += squares.sqrt().sum(dim=0)
        self._num_summed += len(self._squares)
        self._squares = []

    def take_norms(self, layout: Layout) -> NormSums:
        """Collective. Gradient norms since the last call.

        They are broadcast from rank 0, so that all ranks decide alike.
        """
        self.settle_norms(layout)
        sums, num_steps = self._norm_sums.clone(), self._num_summed
        if num_steps:
            dist.broadcast(sums, src=0)
        self._norm_sums.zero_()
        self._num_summed = 0
        return NormSums(sums.tolist(), num_steps)


def _mix(*numbers: int) -> int:
    """One 63-bit seed made from several numbers."""
    digest = hashlib.blake2b(",".join(map(str, numbers)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
