"""What is known of a dataset before its samples are read, so that the model can be built first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipetransformer.data.cifar100 import CIFAR100_HUB_ID, cifar100_label_names
from pipetransformer.data.digits import DIGIT_NAMES
from pipetransformer.data.glue import GLUE
from pipetransformer.data.sources import locate
from pipetransformer.data.tables import table_label_names

if TYPE_CHECKING:
    from pipetransformer.config import DataConfig

__all__ = ["DataInfo", "describe"]


@dataclass(frozen=True, slots=True)
class DataInfo:
    """Class names; and, for pictures, their channels (None for texts)."""

    label_names: tuple[str, ...]
    channels: int | None


def describe(data: DataConfig) -> DataInfo:
    """Reads metadata, and of a user's own table its labels."""
    if data.name == "digits":
        return DataInfo(DIGIT_NAMES, channels=1)
    if data.name == "cifar100":
        names = cifar100_label_names(locate(data, default_hub_id=CIFAR100_HUB_ID))
        return DataInfo(names, channels=3)
    if data.name in GLUE:
        return DataInfo(GLUE[data.name].names, channels=None)
    return DataInfo(table_label_names(data), channels=None)
