"""A check of the pipeline's settings before any measurement: refuses those that no layout of the job can have."""

from __future__ import annotations

from pipetransformer.config import Config
from pipetransformer.errors import UserError
from pipetransformer.pipe.planner.choice import schedules_of
from pipetransformer.pipe.planner.constraints import divisors


def check_layout(config: Config, *, world_size: int, local_size: int, num_units: int) -> None:
    """Refuses pipeline settings that no layout of this job can have.

    Args:
        world_size: number of ranks of the job.
        local_size: number of ranks of a node; a pipeline never spans two nodes.
        num_units: number of units of the model, stem and head included.

    Raises:
        UserError: for such a setting.
    """
    pipe, batch_size = config.pipe, config.train.batch_size
    length = pipe.initial_length if isinstance(pipe.initial_length, int) else None
    if config.dp.shard == "full" and pipe.schedule == "zero_bubble":
        raise UserError(
            "dp.shard: full cannot go with pipe.schedule zero_bubble, whose backward comes in halves; give optimizer, "
            "or another schedule"
        )
    if length is not None:
        _check_length(length, config, world_size=world_size, local_size=local_size, num_units=num_units)
    may_grow = config.freeze.policy != "none" and pipe.enabled and config.dp.enabled
    # A pipeline needs one micro-batch for each rank, data parallelism one row for each replica.
    dp, num_microbatches = (world_size, 1) if length is None or may_grow else (world_size // length, length)
    remedy = ""
    if isinstance(pipe.microbatches, int):
        num_microbatches, remedy = pipe.microbatches, ", or fewer pipe.microbatches"
    parts = config.train.gradient_accumulation_steps
    if parts is not None and batch_size < world_size * parts:
        raise UserError(
            f"train.gradient_accumulation_steps: {parts} parts on {world_size} ranks are more than train.batch_size "
            f"{batch_size}; give at most {max(1, batch_size // world_size)}"
        )
    if batch_size < dp * num_microbatches:
        raise UserError(
            f"train.batch_size: {batch_size} is smaller than dp x M = {dp} x {num_microbatches}; "
            f"give at least {dp * num_microbatches}{remedy}"
        )


def check_ranks(config: Config, *, local_size: int, world_size: int | None = None) -> None:
    """Refuses a pipeline that so many ranks of a node cannot hold.

    Raises:
        UserError: for ``pipe.initial_length``.
    """
    length = config.pipe.initial_length
    if not isinstance(length, int) or local_size % length == 0:
        return
    allowed = ", ".join(map(str, divisors(local_size)))
    is_one = world_size in (None, local_size)
    whole = "world size" if is_one else "number of ranks of a node, which holds whole pipelines:"
    more = f", or start {length} ranks (--ranks {length})" if length > local_size else ""
    raise UserError(
        f"pipe.initial_length: {length} does not divide the {whole} {local_size}; give one of {allowed}{more}"
    )


def _check_length(length: int, config: Config, *, world_size: int, local_size: int, num_units: int) -> None:
    units = f"{num_units} units (stem, {'blocks' if config.pipe.units == 'block' else 'halves of blocks'}, head)"
    check_ranks(config, local_size=local_size, world_size=world_size)
    if length > num_units:
        raise UserError(f"pipe.initial_length: {length} exceeds the {units} of the model; give at most {num_units}")
    per_rank = min(stages for _, stages in schedules_of(config))
    if length > 1 and length * per_rank > num_units:
        most = num_units // length
        remedy = f"at most {most}" if most > 1 else "a smaller pipe.initial_length, or pipe.schedule 1f1b"
        raise UserError(
            f"pipe.stages_per_rank: {per_rank} x pipe.initial_length {length} exceeds the {units} of the model; give "
            f"{remedy}"
        )
