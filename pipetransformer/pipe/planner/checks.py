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
    units = f"{num_units} units (stem, {'blocks' if pipe.units == 'block' else 'halves of blocks'}, head)"
    if isinstance(pipe.initial_length, int):
        if local_size % pipe.initial_length:
            allowed = ", ".join(str(d) for d in divisors(local_size))
            whole = (
                "world size" if local_size == world_size else "number of ranks of a node, which holds whole pipelines:"
            )
            raise UserError(
                f"pipe.initial_length: {pipe.initial_length} does not divide the {whole} {local_size}; "
                f"give one of {allowed}"
            )
        if pipe.initial_length > num_units:
            raise UserError(
                f"pipe.initial_length: {pipe.initial_length} exceeds the {units} of the model; give at most {num_units}"
            )
        per_rank = min(stages for _, stages in schedules_of(config))
        if pipe.initial_length > 1 and pipe.initial_length * per_rank > num_units:
            most = num_units // pipe.initial_length
            remedy = f"at most {most}" if most > 1 else "a smaller pipe.initial_length, or pipe.schedule 1f1b"
            raise UserError(
                f"pipe.stages_per_rank: {per_rank} x pipe.initial_length {pipe.initial_length} exceeds the {units} of "
                f"the model; give {remedy}"
            )
    first_dp = world_size // pipe.initial_length if isinstance(pipe.initial_length, int) else 1
    may_grow = config.freeze.policy != "none" and pipe.enabled and config.dp.enabled
    most_dp = world_size if may_grow or pipe.initial_length == "auto" else first_dp
    if isinstance(pipe.microbatches, int):
        num_microbatches = pipe.microbatches
    else:  # a pipeline needs one micro-batch for each rank, data parallelism one row for each replica
        num_microbatches = pipe.initial_length if isinstance(pipe.initial_length, int) and most_dp == first_dp else 1
    if batch_size < most_dp * num_microbatches:
        raise UserError(
            f"train.batch_size: {batch_size} is smaller than dp x M = {most_dp} x {num_microbatches}; "
            f"give at least {most_dp * num_microbatches}"
            + (", or fewer pipe.microbatches" if isinstance(pipe.microbatches, int) else "")
        )
