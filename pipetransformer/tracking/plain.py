"""Anything that a run reports, as plain JSON values."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Set
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from pipetransformer.errors import writing

__all__ = ["to_plain", "write_json"]


def to_plain(value: Any) -> Any:
    """``value`` as what ``json`` knows: dataclasses become objects, arrays and tensors lists, their scalars numbers.

    JSON has no NaN or infinity: they become the strings ``nan``, ``inf`` and ``-inf``, which ``float`` reads back.
    Raises TypeError for anything else.
    """
    if value is None or (isinstance(value, (bool, str)) and not isinstance(value, Enum)):
        return value
    if isinstance(value, Enum):
        return to_plain(value.value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Set):
        return [to_plain(item) for item in sorted(value)]
    if isinstance(value, (list, tuple, range)):
        return [to_plain(item) for item in value]
    if hasattr(value, "tolist"):  # numpy and torch: a scalar's is a number
        return to_plain(value.tolist())
    if hasattr(value, "item"):
        return to_plain(value.item())
    raise TypeError(f"{type(value).__name__} has no plain form")


def write_json(path: Path, value: Any) -> None:
    """Replace ``path`` at once: a reader sees the old file or the whole new one. Raises UserError."""
    part = path.with_name(path.name + ".part")
    with writing(path):
        with part.open("w", encoding="ascii") as file:
            file.write(json.dumps(to_plain(value), indent=2, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
