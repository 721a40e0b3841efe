"""The micro-batches that a job may come to compute, found from an epoch's batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pipetransformer.data import Batch
from pipetransformer.pipe.planner.search import microbatch_choices

__all__ = ["Workload", "full_batches", "samples_by_length"]

_RARE = 0.1
"""A padded length of a smaller share of samples is not measured."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Which micro-batches a job may come to compute.

    Attributes:
        counts: samples by padded length. modal_length: the one that most of the work has. lengths: those to be
            measured: the modal one, and one far from it if there is one that is not rare.
        share: rows of a rank where all are replicas. rows: of a micro-batch, all that plans may take.
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
        microbatches: int | None,
    ) -> Workload:
        """Args: batches: an epoch's. microbatches: a fixed M, or None."""
        counts = samples_by_length(batches)
        modal = min(counts, key=lambda length: (-counts[length] * length, length))
        frequent = [length for length in sorted(counts) if counts[length] >= _RARE * sum(counts.values())]
        far = max(frequent, key=lambda length: (abs(length - modal), length), default=modal)
        share = -(-global_batch_size // num_ranks)
        rows = {share}
        for pp in pipeline_lengths:
            replica_share = -(-global_batch_size // (num_ranks // pp))
            choices = (microbatches,) if microbatches is not None else microbatch_choices(replica_share, pp=pp)
            rows |= {-(-replica_share // m) for m in choices}
        lengths = (modal,) if far == modal else (modal, far)
        return cls(counts, modal, lengths, share, tuple(sorted(rows)))


def samples_by_length(batches: Sequence[Batch]) -> Counter[int]:
    counts = Counter[int]()
    for batch in batches:
        counts[batch.length] += len(batch.ids)
    return counts


def full_batches(batches: Sequence[Batch]) -> dict[int, Batch]:
    """A batch of every padded length, with as many samples as the largest has (repeated where there are too few)."""
    full = [max(map(len, parts)) for parts in zip(*(batch.parts for batch in batches))]
    longest = {batch.length: batch for batch in sorted(batches, key=len)}
    return {
        length: replace(batch, parts=tuple(np.resize(batch.ids, size) for size in full))
        for length, batch in longest.items()
    }
