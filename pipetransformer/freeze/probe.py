"""The number of blocks that a linear probe shows to be free. A pure function of its scores."""

from __future__ import annotations

from collections.abc import Sequence


def transfer(scores: Sequence[float]) -> float:
    """The share of what the embeddings leave unexplained that the best boundary explains, 0 to 1.

    Where the best boundary tells hardly more of the labels than the embeddings do, the blocks hold little of the task:
    training must change them, and freezing them costs accuracy.

    Args:
        scores: share of the labels' variance that a linear head explains at every boundary, that behind the stem first
            [blocks + 1].
    """
    return (max(scores) - scores[0]) / (1.0 - scores[0]) if scores[0] < 1.0 else 0.0


def free_blocks(scores: Sequence[float]) -> int:
    """The number of leading blocks to start with: their share of all is the share that the blocks explain."""
    return round(transfer(scores) * (len(scores) - 1))
