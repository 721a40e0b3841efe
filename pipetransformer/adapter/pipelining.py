"""Schedules over the stages of one rank: built with static shapes, run a step at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from pipetransformer.adapter.stage import StageTimes, TimedStage

if TYPE_CHECKING:
    from pipetransformer.adapter.recomputation import Recompute


Schedule = PipelineScheduleSingle | PipelineScheduleMulti


@dataclass(frozen=True, slots=True)
class StagePart:
    """One of the stages that a rank holds.

    Attributes:
        module: the stage's computation; its ``parameters`` are asked for where a backward is split.
        index: of the stage in the pipeline.
        example_inputs: all that one micro-batch brings in, on any device: only metadata are used (``requires_grad``
            counts).
        example_outputs: likewise, all that it sends on.
    """

    module: nn.Module
    index: int
    example_inputs: tuple[Tensor, ...]
    example_outputs: tuple[Tensor, ...]


def build_schedule(
    parts: Sequence[StagePart],
    *,
    kind: str,
    num_stages: int,
    num_microbatches: int,
    loss: Callable[[Tensor, Tensor], Tensor] | None,
    group: dist.ProcessGroup,
    device: torch.device,
    times: StageTimes,
    recompute: Recompute | None = None,
) -> Schedule:
    """A schedule over the static-shape stages of one rank; ``loss`` None makes a forward-only one.

    Note: giving both examples makes shapes static: no inference forward at the first step. ``scale_grads=False``: the
    loss is already divided by the global batch size, and the division would also touch gradients on ``eval``. A
    schedule without a loss has no backward in any version, whatever its kind.
    """
    stages = []
    for part in parts:
        stage = TimedStage(
            part.module,
            part.index,
            num_stages,
            device,
            input_args=part.example_inputs,
            output_args=part.example_outputs,
            group=group,
        )
        stage.times, stage.recompute, stage.last_microbatch = times, recompute, num_microbatches - 1
        stage.may_split = loss is not None and kind == "zero_bubble"
        stages.append(stage)
    if loss is None:
        kind = "gpipe" if len(stages) == 1 else "breadth_first"
    if kind in _ONE_STAGE:
        return _ONE_STAGE[kind](stages[0], num_microbatches, loss_fn=loss, scale_grads=False)
    # Note: where a step fails, these log the whole schedule beside the error that they raise.
    logging.getLogger(PipelineScheduleMulti.__module__).setLevel(logging.CRITICAL)
    return _MANY_STAGES[kind](stages, num_microbatches, loss_fn=loss, scale_grads=False)


_ONE_STAGE: Mapping[str, Callable[..., PipelineScheduleSingle]] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
_MANY_STAGES: Mapping[str, Callable[..., PipelineScheduleMulti]] = {
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
    "breadth_first": ScheduleLoopedBFS,
}


def run_schedule(
    schedule: Schedule,
    *,
    arguments: Sequence[Tensor],
    keywords: Mapping[str, Tensor],
    target: Tensor | None,
    training: bool,
    losses: list[Tensor] | None = None,
) -> Tensor | None:
    """One step of a schedule; returns the last stage's output where it does not train.

    Args:
        arguments: the inputs of stage 0; nothing on other ranks.
        keywords: further inputs, of all stages of this rank.
        losses: takes those of the micro-batches; on the last stage's rank.

    Note: ``return_outputs`` spares training the merge of outputs that nobody reads; it is not in every version's
    public signature.
    """
    given: dict[str, Any] = dict(keywords)
    with torch.set_grad_enabled(training):
        output: Tensor | None = schedule.step(
            *arguments, target=target, losses=losses, return_outputs=not training, **given
        )
    return output
