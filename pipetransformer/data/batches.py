"""Which samples make up each global batch, and which of its rows each pipeline replica trains on.

Pure numpy: the batches of an epoch depend on the samples' lengths, the seed and the epoch, never on how many ranks
share them, so step counts and learning rates survive every transition. Only ``replica_share`` looks at dp and M.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["Batch", "Share", "bucket_edges", "epoch_batches", "replica_share"]

_FIRST_EDGES = np.array([8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512])
_EDGE_STEP = 256


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One global batch: all of its samples share one padded length.

    Attributes:
        index: position in the epoch.
        ids: sample ids, int64 ``[num_real]``.
        length: padded length (the bucket's edge; for images the constant that the dataset gives).
    """

    index: int
    ids: np.ndarray
    length: int


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """One replica's rows of a global batch.

    Attributes:
        ids: sample ids, int64 ``[rows]``; a multiple of M.
        num_real: how many leading rows count; the rest are copies that only fill the shape and weigh zero.
    """

    ids: np.ndarray
    num_real: int


def bucket_edges(num_tokens: np.ndarray, *, max_length: int) -> np.ndarray:
    """The padded length of each sample: the smallest edge that holds its tokens, at most ``max_length``.

    The edges are fixed, so that a sample's length, on which its results depend, depends on that sample alone.
    """
    assert num_tokens.max(initial=0) <= max_length, (num_tokens.max(initial=0), max_length)
    table = _FIRST_EDGES[np.searchsorted(_FIRST_EDGES, num_tokens).clip(max=len(_FIRST_EDGES) - 1)]
    beyond = -(-num_tokens // _EDGE_STEP) * _EDGE_STEP
    return np.minimum(np.where(num_tokens > _FIRST_EDGES[-1], beyond, table), max_length).astype(np.int64)


def epoch_batches(
    lengths: np.ndarray, *, batch_size: int, seed: int, epoch: int, shuffle: bool = True
) -> tuple[Batch, ...]:
    """Cut an epoch into global batches, each sample exactly once and each batch from one length bucket.

    A bucket gives at most one batch that is shorter than ``batch_size``. With ``shuffle``, the samples within a bucket
    and the order of all batches are drawn from (seed, epoch); without, batches come longest first, samples by id.

    Args:
        lengths: padded length of each sample, ``[num_samples]``.
    """
    random = np.random.default_rng([seed, epoch])
    cut: list[tuple[np.ndarray, int]] = []
    for length in np.unique(lengths)[::-1]:
        ids = np.flatnonzero(lengths == length)
        if shuffle:
            ids = random.permutation(ids)
        cut += [(ids[start : start + batch_size], int(length)) for start in range(0, len(ids), batch_size)]
    order = random.permutation(len(cut)) if shuffle else range(len(cut))
    return tuple(Batch(index, *cut[position]) for index, position in enumerate(order))


def replica_share(batch: Batch, *, dp: int, replica: int, num_microbatches: int) -> Share:
    """The contiguous rows of ``batch`` that pipeline replica ``replica`` of ``dp`` works on.

    The batch is padded with copies of its own samples to the smallest multiple of dp x M; they are its last rows.
    """
    num_real = len(batch.ids)
    multiple = dp * num_microbatches
    rows = -(-num_real // multiple) * multiple // dp
    first = replica * rows
    # np.resize repeats the ids cyclically, so that a batch smaller than dp x M fills up too.
    ids = np.resize(batch.ids, rows * dp)[first : first + rows]
    return Share(ids, num_real=min(max(num_real - first, 0), rows))
