"""What is known of a dataset before its samples are read, so that the model can be built first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipetransformer.data.cifar100 import CIFAR100_HUB_ID, cifar100_label_names
from pipetransformer.data.digits import DIGIT_NAMES
from pipetransformer.data.sources import locate
from pipetransformer.data.sst2 import SST2_NAMES
from pipetransformer.errors import UserError

if TYPE_CHECKING:
    from pipetransformer.config import DataConfig

__all__ = ["DataInfo", "describe"]


@dataclass(frozen=True, slots=True)
class DataInfo:
    """Class names; and, for pictures, their channels (None for texts)."""

    label_names: tuple[str, ...]
    channels: int | None


def describe(data: DataConfig) -> DataInfo:
    """Reads no sample: at most the metadata of one local file."""
    if data.name == "digits":
        return DataInfo(DIGIT_NAMES, channels=1)
    if data.name == "cifar100":
        names = cifar100_label_names(locate(data, default_hub_id=CIFAR100_HUB_ID))
        return DataInfo(names, channels=3)
    if data.name == "sst2":
        return DataInfo(SST2_NAMES, channels=None)
    raise UserError(f"data.name: {data.name} is not known; give digits, cifar100 or sst2")
