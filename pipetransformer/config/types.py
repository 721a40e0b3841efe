"""The types of a configuration's keys: what a value may be, and how it is read and written."""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge, Gt, Le, Lt
from pydantic import AfterValidator, BaseModel, ConfigDict, PlainSerializer, PlainValidator, StringConstraints

from pipetransformer.config.quantities import Interval, parse_num_bytes
from pipetransformer.config.words import Allowed, Roof


def _interval(value: object) -> Interval:
    interval = Interval.parse(value) if isinstance(value, str) else value
    if not isinstance(interval, Interval) or interval.count < 0:
        raise ValueError
    return interval


def _positive(interval: Interval) -> Interval:
    if not interval.count:
        raise ValueError
    return interval


def _num_bytes(value: object) -> int:
    num_bytes = parse_num_bytes(value) if isinstance(value, str) else value
    if not isinstance(num_bytes, int) or isinstance(num_bytes, bool) or not 0 < num_bytes < 2**63:
        raise ValueError
    return num_bytes


_MOST = 2**31 - 1

Text = Annotated[str, StringConstraints(min_length=1, pattern=r"^[^\x00]*$")]
FolderName = Annotated[
    str,
    StringConstraints(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]*$"),
    Allowed("letters, digits and . _ - (not . at the start)"),
]
Count = Annotated[int, Ge(1), Le(_MOST), Roof]
CountOrZero = Annotated[int, Ge(0), Le(_MOST), Roof]
Positive = Annotated[float, Gt(0)]
Seconds = Annotated[float, Gt(0), Le(_MOST), Roof]
NotNegative = Annotated[float, Ge(0)]
Share = Annotated[float, Ge(0), Lt(1)]
OpenShare = Annotated[float, Gt(0), Lt(1)]
Part = Annotated[float, Gt(0), Le(1)]
Percent = Annotated[float, Ge(0), Le(100)]
_Interval = Annotated[Interval, PlainValidator(_interval), PlainSerializer(str)]
Every = Annotated[_Interval, AfterValidator(_positive), Allowed('a positive interval such as "1 epoch" or "50 steps"')]
Warmup = Annotated[_Interval, Allowed('an interval, not negative, such as "0 steps", "50 steps" or "1 epoch"')]
NumBytes = Annotated[
    int,
    PlainValidator(_num_bytes),
    Allowed('a size of at least 1 byte, such as "8 GiB", "500 MB" or a number of bytes'),
]


def as_tuple(value: object) -> object:
    """A list of YAML as the tuple that a frozen section holds; anything else as it is."""
    return tuple(value) if isinstance(value, list) else value


class Section(BaseModel):
    """A frozen set of keys: unknown ones are refused, and so is a value of another type (``"3"`` for 3)."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
