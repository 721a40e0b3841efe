"""A fixed number of frozen blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from pydantic import field_validator

from pipetransformer.config.types import CountOrZero, Section
from pipetransformer.errors import UserError


@dataclass(frozen=True, slots=True)
class StaticPolicy:
    """Freezes ``max_frozen`` blocks once the warm-up is over."""

    class Options(Section):
        max_frozen: CountOrZero

        @field_validator("max_frozen", mode="before")
        @classmethod
        def _is_given(cls, value: object) -> object:
            if value is None:
                raise UserError("freeze.max_frozen: missing; policy static freezes this many blocks")
            return value

    num_blocks: int
    options: Options
    needs_norms: ClassVar[bool] = False
    may_unfreeze: ClassVar[bool] = False

    def decide(
        self, interval: int, *, frozen: int, norms: Sequence[float] | None, before: Sequence[float] | None = None
    ) -> int:
        return self.options.max_frozen
