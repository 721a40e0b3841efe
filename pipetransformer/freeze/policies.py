"""AutoFreeze's policies: how many leading blocks are frozen after interval T. Pure functions of plain numbers.

A policy is one small class with ``decide``. ``norms`` holds one number a block: the mean over the interval of the norm
of its data-parallel gradient before clipping (0 for frozen blocks); ``before`` those of the interval before it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from pipetransformer.errors import UserError

__all__ = ["PaperPolicy", "PercentilePolicy", "Policy", "SchedulePolicy", "StaticPolicy", "build_policy"]


class Policy(Protocol):
    """What AutoFreeze asks.

    Attributes:
        needs_norms: whether ``decide`` reads gradient norms (they cost one fused pass a step).
        may_unfreeze: whether n may ever shrink (then optimizer state of frozen blocks is kept).
    """

    needs_norms: ClassVar[bool]
    may_unfreeze: ClassVar[bool]

    def decide(
        self, interval: int, *, frozen: int, norms: Sequence[float] | None, before: Sequence[float] | None = None
    ) -> int:
        """n after ``interval`` (0, 1, ...) intervals since the warm-up, given the n of the interval before."""
        ...


@dataclass(frozen=True, slots=True)
class StaticPolicy:
    """Freezes ``count`` blocks once the warm-up is over."""

    count: int
    needs_norms: ClassVar[bool] = False
    may_unfreeze: ClassVar[bool] = False

    def decide(
        self, interval: int, *, frozen: int, norms: Sequence[float] | None, before: Sequence[float] | None = None
    ) -> int:
        return self.count


@dataclass(frozen=True, slots=True)
class SchedulePolicy:
    """n(T) = ceil(L (1 - (1 - alpha)^T)): what the code of PipeTransformer (arXiv 2102.03161) runs."""

    num_blocks: int
    alpha: float
    needs_norms: ClassVar[bool] = False
    may_unfreeze: ClassVar[bool] = False

    def decide(
        self, interval: int, *, frozen: int, norms: Sequence[float] | None, before: Sequence[float] | None = None
    ) -> int:
        return _ceil(self.num_blocks * (1.0 - (1.0 - self.alpha) ** interval))


@dataclass(frozen=True, slots=True)
class PaperPolicy:
    """n_T = min(ceil(n_{T-1} + alpha (L - n_{T-1})), argmin over l >= n_{T-1} of ||g_l||): arXiv 2102.03161, eq. 2.

    Blocks count from 0, so l = n_{T-1} is the first active block, and the blocks in front of the one with the smallest
    gradient are frozen. The cap is rounded up, as the schedule is: rounded down, it would stall before L.
    """

    num_blocks: int
    alpha: float
    needs_norms: ClassVar[bool] = True
    may_unfreeze: ClassVar[bool] = False

    def decide(
        self, interval: int, *, frozen: int, norms: Sequence[float] | None, before: Sequence[float] | None = None
    ) -> int:
        if interval == 0 or frozen == self.num_blocks:
            return frozen
        assert norms is not None and len(norms) == self.num_blocks
        cap = _ceil(frozen + self.alpha * (self.num_blocks - frozen))
        smallest = min(range(frozen, self.num_blocks), key=lambda block: (norms[block], block))
        return min(cap, smallest)


@dataclass(frozen=True, slots=True)
class PercentilePolicy:
    """Freezes the blocks in front of the first active one that still changes: AutoFreeze, arXiv 2102.01386, section 4.

    A block changes by |norm - norm before| / norm before. It still changes where that is at or above the
    ``percentile``-th percentile (linear interpolation) of all active blocks' changes, so that never all freeze at once.
    """

    num_blocks: int
    percentile: float
    needs_norms: ClassVar[bool] = True
    may_unfreeze: ClassVar[bool] = False

    def decide(
        self, interval: int, *, frozen: int, norms: Sequence[float] | None, before: Sequence[float] | None = None
    ) -> int:
        if norms is None or before is None or frozen == self.num_blocks:
            return frozen
        changes = [
            abs(now - then) / then if then > 0 else math.inf for now, then in zip(norms[frozen:], before[frozen:])
        ]
        threshold = _percentile(changes, self.percentile)
        return frozen + next(index for index, change in enumerate(changes) if change >= threshold)


def _percentile(values: Sequence[float], percent: float) -> float:
    """The ``percent``-th percentile of ``values``, linearly between neighbours."""
    ordered = sorted(values)
    position = percent / 100 * (len(ordered) - 1)
    low, high = ordered[math.floor(position)], ordered[math.ceil(position)]
    return low if low == high else low + (high - low) * (position - math.floor(position))


def _ceil(value: float) -> int:
    """Ceiling that forgives the rounding of (1 - alpha)^T: 12 (1 - 2/3) is 4, not 5."""
    return math.ceil(value - 1e-9)


def build_policy(
    name: str, *, num_blocks: int, alpha: float, max_frozen: int | None, percentile: float = 50.0
) -> Policy | None:
    """The policy that ``freeze.policy`` names; None for ``none``.

    Raises:
        UserError: if alpha is outside (0, 1) or more blocks than the model has are to be frozen.
    """
    if not 0.0 < alpha < 1.0:
        raise UserError(f"freeze.alpha: {alpha} is not allowed; give a number above 0 and below 1")
    if max_frozen is not None and not 0 <= max_frozen <= num_blocks:
        raise UserError(f"freeze.max_frozen: {max_frozen} is not allowed; the model has {num_blocks} blocks")
    if name == "none":
        return None
    if name == "static":
        return StaticPolicy(num_blocks if max_frozen is None else max_frozen)
    if name == "percentile":
        return PercentilePolicy(num_blocks, percentile)
    return (PaperPolicy if name == "paper" else SchedulePolicy)(num_blocks, alpha)
