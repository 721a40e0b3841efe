"""The policies of AutoFreeze: the number of leading blocks frozen after interval T. Pure functions of plain numbers.

A policy is one class in one file, an entry of ``config/policies.py`` or the user's own.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from pipetransformer.config import FreezeConfig, Section
from pipetransformer.config.policies import chosen_policy
from pipetransformer.errors import UserError


@dataclass(frozen=True, slots=True)
class Payoff:
    """Predicted seconds of the rest of a run with more blocks frozen.

    Attributes:
        saved: fewer seconds of steps; below 0 for more.
        spent: seconds of the transition, and those that the advance pass and evaluations take more.
    """

    saved: float
    spent: float


@dataclass(frozen=True, slots=True)
class Signals:
    """All that a policy may look at: plain numbers, the same on all ranks.

    Attributes:
        interval: number of intervals since the warm-up (T = 0, 1, ...).
        frozen: number of frozen blocks now.
        norms: mean over the interval of the norm of each block's data-parallel gradient before clipping, 0 for frozen
            blocks [blocks]; None before there is any.
        before: those of the interval before; None likewise.
        scores: share of the labels' variance that a linear head explains at every boundary before training, that behind
            the stem first [blocks + 1]; None where no one has asked for it, and for questions.
        is_pretrained: whether training began with published weights.
        is_watched: whether the guard will judge what freezes.
        undone: number of freezes that the guard has undone.
        plasticity: mean squared change, since the last decision, of some samples' similarity to each other behind each
            block [blocks]; None for a block that the cache spared at one of both, and for a policy that needs none.
        most_plastic: the most that it was of each block [blocks]; None likewise.
        rate: learning rate of the next step, over the highest.
        rate_frozen: that at the freeze of the first blocks that are frozen now.
        to_come: share of the sum of all learning rates that lies ahead, 1 to 0: how far the weights may still move.
        payoff: gives the predicted payoff of so many frozen blocks; None where nothing is predicted. All ranks must ask
            about the same numbers.
    """

    interval: int
    frozen: int
    norms: Sequence[float] | None = None
    before: Sequence[float] | None = None
    scores: Sequence[float] | None = None
    is_pretrained: bool = True
    is_watched: bool = False
    undone: int = 0
    to_come: float = 1.0
    plasticity: Sequence[float | None] | None = None
    most_plastic: Sequence[float | None] | None = None
    rate: float = 1.0
    rate_frozen: float = 1.0
    payoff: Callable[[int], Payoff] | None = None


class Policy(ABC):
    """Made as ``Class(num_blocks, options=Options(...))``; a class of a user's own need not derive from it.

    Attributes:
        Options: its keys, those of ``freeze`` that it reads or, for a user's own, those of ``freeze.options``.
        needs_norms: whether ``decide`` reads gradient norms (they cost one fused pass a step).
        needs_probe: whether ``decide`` reads the scores of the linear probe.
        needs_plasticity: whether ``decide`` reads plasticity (it costs a forward of some samples a decision).
        is_schedule: whether ``decide`` looks at the interval alone.
        may_unfreeze: whether n may ever shrink (then optimizer state of frozen blocks is kept).
        first_interval: the first interval whose answer may freeze anything.
        fewest_norms: number of intervals with norms that lie before such an answer; a warm-up is one.
    """

    Options: ClassVar[type[Section]]
    needs_norms: ClassVar[bool] = False
    needs_probe: ClassVar[bool] = False
    needs_plasticity: ClassVar[bool] = False
    is_schedule: ClassVar[bool] = False
    may_unfreeze: ClassVar[bool] = False
    first_interval: ClassVar[int] = 0
    fewest_norms: ClassVar[int] = 0

    def __init__(self, num_blocks: int, *, options: Any) -> None:
        self.num_blocks, self.options = num_blocks, options

    @property
    def most(self) -> int:
        """The most blocks that it may ever freeze."""
        return self.num_blocks

    def may_freeze_later(self, signals: Signals) -> bool:
        """Whether it may ask for more blocks behind the first step, as far as ``signals`` of the start tell."""
        return True

    @abstractmethod
    def decide(self, signals: Signals) -> int:
        """The number of leading blocks to be frozen from now on (n)."""


def build_policy(config: FreezeConfig, *, num_blocks: int) -> Policy | None:
    """The policy that ``freeze.policy`` names; None for ``none``.

    Raises:
        UserError: if it or its options are not as they should be, or more blocks than the model has are to be frozen.
    """
    if config.max_frozen is not None and not 0 <= config.max_frozen <= num_blocks:
        raise UserError(
            f"freeze.max_frozen: {config.max_frozen} is not allowed; give at most {num_blocks}, which are all blocks"
        )
    chosen = chosen_policy(config)
    if chosen is None:
        return None
    policy, options = chosen
    built: Policy = policy(num_blocks, options=options)
    return built


def ceiling(value: float) -> int:
    """Ceiling that forgives the rounding of (1 - alpha)^T: 12 (1 - 2/3) is 4, not 5."""
    return math.ceil(value - 1e-9)
