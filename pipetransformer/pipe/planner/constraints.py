"""The limits that a plan must keep to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Constraints:
    """The limits of the search.

    Attributes:
        world_size: number of ranks of the job.
        global_batch_size: number of samples of a full global batch.
        schedules: allowed schedules, each with its stages per rank.
        num_microbatches: a fixed M; None for the planner's choice.
        plain_microbatches: likewise where there is no pipeline, in the place of it; None for the same.
        pipeline_lengths: allowed values of pp.
        memory_limit: bytes per rank; None for no limit.
        fixed_cut: boundaries to be kept as far as the prefix allows (AutoPipe switched off); None for a free cut.
        stem_frozen: whether the stem is frozen in every plan.
        shard: what replicas share out, in every plan.
        prefixes: places that the prefix may have; the first one that fits is taken, in the order of ``PREFIXES``.
    """

    world_size: int
    global_batch_size: int
    schedules: tuple[tuple[str, int], ...]
    num_microbatches: int | None
    pipeline_lengths: tuple[int, ...]
    memory_limit: int | None
    fixed_cut: tuple[int, ...] | None = None
    stem_frozen: bool = False
    prefixes: tuple[str, ...] = ("replicated",)
    shard: str = "none"
    plain_microbatches: int | None = None

    def fixed_microbatches(self, pp: int) -> int | None:
        """The fixed M of a pipeline of ``pp`` ranks; None for the planner's choice."""
        is_own = pp == 1 and self.plain_microbatches is not None
        return self.plain_microbatches if is_own else self.num_microbatches

    def share(self, pp: int) -> int:
        """Rows of a full global batch of each replica of a pipeline of ``pp`` ranks."""
        return -(-self.global_batch_size // (self.world_size // pp))


def divisors(number: int) -> tuple[int, ...]:
    """All divisors of ``number``, ascending."""
    return tuple(d for d in range(1, number + 1) if number % d == 0)
