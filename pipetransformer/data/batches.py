"""The samples of each global batch, and the rows of it that each pipeline replica trains on.

Pure numpy: the batches of an epoch depend on the samples' lengths, the seed and the epoch, never on how many ranks
share them, so step counts and learning rates survive every transition. Only ``replica_share`` looks at dp and M.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

_EDGES_OF_AN_OCTAVE = 4
_LEAST_STEP = 2  # between edges


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One global batch: all of its samples share one padded length.

    Attributes:
        index: position in the epoch.
        parts: sample ids of each node, int64 ``[num_real of the node]``; one part where samples are not tied to nodes.
        length: padded length (the bucket's edge; for images the constant that the dataset gives).
    """

    index: int
    parts: tuple[np.ndarray, ...]
    length: int

    @property
    def ids(self) -> np.ndarray:
        """Sample ids, int64 ``[num_real]``, node by node."""
        return np.concatenate(self.parts)

    def __len__(self) -> int:
        return sum(map(len, self.parts))


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

    The edges are fixed, so that a sample's length, on which its results depend, depends on that sample alone: 2, 4 and
    so on to 16, then four from each power of two to the next (20, 24, 28, 32, 40 ...). Closer ones would save little
    more padding, and make more batches that are not full.
    """
    assert num_tokens.max(initial=0) <= max_length, (num_tokens.max(initial=0), max_length)
    num_tokens = np.maximum(num_tokens, 1)
    power = 2 ** np.ceil(np.log2(num_tokens)).astype(np.int64)  # that holds the tokens
    step = np.maximum(power // 2 // _EDGES_OF_AN_OCTAVE, _LEAST_STEP)
    edges: np.ndarray = np.minimum(-(-num_tokens // step) * step, max_length).astype(np.int64)
    return edges


def samples_of_nodes(lengths: np.ndarray, *, num_nodes: int) -> np.ndarray:
    """The node that each sample belongs to for the whole run, int64 ``[num_samples]``: its cache holds it there.

    The samples of every padded length are dealt out in turn, so that a global batch takes alike from all nodes; a
    length goes on where the last one ended, so that no node is left without a sample where there are enough.
    """
    nodes = np.empty(len(lengths), dtype=np.int64)
    nodes[np.argsort(lengths, kind="stable")] = np.arange(len(lengths)) % num_nodes
    return nodes


def epoch_batches(
    lengths: np.ndarray,
    *,
    batch_size: int,
    seed: int,
    epoch: int,
    shuffle: bool = True,
    num_nodes: int = 1,
    is_tied: bool = True,
) -> tuple[Batch, ...]:
    """Cut an epoch into global batches, each sample exactly once and each batch from one length bucket.

    A bucket gives at most one batch that is shorter than ``batch_size``, or as many as there are nodes where samples
    are tied to nodes. With ``shuffle``, the samples within a bucket and the order of all batches are drawn from (seed,
    epoch); without, batches come longest first, samples by id.

    Args:
        lengths: padded length of each sample, ``[num_samples]``.
        num_nodes: samples stay with their node (``samples_of_nodes``); each gives its share of every batch.
        is_tied: whether a batch tells its nodes' parts apart; else the same samples are one part.
    """
    random = np.random.default_rng([seed, epoch])
    nodes = samples_of_nodes(lengths, num_nodes=num_nodes)
    cut: list[tuple[tuple[np.ndarray, ...], int]] = []
    for length in np.unique(lengths)[::-1]:
        queues = []
        for node in range(num_nodes):
            ids = np.flatnonzero((lengths == length) & (nodes == node))
            queues.append(random.permutation(ids) if shuffle else ids)
        turn = 0
        while any(map(len, queues)):
            shares = _shares(batch_size, num_nodes=num_nodes, turn=turn)
            parts = tuple(queue[:share] for queue, share in zip(queues, shares))
            if any(map(len, parts)):
                cut.append((parts, int(length)))
            queues = [queue[share:] for queue, share in zip(queues, shares)]
            turn += 1
    order = random.permutation(len(cut)) if shuffle else range(len(cut))
    batches = tuple(Batch(index, *cut[position]) for index, position in enumerate(order))
    return batches if is_tied else tuple(replace(batch, parts=(batch.ids,)) for batch in batches)


def _shares(batch_size: int, *, num_nodes: int, turn: int) -> list[int]:
    """Samples that each node gives to a batch; what the nodes do not divide goes round from turn to turn."""
    each, left = divmod(batch_size, num_nodes)
    extra = {(turn * left + number) % num_nodes for number in range(left)}
    return [each + (node in extra) for node in range(num_nodes)]


def replica_share(batch: Batch, *, dp: int, replica: int, num_microbatches: int) -> Share:
    """The contiguous rows of ``batch`` that pipeline replica ``replica`` of ``dp`` works on: of its own node's part.

    Every part is padded with copies of its own samples to the smallest multiple of (replicas a node) x M that holds the
    longest part; they are its last rows.
    """
    num_parts = len(batch.parts)
    assert dp % num_parts == 0, (dp, num_parts)
    own = dp // num_parts
    part = batch.parts[replica // own]
    multiple = own * num_microbatches
    rows = -(-max(map(len, batch.parts)) // multiple) * multiple // own
    first = replica % own * rows
    # np.resize repeats the ids cyclically, so that a batch smaller than dp x M fills up too.
    ids = np.resize(part if len(part) else batch.ids, rows * own)[first : first + rows]
    return Share(ids, num_real=min(max(len(part) - first, 0), rows))
