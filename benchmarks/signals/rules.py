"""Rules that say how many leading blocks could be frozen, each from one signal. Pure functions of plain numbers.

All numbers are of blocks [blocks], the first block first.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipetransformer.engine.similarity import similarity

__all__ = ["by_agreement", "by_change", "by_norm", "by_plasticity", "by_progress", "similarity_change"]

_AGREES = 0.1  # cosine: below it, two halves of the data pull a block in unrelated directions
_SETTLED = 0.5  # of a block's first plasticity


def by_norm(norms: Sequence[float]) -> int:
    """The blocks in front of that with the smallest gradient norm (PipeTransformer, arXiv 2102.03161, eq. 2)."""
    return int(np.argmin(norms))


def by_change(norms: Sequence[float], before: Sequence[float]) -> int:
    """The blocks in front of the first whose norm changes by the median or more (AutoFreeze, arXiv 2102.01386)."""
    changes = np.abs(np.subtract(norms, before)) / np.asarray(before)
    return int(np.argmax(changes >= np.median(changes)))


def by_agreement(cosines: Sequence[float]) -> int:
    """The leading blocks whose mean gradients on two halves of the data do not agree."""
    return _leading(np.asarray(cosines) < _AGREES)


def by_progress(progress: Sequence[float]) -> int:
    """The number that leaves the most progress for the cost of a step, frozen blocks cached (GreenTrainer, arXiv
    2309.13192).

    Args:
        progress: decrease of the next batch's loss by the update of a block, to first order.
    """
    left = np.cumsum(np.asarray(progress)[::-1])[::-1]
    return int(np.argmax(left / np.arange(len(left), 0, -1)))


def by_plasticity(first: Sequence[float], now: Sequence[float]) -> int:
    """The leading blocks whose outputs change by less than half of what they did (Egeria, arXiv 2201.06227)."""
    return _leading(np.asarray(now) < _SETTLED * np.asarray(first))


def similarity_change(features: np.ndarray, before: np.ndarray) -> float:
    """Plasticity: the mean squared change of the samples' similarity to each other (Tung and Mori, arXiv 1907.09682).

    Args:
        features: outputs of a block for some samples [samples, width].
        before: those of the reference.
    """
    return float(np.mean((similarity(features) - similarity(before)) ** 2))


def _leading(holds: np.ndarray) -> int:
    """The number of leading truths."""
    return len(holds) if holds.all() else int(np.argmin(holds))
