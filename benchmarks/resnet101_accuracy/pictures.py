"""The pictures of a run: CIFAR-100, held whole, or folders of classes, read as they are needed.

    FOLDER/train/CLASS/*.jpg    FOLDER/val/CLASS/*.jpg

Folders are read and augmented as the original reads ImageNet: a random part of 8 to 100 % of the picture, mirrored half
of the time, for training; the middle of the picture for evaluation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils import data as torch_data
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from pipetransformer.config import DataConfig
from pipetransformer.data import Dataset
from pipetransformer.data.images import ImagePreprocessing, load_image_data
from pipetransformer.data.info import describe
from pipetransformer.errors import UserError
from pipetransformer.process.collectives import led_by

__all__ = ["FolderPictures", "PictureSet", "Pictures", "batches", "find_pictures", "is_class_folders", "load_pictures"]

_SMALLEST_PART = 0.08
_LARGER = 256 / 224  # what the original resizes a picture to, of which it takes the middle
_IMAGENET_MEAN, _IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_CIFAR_MEAN, _CIFAR_STD = (0.507, 0.487, 0.441), (0.267, 0.256, 0.276)


@dataclass(frozen=True, slots=True)
class PictureSet:
    """The numbers of classes and pictures, and the pixels of a picture's side as the network sees it."""

    kind: Literal["CIFAR-100", "class folders"]
    num_classes: int
    num_train: int
    num_eval: int
    image_size: int


class Pictures(Protocol):
    """One split. ``labels``: int64 [num_samples]."""

    labels: Tensor

    def load(self, ids: Tensor, *, epoch: int) -> Tensor:
        """Normalised pixels [len(ids), 3, size, size]; the same for the same sample and epoch on every rank."""


def is_class_folders(folder: Path) -> bool:
    return (folder / "train").is_dir()


def find_pictures(folder: Path, *, image_size: int) -> PictureSet:
    """Of class folders. Raises UserError."""
    train, held_out = _image_folder(folder / "train"), _image_folder(folder / "val")
    if train.classes != held_out.classes:
        odd = sorted(set(train.classes) ^ set(held_out.classes))[0]
        raise UserError(f"--data: class {odd} is in one of {folder}'s train and val alone; give both the same classes")
    return PictureSet("class folders", len(train.classes), len(train), len(held_out), image_size)


def load_pictures(folder: Path, there: PictureSet) -> dict[str, Pictures]:
    """Collective. The splits ``train`` and ``eval``."""
    if there.kind == "class folders":
        train = FolderPictures(folder / "train", size=there.image_size, augmented=True)
        return {"train": train, "eval": FolderPictures(folder / "val", size=there.image_size, augmented=False)}
    data = DataConfig(
        name="cifar100", path=str(folder), max_train_samples=there.num_train, max_eval_samples=there.num_eval
    )
    preprocessing = ImagePreprocessing(there.image_size, 3, _CIFAR_MEAN, _CIFAR_STD, "bicubic")
    splits = load_image_data(data, info=describe(data), preprocessing=preprocessing, seed=0, lead=partial(led_by, 0))
    return {name: HeldPictures(split, size=there.image_size) for name, split in splits.items()}


class HeldPictures:
    def __init__(self, split: Dataset, *, size: int) -> None:
        self.labels = split.labels
        self._split = split
        self._size = size

    def load(self, ids: Tensor, *, epoch: int) -> Tensor:
        return self._split.inputs(ids.numpy(), length=self._size, epoch=epoch)["pixel_values"]


class FolderPictures:
    """Args: augmented: as for training. Raises UserError."""

    def __init__(self, folder: Path, *, size: int, augmented: bool) -> None:
        self._files = _image_folder(folder)
        self.labels = torch.tensor(self._files.targets)
        random = [v2.RandomResizedCrop(size, scale=(_SMALLEST_PART, 1.0)), v2.RandomHorizontalFlip()]
        middle = [v2.Resize(round(size * _LARGER)), v2.CenterCrop(size)]
        normalised = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(_IMAGENET_MEAN, _IMAGENET_STD)]
        self._transform = v2.Compose([*(random if augmented else middle), *normalised])

    def load(self, ids: Tensor, *, epoch: int) -> Tensor:
        return torch.stack([self._picture(int(sample), epoch=epoch) for sample in ids])

    def _picture(self, sample: int, *, epoch: int) -> Tensor:
        picture, _ = self._files[sample]
        with torch.random.fork_rng(devices=()):
            # Note: torch's generator on the CPU takes 32 bits of a seed.
            torch.manual_seed(int(np.random.SeedSequence((epoch, sample)).generate_state(1)[0]))
            pixels: Tensor = self._transform(picture)
        return pixels


class _Batches(torch_data.Dataset[tuple[Tensor, Tensor]]):
    """A batch by the numbers of its samples."""

    def __init__(self, pictures: Pictures, *, epoch: int) -> None:
        self._pictures = pictures
        self._epoch = epoch

    def __getitem__(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return self._pictures.load(ids, epoch=self._epoch), self._pictures.labels[ids]


def batches(
    pictures: Pictures, order: Sequence[Tensor], *, epoch: int, num_workers: int, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """Pictures and labels of the samples that each of ``order`` [rows] numbers; read ahead by ``num_workers``."""
    loader = torch_data.DataLoader(
        _Batches(pictures, epoch=epoch),
        sampler=order,
        batch_size=None,
        num_workers=num_workers,
        pin_memory=device.type == "cuda",
    )
    for inputs, target in loader:
        yield inputs.to(device, non_blocking=True), target.to(device, non_blocking=True)


def _image_folder(folder: Path) -> ImageFolder:
    try:
        return ImageFolder(folder)
    except OSError as error:  # a missing folder, no class in it, or a class without pictures
        reason = " ".join(str(error).split())
        raise UserError(f"--data: {folder} holds no class folders with pictures ({reason})") from error
