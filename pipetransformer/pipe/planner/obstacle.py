"""The reason why a job has no plan to start with, and the remedy, in one line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from pipetransformer.pipe.planner.constraints import Constraints
from pipetransformer.pipe.planner.microbatches import microbatch_choices
from pipetransformer.pipe.planner.partition import smallest_limit
from pipetransformer.plan import SHARDS


class Fits(Protocol):
    """Whether a plan meets the constraints with another memory limit, another M (None for any) and another shard."""

    def __call__(self, limit: int | None, microbatches: int | None, shard: str | None = None) -> bool: ...


def obstacle(
    first: Constraints, *, fits: Fits, limit_key: str | None, num_units: int, place_at: Callable[[int], str]
) -> str:
    """Memory, M, units, or the batch size.

    Args:
        first: constraints that no plan meets.
        fits: whether one does with others.
        limit_key: the setting that gives the memory limit; None for the device's own memory.
        num_units: number of units to be cut.
        place_at: gives the place of the prefix in the best plan under a memory limit; empty for no prefix.
    """
    lengths = ", ".join(map(str, first.pipeline_lengths))
    if (limit := first.memory_limit) is not None and fits(None, first.num_microbatches):
        least = smallest_limit(lambda limit: fits(limit, first.num_microbatches), refused=limit)
        what = f"{limit} bytes hold no layout of this model with a pipeline of {lengths}"
        others = SHARDS[SHARDS.index(first.shard) + 1 :]
        helps = next((f"dp.shard={shard}" for shard in others if fits(limit, first.num_microbatches, shard)), "")
        if limit_key is not None:
            place = f", with the prefix {place_at(least)}" if place_at(least) else ""
            return f"{limit_key}: {what}; give {helps}{', or ' if helps else ''}at least {least}{place}"
        remedy = helps or "pipe.recompute always, or more ranks"
        return f"device memory: {what}, which takes {least}; give {remedy}"
    choices = {m for pp in first.pipeline_lengths for m in microbatch_choices(first.share(pp), pp=pp)}
    if allowed := [m for m in sorted(choices) if fits(None, m)]:
        return (
            f"pipe.microbatches: {first.num_microbatches} suits no pipeline of {lengths} under "
            f"{', '.join(name for name, _ in first.schedules)}; give one of {', '.join(map(str, allowed))}"
        )
    num_stages = min(first.pipeline_lengths) * min(per_rank for _, per_rank in first.schedules)
    if num_stages > num_units:
        return (
            f"pipe.initial_length: a pipeline of {lengths} has {num_stages} stages or more, and the model "
            f"{num_units} units; give a shorter one"
        )
    return (
        f"train.batch_size: {first.global_batch_size} samples give no pipeline of {lengths} a micro-batch for each "
        f"rank; give at least {first.world_size}"
    )
