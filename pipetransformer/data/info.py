"""What is known of a dataset before its samples are read, so that the model can be built first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipetransformer.data.glue import GLUE
from pipetransformer.data.pictures import picture_label_names
from pipetransformer.data.tables import table_label_names

if TYPE_CHECKING:
    from pipetransformer.config import DataConfig

__all__ = ["DataInfo", "describe"]


@dataclass(frozen=True, slots=True)
class DataInfo:
    """Class names (none of scores and spans); and, for pictures, their channels (None for texts)."""

    label_names: tuple[str, ...]
    channels: int | None


def describe(data: DataConfig) -> DataInfo:
    """Reads metadata, and of a user's own table its labels. Raises UserError."""
    if data.name in GLUE:
        return DataInfo(GLUE[data.name].names, channels=None)
    if data.name == "squad":
        return DataInfo((), channels=None)
    if data.name == "table":
        return DataInfo(table_label_names(data), channels=None)
    return DataInfo(picture_label_names(data), channels=1 if data.name == "digits" else 3)
