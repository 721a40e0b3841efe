"""Executors of one rank's steps: a plain loop for pp = 1, a schedule of ``torch.distributed.pipelining`` for pp > 1.

Both take the same ``StepInput``, so that callers need not know which one they have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from pipetransformer.adapter import Recompute, Schedule, StagePart, StageTimes, build_schedule, run_schedule
from pipetransformer.dp import LentWeights
from pipetransformer.engine.objective import Objective
from pipetransformer.models import Chain, Stage
from pipetransformer.plan import ParallelPlan
from pipetransformer.process.whereabouts import HERE


@dataclass(slots=True)
class StepInput:
    """This rank's part of a global batch.

    Attributes:
        hidden: input of unit ``enters`` [rows, ...], and of the first active unit after ``Feed.enter``; None on ranks
            without stage 0.
        inputs: other inputs of the units by name, such as attention masks, each [rows, ...].
        ids: numbers of the samples [rows].
        labels: labels [rows, ...]; ``IGNORED`` for padding copies.
        length: padded length of the samples.
        rows: number of rows of this replica, padding copies included.
        global_count: number of real samples of the global batch.
        num_real: number of real samples of this replica, which come first.
        enters: the unit that ``hidden`` enters; 0 for the model's own input.
        is_padded: whether any row is a text with padding.
    """

    hidden: Tensor | None
    inputs: Mapping[str, Tensor]
    ids: np.ndarray
    labels: Tensor
    length: int
    rows: int
    global_count: int
    num_real: int
    enters: int
    is_padded: bool

    def pin_memory(self) -> StepInput:
        """Pins the tensors on the host, so that copies to a GPU can overlap. The data loader calls it."""
        return self._replace_all(lambda tensor: tensor.pin_memory() if tensor.device.type == "cpu" else tensor)

    def move(self, device: torch.device) -> StepInput:
        """Brings the tensors to ``device``."""
        return self._replace_all(lambda tensor: tensor.to(device, non_blocking=True))

    def _replace_all(self, replaced: Callable[[Tensor], Tensor]) -> StepInput:
        self.labels = replaced(self.labels)
        self.inputs = {key: replaced(value) for key, value in self.inputs.items()}
        self.hidden = None if self.hidden is None else replaced(self.hidden)
        return self


class Executor(Protocol):
    """The steps of one rank under one plan.

    Attributes:
        times: seconds of the stages' forwards and backwards since the last ``clear``.
    """

    times: StageTimes

    def train(self, batch: StepInput) -> None:
        """Runs forward and backward of all micro-batches; gradients accumulate."""

    def evaluate(self, batch: StepInput) -> Tensor | None:
        """Runs the forward of all micro-batches. Returns the outputs [rows, ...] on the last stage, else None."""


class _PlainExecutor:
    """The executor for pp = 1: a loop without any code of pipelines."""

    def __init__(
        self, stage: Stage, objective: Objective, *, num_microbatches: int, recompute: Recompute | None
    ) -> None:
        self._stage = stage
        self._objective = objective
        self._num_microbatches = num_microbatches
        self._recompute = recompute
        self.times = StageTimes()

    def train(self, batch: StepInput) -> None:
        for number, (hidden, inputs, labels) in enumerate(self._microbatches(batch)):
            if self._recompute is not None:
                self._recompute.is_last_microbatch = number == self._num_microbatches - 1
            HERE.enter("forward")
            start = perf_counter()
            loss = self._objective(self._stage(hidden, **inputs), labels)
            HERE.enter("backward")
            middle = perf_counter()
            torch.autograd.backward(loss)
            self.times.ran_forward(start, middle, stage=0, microbatch=number)
            self.times.ran_backward(middle, perf_counter(), stage=0, microbatch=number)

    def evaluate(self, batch: StepInput) -> Tensor | None:
        outputs = [self._stage(hidden, **inputs) for hidden, inputs, _ in self._microbatches(batch)]
        whole = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        self._objective(whole, batch.labels)
        return whole

    def _microbatches(self, batch: StepInput) -> Iterable[tuple[Tensor | None, Mapping[str, Tensor], Tensor]]:
        if self._num_microbatches == 1:
            return [(batch.hidden, batch.inputs, batch.labels)]
        assert batch.hidden is not None
        m = self._num_microbatches
        inputs = {key: value.chunk(m) for key, value in batch.inputs.items()}
        parts = [{key: chunks[i] for key, chunks in inputs.items()} for i in range(m)]
        return zip(batch.hidden.chunk(m), parts, batch.labels.chunk(m))


class _PipelineExecutor:
    """The executor for pp > 1: one schedule per padded shape, each over the same stage modules.

    A schedule has static shapes and is built at the first use of its shape. With any number of stages per rank, stage 0
    is on the first rank of a pipeline, and the last stage on its last rank.

    Raises:
        RuntimeError: from ``train`` and ``evaluate``, for inputs of another shape than the schedule's.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        objective: Objective,
        *,
        chain: Chain,
        plan: ParallelPlan,
        rank: int,
        group: dist.ProcessGroup,
        recompute: Recompute | None,
    ) -> None:
        self._stages = dict(zip(plan.stages_of(rank), stages, strict=True))
        self._objective = objective
        self._chain = chain
        self._plan = plan
        self._group = group
        self._recompute = recompute
        self._schedules: dict[tuple[int, int, bool], tuple[Schedule, tuple[int, ...] | None]] = {}
        self.times = StageTimes()

    def train(self, batch: StepInput) -> None:
        self._run(batch, training=True)

    def evaluate(self, batch: StepInput) -> Tensor | None:
        outputs = self._run(batch, training=False)
        if outputs is not None:
            self._objective(outputs, batch.labels)
        return outputs

    def _run(self, batch: StepInput, *, training: bool) -> Tensor | None:
        key = (batch.rows, batch.length, training)
        if key not in self._schedules:
            self._schedules[key] = self._build(batch, training=training)
        schedule, hidden_shape = self._schedules[key]
        # Note: gloo would silently reuse old rows after a smaller batch, and abort the peer after a larger one.
        given = None if batch.hidden is None else tuple(batch.hidden.shape)
        side = [value.shape[0] for value in batch.inputs.values()]
        if given != hidden_shape or side != [batch.rows] * len(side):
            numbers = ", ".join(map(str, self._stages))
            raise RuntimeError(f"stage {numbers} was built for {hidden_shape} and got {given}, inputs {side}")
        is_last = self._plan.num_stages - 1 in self._stages
        return run_schedule(
            schedule,
            arguments=() if batch.hidden is None else (batch.hidden,),
            keywords=batch.inputs,
            target=batch.labels if training and is_last else None,
            training=training,
        )

    def _build(self, batch: StepInput, *, training: bool) -> tuple[Schedule, tuple[int, ...] | None]:
        """A schedule for the shape of ``batch``, and the shape of stage 0's input (None on ranks without stage 0)."""
        parts = [self._part(stage, batch, training=training) for stage in self._stages]
        schedule = build_schedule(
            parts,
            kind=self._plan.schedule,
            num_stages=self._plan.num_stages,
            num_microbatches=self._plan.num_microbatches,
            loss=self._objective if training else None,
            group=self._group,
            device=self._chain.device,
            times=self.times,
            recompute=self._recompute,
        )
        return schedule, (batch.rows, *parts[0].example_inputs[0].shape[1:]) if 0 in self._stages else None

    def _part(self, stage: int, batch: StepInput, *, training: bool) -> StagePart:
        rows = batch.rows // self._plan.num_microbatches
        module = self._stages[stage]
        if stage == 0:
            assert batch.hidden is not None
            entering = torch.empty((rows, *batch.hidden.shape[1:]), dtype=batch.hidden.dtype, device="meta")
        else:
            entering = self._chain.boundary(module.units.start - 1, rows=rows, length=batch.length)
            entering.requires_grad_(training)
        leaving = self._chain.boundary(module.units.stop - 1, rows=rows, length=batch.length).requires_grad_(training)
        return StagePart(module, stage, example_inputs=(entering,), example_outputs=(leaving,))


