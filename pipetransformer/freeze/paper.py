"""The policy of PipeTransformer's paper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from pipetransformer.config.types import OpenShare, Section
from pipetransformer.freeze.policy import ceiling


@dataclass(frozen=True, slots=True)
class PaperPolicy:
    """n_T = min(ceil(n_{T-1} + alpha (L - n_{T-1})), argmin over l >= n_{T-1} of ||g_l||): arXiv 2102.03161, eq. 2.

    Blocks count from 0, so l = n_{T-1} is the first active block, and the blocks in front of the one with the smallest
    gradient are frozen. The cap is rounded up, as the schedule is: rounded down, it would stall before L.
    """

    class Options(Section):
        alpha: OpenShare

    num_blocks: int
    options: Options
    needs_norms: ClassVar[bool] = True
    may_unfreeze: ClassVar[bool] = False

    def decide(
        self, interval: int, *, frozen: int, norms: Sequence[float] | None, before: Sequence[float] | None = None
    ) -> int:
        if interval == 0 or frozen == self.num_blocks:
            return frozen
        assert norms is not None and len(norms) == self.num_blocks
        cap = ceiling(frozen + self.options.alpha * (self.num_blocks - frozen))
        smallest = min(range(frozen, self.num_blocks), key=lambda block: (norms[block], block))
        return min(cap, smallest)
