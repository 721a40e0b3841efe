"""Quantities that people write with a unit: intervals of training and sizes of memory."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

_INTERVAL = re.compile(r"(?P<count>[0-9]{1,15}) *(?P<unit>step|epoch)s?")
_SIZE = re.compile(r"(?P<number>[0-9]{1,15}(\.[0-9]+)?) *(?P<unit>[kmgt]i?b|b)", re.IGNORECASE)
_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}


@dataclass(frozen=True, slots=True)
class Interval:
    """A stretch of training. ``str`` gives the text that ``parse`` reads: ``1 epoch``, ``50 steps``."""

    count: int
    unit: Literal["step", "epoch"]

    @classmethod
    def parse(cls, text: str) -> Interval:
        """Raises ValueError for anything but a whole number, not negative, of steps or epochs."""
        match = _INTERVAL.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is no interval")
        return cls(count=int(match["count"]), unit="step" if match["unit"] == "step" else "epoch")

    def steps(self, steps_per_epoch: int) -> int:
        return self.count if self.unit == "step" else self.count * steps_per_epoch

    def __str__(self) -> str:
        return f"{self.count} {self.unit}" + ("" if self.count == 1 else "s")


def parse_num_bytes(text: str) -> int:
    """Read ``8 GiB`` (powers of 1024), ``500 MB`` (powers of 1000) or ``100 B``. Raises ValueError for other text."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no size")
    unit = match["unit"].lower()
    base = 1024 if "i" in unit else 1000
    return int(float(match["number"]) * base ** _POWERS.get(unit[0], 0))