def build_executor(
    objective: Objective,
    *,
    chain: Chain,
    plan: ParallelPlan,
    rank: int,
    group: dist.ProcessGroup | None,
    recompute: str = "never",
    lent: LentWeights | None = None,
) -> Executor:
    """The executor for the stages of ``rank`` under ``plan``.

    Args:
        group: the ranks of its pipeline; None for pp = 1.
        recompute: mode of recomputation, one of ``adapter.MODES``.
        lent: brings the weights of each unit; None where all are here.
    """
    again = None if recompute == "never" else Recompute(recompute)
    around = _around(again, lent)
    stages = [
        Stage(chain, units, first_active=plan.first_active, around=around) for units in plan.staged_units_of(rank)
    ]
    if plan.pp == 1:
        return _PlainExecutor(stages[0], objective, num_microbatches=plan.num_microbatches, recompute=again)
    assert group is not None
    return _PipelineExecutor(stages, objective, chain=chain, plan=plan, rank=rank, group=group, recompute=again)


def _around(again: Recompute | None, lent: LentWeights | None) -> Callable[..., Tensor] | None:
    """The place of a unit's forward: with its weights borrowed, recomputed, both, or None for neither."""
    if again is None:
        return None if lent is None else lent.around

    def recomputed(unit: int, forward: Callable[..., Tensor], *arguments: object) -> Tensor:
        return again(forward, *arguments)

    if lent is None:
        return recomputed
    return lambda unit, forward, *arguments: lent.around(unit, partial(recomputed, unit, forward), *arguments)
