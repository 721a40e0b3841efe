"""The shapes of the micro-batches that plans of a job may have, found from the batches of an epoch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pipetransformer.data import Batch
from pipetransformer.pipe.planner.microbatches import microbatch_choices

_RARE = 0.1
"""A padded length with a smaller share of the samples is not measured."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The shapes of the micro-batches that plans of a job may have.

    Attributes:
        counts: number of samples by padded length.
        modal_length: padded length of most of the work.
        lengths: padded lengths to be measured: the modal one, and the frequent one that is farthest from it, if any.
        share: rows of a rank at pp = 1 and dp = world size.
        rows: all numbers of rows that a micro-batch may have, ascending.
    """

    counts: Counter[int]
    modal_length: int
    lengths: tuple[int, ...]
    share: int
    rows: tuple[int, ...]

    @classmethod
    def of(
        cls,
        batches: Sequence[Batch],
        *,
        global_batch_size: int,
        num_ranks: int,
        pipeline_lengths: Sequence[int],
        num_microbatches: int | None,
    ) -> Workload:
        """The workload of a job.

        Args:
            batches: the global batches of an epoch.
            global_batch_size: number of samples of a global batch.
            num_ranks: number of ranks of the job.
            pipeline_lengths: all pp that plans may have.
            num_microbatches: a fixed M; None for the planner's choice.
        """
        counts = samples_by_length(batches)
        modal = min(counts, key=lambda length: (-counts[length] * length, length))
        frequent = [length for length in sorted(counts) if counts[length] >= _RARE * sum(counts.values())]
        far = max(frequent, key=lambda length: (abs(length - modal), length), default=modal)
        share = -(-global_batch_size // num_ranks)
        rows = {share}
        for pp in pipeline_lengths:
            replica_share = -(-global_batch_size // (num_ranks // pp))
            choices = (num_microbatches,) if num_microbatches is not None else microbatch_choices(replica_share, pp=pp)
            rows |= {-(-replica_share // m) for m in choices}
        lengths = (modal,) if far == modal else (modal, far)
        return cls(counts, modal, lengths, share, tuple(sorted(rows)))


def samples_by_length(batches: Sequence[Batch]) -> Counter[int]:
    """Number of samples of each padded length."""
    counts = Counter[int]()
    for batch in batches:
        counts[batch.length] += len(batch.ids)
    return counts


def full_batches(batches: Sequence[Batch]) -> dict[int, Batch]:
    """One batch for each padded length, all as large as the largest batch; samples are repeated where needed."""
    full = [max(map(len, parts)) for parts in zip(*(batch.parts for batch in batches))]
    longest = {batch.length: batch for batch in sorted(batches, key=len)}
    return {
        length: replace(batch, parts=tuple(np.resize(batch.ids, size) for size in full))
        for length, batch in longest.items()
    }
