"""The number of blocks that a linear probe shows to be free. A pure function of its scores."""

from __future__ import annotations

import math
from collections.abc import Sequence

STAGES = 6
"""Blocks freeze by sixths of the model."""
_NOISE = 0.03  # of a transfer: what scores of a few hundred samples show where there is none


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
    """The number of leading blocks to start with: as large a share of all, in sixths, as they explain; rounded up."""
    found = transfer(scores)
    return 0 if found < _NOISE else math.ceil((len(scores) - 1) * math.ceil(STAGES * found - 1e-9) / STAGES)
