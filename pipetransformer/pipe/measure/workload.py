"""The shapes of the micro-batches that plans of a job may have, found from the batches of an epoch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pipetransformer.config import Config
from pipetransformer.data import Batch
from pipetransformer.pipe.planner.constraints import divisors
from pipetransformer.pipe.planner.microbatches import microbatch_choices

_RARE = 0.1
"""A padded length is not measured where fewer of the samples are as long, or as short."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The shapes of the micro-batches that plans of a job may have.

    Attributes:
        counts: number of samples by padded length.
        modal_length: padded length of most of the work.
        lengths: padded lengths to be measured: the modal one, and the one farthest from it that is not rare, if any.
        share: rows of a rank at pp = 1 and dp = world size.
        rows: all numbers of rows that a micro-batch may have, ascending.
        examples: a batch for each padded length (``full_batches``).
    """

    counts: Counter[int]
    modal_length: int
    lengths: tuple[int, ...]
    share: int
    rows: tuple[int, ...]
    examples: Mapping[int, Batch]

    @classmethod
    def of(cls, batches: Sequence[Batch], config: Config, *, num_ranks: int, local_size: int) -> Workload:
        """The workload of a job of this configuration.

        Args:
            batches: the global batches of an epoch.
            num_ranks: number of ranks of the job.
            local_size: number of ranks of a node; a pipeline never spans two nodes.
        """
        counts = Counter[int]()
        for batch in batches:
            counts[batch.length] += len(batch.ids)
        modal = min(counts, key=lambda length: (-counts[length] * length, length))
        shortest, longest = _middle(counts)
        far = max(shortest, longest, key=lambda length: (abs(length - modal), length))
        batch_size = config.train.batch_size
        share = -(-batch_size // num_ranks)
        rows = {share}
        for pp in divisors(local_size):
            replica_share = -(-batch_size // (num_ranks // pp))
            choices = microbatch_choices(replica_share, pp=pp, fixed=config.fixed_microbatches(pp))
            rows |= {-(-replica_share // m) for m in choices}
        lengths = (modal,) if far == modal else (modal, far)
        return cls(counts, modal, lengths, share, tuple(sorted(rows)), full_batches(batches))


def _middle(counts: Mapping[int, int]) -> tuple[int, int]:
    """The least length that enough samples do not exceed, and the greatest that enough reach."""
    lengths = sorted(counts)
    as_short = np.cumsum([counts[length] for length in lengths])
    as_long = np.cumsum([counts[length] for length in reversed(lengths)])
    enough = _RARE * as_short[-1]
    return lengths[int(np.argmax(as_short >= enough))], lengths[-1 - int(np.argmax(as_long >= enough))]


def full_batches(batches: Sequence[Batch]) -> dict[int, Batch]:
    """One batch for each padded length, all as large as the largest batch; samples are repeated where needed."""
    full = [max(map(len, parts)) for parts in zip(*(batch.parts for batch in batches))]
    longest = {batch.length: batch for batch in sorted(batches, key=len)}
    return {
        length: replace(batch, parts=tuple(np.resize(batch.ids, size) for size in full))
        for length, batch in longest.items()
    }
