"""The number of blocks that a linear probe shows to be free. A pure function of its scores."""

from __future__ import annotations

from collections.abc import Sequence

STAGES = 6
"""Blocks freeze by sixths of the model."""
_NOISE = 0.03  # of a transfer: what scores of a few hundred samples show where there is none
_MUCH = 0.25


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
    """The number of leading blocks that may start frozen: a half where they hold a quarter of the task, else a sixth;
    none where they hold nothing of it.

    On SST-2's tuning rows a half cost nothing at a transfer of 0.3 (twelve blocks), while a third cost half a point
    at 0.14 (six blocks), where a sixth cost nothing.
    """
    found = transfer(scores)
    return 0 if found < _NOISE else -(-(len(scores) - 1) // (2 if found >= _MUCH else STAGES))


def blocks_at_start(scores: Sequence[float] | None, *, num_blocks: int, is_pretrained: bool) -> int:
    """The number of blocks to start with: ``free_blocks``, a sixth at least, which cost nothing wherever it was tried,
    and a sixth less than all at most; none of a model that is not pre-trained.

    Args:
        scores: as above; None for none.
    """
    if not is_pretrained:
        return 0
    sixth = -(-num_blocks // STAGES)
    return min(max(0 if scores is None else free_blocks(scores), sixth), num_blocks - sixth)
