"""The number of blocks that a linear probe shows to be free. A pure function of its scores."""

from __future__ import annotations

from collections.abc import Sequence

STAGES = 6
"""Blocks freeze by sixths of the model."""
NOISE = 0.03
"""Of a transfer: what scores of a few hundred samples show where there is none."""
NEARLY_ALL = 0.95
"""Of the labels' variance: where the embeddings tell more, what is left is too little to tell anything by."""
SOME = 0.1
"""Of a transfer: between this and a quarter few blocks may freeze, late."""
_MUCH = 0.25  # of a transfer: from here on some blocks are free
LATE = 0.05
"""Of the sum of all learning rates: once no more is to come, most blocks may freeze."""


def transfer(scores: Sequence[float]) -> float:
    """The share of what the embeddings leave unexplained that the best boundary explains, 0 to 1; where they leave next
    to nothing, so that nothing is known of the blocks, 0.

    Where the best boundary tells hardly more of the labels than the embeddings do, the blocks hold little of the task:
    training must change them, and freezing them costs accuracy.

    Args:
        scores: share of the labels' variance that a linear head explains at every boundary, that behind the stem first
            [blocks + 1].
    """
    return (max(scores) - scores[0]) / (1.0 - scores[0]) if scores[0] <= NEARLY_ALL else 0.0


def free_blocks(scores: Sequence[float] | None, *, num_blocks: int, is_pretrained: bool, to_come: float = 1.0) -> int:
    """The number of leading blocks that the probe shows to be free. Where they hold a quarter of the task: a third of
    them from the first step on, and all but a sixth, which always trains, once no more than a twentieth of the sum of
    the learning rates is to come. Where they hold less, where nothing is known, and of a model that is not
    pre-trained: none.

    Where it was tried: ``docs/results.md``, "How the default freezes". There half of the blocks of e5-small, which hold
    more than a quarter, cost accuracy from the first step on and from the middle of the learning rates' sum on; and a
    sixth of MiniLM's blocks, which hold less, from the first step on.

    Args:
        scores: as above; None for none.
        to_come: share of the sum of all learning rates that lies ahead.
    """
    if not is_pretrained or scores is None or transfer(scores) < _MUCH:
        return 0
    most = num_blocks + num_blocks // -STAGES
    return most if to_come <= LATE else min(-(-2 * num_blocks // STAGES), most)
