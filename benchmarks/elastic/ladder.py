"""A policy to choose the default by: so many blocks are frozen from each share of the learning rates' sum on."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator

from pipetransformer.config import Section
from pipetransformer.freeze import Policy, Signals

__all__ = ["Ladder"]


def _pairs(value: object) -> object:
    return tuple(map(tuple, value)) if isinstance(value, list) else value


class Ladder(Policy):
    """n is that of the last of ``steps`` whose share of the sum of all learning rates is still to come, or less."""

    class Options(Section):
        steps: Annotated[tuple[tuple[float, int], ...], BeforeValidator(_pairs)]

    options: Options

    def decide(self, signals: Signals) -> int:
        return max((frozen for share, frozen in self.options.steps if signals.to_come <= share), default=0)
