"""Image datasets: pictures, resized, augmented and normalised a batch at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from pipetransformer.config import DataConfig
from pipetransformer.data.augmentation import TimmTransforms, own_draws, shifted_and_mirrored
from pipetransformer.data.dataset import Dataset
from pipetransformer.data.info import DataInfo
from pipetransformer.data.pictures import Pictures
from pipetransformer.data.prepared import Lead, Prepared, alone, prepared
from pipetransformer.data.reader import PictureReader, PictureSplit, reader_of
from pipetransformer.data.reading import Extent
from pipetransformer.errors import UserError


@dataclass(frozen=True, slots=True)
class ImagePreprocessing:
    """A model's expectations of its pictures.

    Attributes:
        size: height and width in pixels.
        channels: 1 (grey) or 3 (red, green, blue).
        mean, std: of each channel, for pixels in 0..1.
        interpolation: ``bicubic`` or ``bilinear``.
    """

    size: int
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str

    def __post_init__(self) -> None:
        if self.channels not in (1, 3):
            raise UserError(f"model: takes pictures of {self.channels} channels; 1 and 3 are supported")
        if self.interpolation not in ("bicubic", "bilinear"):
            raise UserError(f"model: wants {self.interpolation} interpolation; bicubic and bilinear are supported")
        assert len(self.mean) == len(self.std) == self.channels, self

    @classmethod
    def from_timm(cls, data_config: Mapping[str, Any], *, size: int) -> ImagePreprocessing:
        """From ``timm.data.resolve_model_data_config(model)``; ``size`` may differ from the size of pre-training."""
        channels = int(data_config["input_size"][0])
        mean, std = (tuple(map(float, data_config[name])) for name in ("mean", "std"))
        if channels == 1:  # timm gives colour statistics even to a grey model.
            mean, std = (sum(mean) / len(mean),), (sum(std) / len(std),)
        elif len(mean) == 1:  # a grey model that goes on with colours
            mean, std = mean * channels, std * channels
        return cls(size, channels, mean, std, data_config["interpolation"])


class ImageDataset(Dataset):
    """Pictures, prepared a batch at a time.

    Args:
        source: arrays ``labels`` int64 and ``extent``.
        pictures: the pictures themselves.
        seed: of the augmentation; None turns it off. With it, each picture is padded with black, cropped back at a
            random place and mirrored half of the time, as (seed, epoch, sample) say.
        transforms: what is done to training pictures in the place of that; None for that.
        settings: whatever tells in its ``repr`` what the transforms depend on.
        metric_names: those of ``Dataset``.
    """

    kind = "classes"
    num_tokens = None

    def __init__(
        self,
        source: Prepared,
        pictures: Pictures,
        *,
        preprocessing: ImagePreprocessing,
        seed: int | None,
        transforms: TimmTransforms | None = None,
        settings: object = None,
        metric_names: tuple[str, ...] = ("accuracy",),
    ) -> None:
        self.metric_names = metric_names
        self.labels = torch.from_numpy(source.arrays["labels"].copy())
        self.lengths = np.full(len(self.labels), preprocessing.size, dtype=np.int64)
        told = seed if transforms is None else settings
        self.fingerprint = hashlib.sha256(repr((source.digest, preprocessing, told)).encode()).hexdigest()
        self.views = 1 if seed is None else None
        self.extent = Extent(*source.arrays["extent"].tolist())
        self._pictures = pictures
        self._preprocessing = preprocessing
        self._seed = seed
        self._transforms = transforms
        std = torch.tensor(preprocessing.std, dtype=torch.float64).view(-1, 1, 1)
        mean = torch.tensor(preprocessing.mean, dtype=torch.float64).view(-1, 1, 1)
        self._scale = (1 / (255 * std)).float()
        self._shift = (mean / std).float()

    def with_views(self, views: int) -> ImageDataset:
        """The same pictures, of which each epoch sees one of ``views`` augmentations in turn."""
        found = copy(self)
        found.views = views
        found.fingerprint = hashlib.sha256(repr((self.fingerprint, views)).encode()).hexdigest()
        return found

    def inputs(
        self, ids: np.ndarray, *, length: int, epoch: int | None, keys: Collection[str] | None = None
    ) -> dict[str, torch.Tensor]:
        size = self._preprocessing.size
        assert length == size, (length, size)
        view = None if self._seed is None or epoch is None else epoch % (self.views or epoch + 1)
        if view is not None and self._transforms is not None:
            return {"pixel_values": self._transformed(ids, view=view)}
        pictures = self._pictures.batch(ids)
        if view is not None:
            pictures = shifted_and_mirrored(pictures, self._draws(view)[ids])
        if pictures.shape[-2:] != (size, size):
            mode = self._preprocessing.interpolation
            # The whole picture, where timm's evaluation would crop the centre: these pictures' objects fill the frame.
            # Note: on uint8 torch interpolates in whole numbers, as Pillow does: faster, and no row depends on others.
            pictures = F.interpolate(pictures, size=(size, size), mode=mode, antialias=True)
        return {"pixel_values": pictures.to(torch.float32).mul_(self._scale).sub_(self._shift)}

    def _transformed(self, ids: np.ndarray, *, view: int) -> torch.Tensor:
        assert self._transforms is not None
        with own_draws():
            return torch.stack(
                [self._transforms(self._pictures.one(each), view=view, number=each) for each in ids.tolist()]
            )

    def _draws(self, epoch: int) -> np.ndarray:
        """For every sample of the split, in 0..1: down, right, mirror ``[num_samples, 3]``.

        Drawn for all samples each time, which costs less than one resize, so that a sample's draw is its own.
        """
        return np.random.default_rng([self._seed or 0, epoch]).random((len(self), 3), dtype=np.float32)


def load_image_data(
    data: DataConfig, *, info: DataInfo, preprocessing: ImagePreprocessing, seed: int, lead: Lead = alone
) -> dict[str, Dataset]:
    """The splits ``train`` and ``eval`` of the dataset that ``data`` names, decoded once per node.

    Args:
        seed: of the augmentation, which only training pictures get.
    """
    reader: PictureReader = reader_of(data)
    splits: dict[str, Dataset] = {}
    for split in reader.splits:
        wanted = PictureSplit(
            split=split,
            label_names=info.label_names,
            max_samples=reader.max_samples(split),
            channels=preprocessing.channels,
            size=preprocessing.size,
            interpolation=preprocessing.interpolation,
        )
        source = prepared(partial(_key, reader, wanted), partial(_read, reader, wanted), lead=lead)
        is_augmented = split == "train" and data.augment != "none"
        by_timm = is_augmented and data.augment == "timm"
        splits[split] = ImageDataset(
            source,
            reader.opened(source.arrays, wanted),
            preprocessing=preprocessing,
            seed=seed if is_augmented else None,
            transforms=TimmTransforms(data, preprocessing, seed=seed) if by_timm else None,
            settings=(seed, data.crop_scale, data.rand_augment, data.color_jitter, data.erasing) if by_timm else None,
            metric_names=reader.metrics,
        )
        splits[split].place = str(reader.location or data.name)
    return splits


def _read(reader: PictureReader, wanted: PictureSplit) -> dict[str, np.ndarray]:
    """Raises UserError, also for a reader that reads more than what is drawn."""
    arrays, most = reader.read(wanted), wanted.max_samples
    if most is not None and (number := len(arrays["labels"])) > most:
        raise UserError(
            f"data.name: the reader of {reader.data.name} gave {number} pictures of {wanted.split} where {most} are "
            "wanted; read PictureSplit.rows alone"
        )
    taken = len(arrays["labels"])
    return {**arrays, "extent": np.array(Extent(taken, max([taken, *wanted.found])))}


def _key(reader: PictureReader, wanted: PictureSplit) -> object:
    """Everything that the prepared arrays depend on."""
    settings = (wanted.split, wanted.label_names, wanted.max_samples, wanted.channels)
    return ("pictures", reader.data.name, reader.digest(wanted), *settings)
