"""A fixed number of frozen blocks."""

from __future__ import annotations

from pydantic import field_validator

from pipetransformer.config.types import CountOrZero, Section
from pipetransformer.errors import UserError
from pipetransformer.freeze.policy import Policy, Signals


class StaticPolicy(Policy):
    """Freezes ``max_frozen`` blocks once the warm-up is over."""

    class Options(Section):
        max_frozen: CountOrZero

        @field_validator("max_frozen", mode="before")
        @classmethod
        def _is_given(cls, value: object) -> object:
            if value is None:
                raise UserError("freeze.max_frozen: missing; policy static freezes this many blocks")
            return value

    options: Options
    is_schedule = True

    def decide(self, signals: Signals) -> int:
        return self.options.max_frozen
