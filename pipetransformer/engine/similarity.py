"""How alike some samples are to each other behind every block: plasticity is the change of that (Egeria, Wang et al.,
arXiv 2201.06227).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from pipetransformer.data import Batch
from pipetransformer.engine.executor import Executor
from pipetransformer.engine.feed import Feed
from pipetransformer.models import Chain
from pipetransformer.process.collectives import values_of_ranks

NUM_SAMPLES = 32
_DIGITS = 6  # so that a checkpoint, which holds them, stays small

_Rows = tuple[np.ndarray, np.ndarray]  # sample ids [rows], features [rows, width]


def watched_batches(in_order: Sequence[Batch]) -> list[Batch]:
    """The same samples each time, about ``NUM_SAMPLES``, of the padded length that most samples have, on their nodes.

    Args:
        in_order: batches of all samples, not shuffled.
    """
    counts: dict[int, int] = defaultdict(int)
    for batch in in_order:
        counts[batch.length] += len(batch)
    modal, found, missing = max(counts, key=lambda length: counts[length]), list[Batch](), NUM_SAMPLES
    for batch in (batch for batch in in_order if batch.length == modal):
        if missing > 0:
            each = -(-missing // len(batch.parts))
            found.append(replace(batch, parts=tuple(part[:each] for part in batch.parts)))
            missing -= len(found[-1])
    return found


def similarities(chain: Chain, executor: Executor, feed: Feed, *, batches: Sequence[Batch]) -> np.ndarray:
    """Collective. ``similarity`` of all samples of ``batches`` behind every block, float64 [blocks, samples, samples],
    the same on every rank; zeros behind a block that did not run, because the cache was read.

    The model must be in eval mode.
    """
    mine: dict[int, list[_Rows]] = defaultdict(list)
    with torch.no_grad():
        for batch in feed.batches(batches, epoch=0):
            leaving: dict[int, list[Tensor]] = defaultdict(list)  # of each micro-batch in turn
            with chain.watched(partial(_note, leaving)):
                feed.enter(batch)
                executor.evaluate(batch)
            for block, parts in leaving.items():
                mine[block].append((batch.ids[: batch.num_real], torch.cat(parts)[: batch.num_real].cpu().numpy()))
    count = sum(map(len, batches))
    found = np.zeros((chain.num_blocks, count, count))
    of_ranks = values_of_ranks(dict(mine))
    for block in range(chain.num_blocks):
        rows = [each for of_rank in of_ranks for each in of_rank.get(block, [])]
        ids = np.concatenate([part for part, _ in rows]) if rows else ()
        if len(ids) == count:
            features = np.concatenate([part for _, part in rows])
            found[block] = similarity(features[np.argsort(ids)]).round(_DIGITS)
    agreed = torch.from_numpy(found)
    dist.broadcast(agreed, src=0)
    return agreed.numpy()


def similarity(features: np.ndarray) -> np.ndarray:
    """Products of all pairs of samples, each row of length one [samples, samples] (Tung and Mori, arXiv 1907.09682).

    Args:
        features: outputs of a block [samples, width].
    """
    products = features @ features.T
    found: np.ndarray = products / np.linalg.norm(products, axis=1, keepdims=True)
    return found


def _note(leaving: dict[int, list[Tensor]], block: int, hidden: Tensor) -> None:
    leaving[block].append(_mean(hidden))


def _mean(hidden: Tensor) -> Tensor:
    """Over the positions, float64 [rows, width]."""
    return (hidden.flatten(1, -2).mean(1) if hidden.dim() > 2 else hidden).double()
