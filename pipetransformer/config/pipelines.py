"""The keys of ``pipe``, and the check of those that must fit each other."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pipetransformer.config.types import Count, NumBytes, Section
from pipetransformer.errors import UserError
from pipetransformer.plan.schedules import SCHEDULES, fewest_stages, why_not


class PipeConfig(Section):
    enabled: bool = Field(
        default=True,
        description="AutoPipe: re-plan as blocks freeze; false keeps the first layout's length and M, and its "
        "cuts as far as the frozen blocks allow.",
    )
    initial_length: Count | Literal["auto"] = Field(
        default="auto", description="Pipeline length (pp): a number holds until the first freeze; `auto` plans freely."
    )
    units: Literal["block", "half"] = Field(
        default="block",
        description="The smallest piece that a pipeline may cut at: a `block`, or `half` of one (its attention, or its "
        "MLP, with its residual), for a finer balance. `boundaries` of plans count these units; freezing and the cache "
        "count in blocks either way.",
    )
    schedule: Literal["auto", "gpipe", "1f1b", "interleaved", "zero_bubble"] = Field(
        default="1f1b",
        description="Order of work in a pipeline. `gpipe`: all forwards, then all backwards. `1f1b`: a backward as "
        "soon as there is one. `interleaved`: `1f1b` with several stages a rank. `zero_bubble`: gradients of weights "
        "where a rank would wait. `auto`: whichever of the last three AutoPipe predicts to be fastest.",
    )
    stages_per_rank: Count | None = Field(
        default=None,
        description="Stages of a rank (v) under `interleaved` (at least 2) and `zero_bubble`; null takes 2 and 1.",
    )
    measure: bool = Field(
        default=True,
        description="Time the model's units and the static layouts before training, in about a twentieth of a run "
        "that is not short (see the README); false plans by counted work, and the run has no compute floor.",
    )
    microbatches: Count | Literal["auto"] = Field(
        default="auto",
        description="Micro-batches per pipeline and step (M); `1f1b` needs at least as many as stages, `interleaved` "
        "and `zero_bubble` a multiple of the M // pp rounds that they go in. Where it does not divide a replica's "
        "rows, rows without weight are added.",
    )
    recompute: Literal["never", "except_last", "always", "selective"] = Field(
        default="never",
        description="Whose activations are computed again in the backward, unit by unit (`units`), to save memory: no "
        "micro-batch's, all but the last one's of a step, or all. `selective`: all, but for what matrix products and "
        "attention gave, which is kept.",
    )
    memory_limit: NumBytes | None = Field(
        default=None,
        description="Bytes of weights, gradients, optimizer state and activations that AutoPipe may plan on a rank; "
        "null takes nine tenths of a GPU, and sets no limit on a CPU.",
    )

    @property
    def units_per_block(self) -> int:
        return 2 if self.units == "half" else 1


def check_pipe(pipe: PipeConfig) -> None:
    """Raises UserError for a schedule, stages and micro-batches that do not go together."""
    schedule, stages, microbatches, length = pipe.schedule, pipe.stages_per_rank, pipe.microbatches, pipe.initial_length
    if schedule == "auto":
        if stages is not None:
            raise UserError(
                f"pipe.stages_per_rank: {stages} is not allowed; pipe.schedule auto decides it, leave it out"
            )
        return
    if stages is not None and (reason := _why_not_stages(schedule, stages)) is not None:
        others = " or ".join(name for name in SCHEDULES if _why_not_stages(name, stages) is None)
        raise UserError(
            f"pipe.stages_per_rank: {stages} is not allowed; schedule {schedule} {reason}, give that, or pipe.schedule "
            f"{others}"
        )
    if not (isinstance(microbatches, int) and isinstance(length, int) and length > 1):
        return
    per_rank = stages or fewest_stages(schedule)
    reason = why_not(schedule, num_ranks=length, num_microbatches=microbatches, stages_per_rank=per_rank)
    if reason is not None:
        raise UserError(
            f"pipe.microbatches: {microbatches} is not allowed; schedule {schedule} {reason}, give that, or another "
            "pipe.initial_length"
        )


def _why_not_stages(schedule: str, stages_per_rank: int) -> str | None:
    return why_not(schedule, num_ranks=1, num_microbatches=1, stages_per_rank=stages_per_rank)
