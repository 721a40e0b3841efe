"""Which reader a picture dataset has, and what its results depend on."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from pipetransformer.data.cifar import CIFAR, cifar_files, cifar_label_names, hub_digest, read_cifar
from pipetransformer.data.digits import DIGIT_NAMES, read_digits
from pipetransformer.data.image_folder import folder_files, folder_label_names, read_folder
from pipetransformer.data.prepared import file_digest
from pipetransformer.data.sources import locate, refuse_path
from pipetransformer.errors import UserError

if TYPE_CHECKING:
    from pipetransformer.config import DataConfig

__all__ = ["PictureReader", "picture_label_names"]

_RESAMPLING = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}


def picture_label_names(data: DataConfig) -> tuple[str, ...]:
    if data.name == "digits":
        return DIGIT_NAMES
    if data.name in CIFAR:
        return cifar_label_names(data.name, locate(data, default_hub_id=CIFAR[data.name].hub_id))
    return folder_label_names(_local_folder(data))


@dataclass(frozen=True, slots=True)
class PictureReader:
    """Reads one split for a model of ``channels`` channels and ``size`` pixels (which matters to folders alone)."""

    data: DataConfig
    split: str
    label_names: tuple[str, ...]
    max_samples: int | None
    channels: int
    size: int
    interpolation: str

    def key(self) -> object:
        """Everything that ``read`` depends on. What the hub gives may change under its id: it is read each time."""
        settings = (self.split, self.label_names, self.max_samples, self.channels)
        return ("pictures", self.data.name, self._content(), *settings)

    def read(self) -> dict[str, np.ndarray]:
        """``pictures`` uint8 ``[num_samples, channels, height, width]`` and ``labels`` int64."""
        data = self.data
        if data.name == "digits":
            refuse_path(data)
            pictures, labels = read_digits(train=self.split == "train", max_samples=self.max_samples)
            return {"pictures": np.repeat(pictures, self.channels, axis=1), "labels": labels}
        if data.name in CIFAR:
            return read_cifar(
                data.name,
                locate(data, default_hub_id=CIFAR[data.name].hub_id),
                split=self.split,
                label_names=self.label_names,
                max_samples=self.max_samples,
                channels=self.channels,
            )
        resample = _RESAMPLING[self.interpolation]
        return read_folder(self._files(), size=self.size, channels=self.channels, resample=resample)

    def _files(self) -> list[tuple[Path, int]]:
        folder = _local_folder(self.data)
        return folder_files(folder, split=self.split, label_names=self.label_names)[: self.max_samples]

    def _content(self) -> object:
        if self.data.name in CIFAR:
            location = locate(self.data, default_hub_id=CIFAR[self.data.name].hub_id)
            if not isinstance(location, Path):
                return hub_digest(self.data.name, location, split=self.split, max_samples=self.max_samples)
            files = cifar_files(self.data.name, location, split=self.split)
            return tuple(file_digest(path) for path in files if path.is_file())
        if self.data.name == "image_folder":
            stats = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path, _ in self._files()]
            return (stats, self.size, self.interpolation)
        arrays = self.read()
        return [hashlib.sha256(array.tobytes()).hexdigest() for array in arrays.values()]


def _local_folder(data: DataConfig) -> Path:
    if data.path is None:
        raise UserError("data.path: missing; give the folder that holds train and val")
    folder = locate(data, default_hub_id="")
    if not isinstance(folder, Path):
        raise UserError(f"data.path: {data.path} is no local folder; give the one that holds train and val")
    return folder
