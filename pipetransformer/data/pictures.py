"""Pictures before they are augmented: in an array, or in files of their own, which are decoded when they are read."""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from pipetransformer.data.reading import channels_first, decoded
from pipetransformer.errors import UserError

_ENDS = 2**16  # bytes
_LONGEST = 100  # longer side over the shorter one


class Pictures(ABC):
    """The pictures of a split, by number."""

    @abstractmethod
    def batch(self, ids: np.ndarray) -> Tensor:
        """Some of them, all of one size, uint8 ``[ids, channels, height, width]``. Raises UserError for a bad file."""

    @abstractmethod
    def one(self, number: int) -> Image.Image:
        """One of them, as large as it is, in colours. Raises UserError for a bad file."""


class ArrayPictures(Pictures):
    """Pictures of one size: uint8 ``[pictures, channels, height, width]``."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def batch(self, ids: np.ndarray) -> Tensor:
        return torch.from_numpy(self._array[ids])

    def one(self, number: int) -> Image.Image:
        pixels = self._array[number]
        return Image.fromarray(pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0)).convert("RGB")


class FilePictures(Pictures):
    """Pictures of any size, a file each, of which no more than a batch is held.

    Args:
        folder: the folder that their names begin at.
        names, ends: as ``packed`` gives them.
        size: height and width in pixels that ``batch`` brings them to, as timm evaluates: the shorter side is resized
            to it, and the middle is taken.
        interpolation: ``bicubic`` or ``bilinear``.
    """

    def __init__(
        self, folder: Path, names: np.ndarray, ends: np.ndarray, *, channels: int, size: int, interpolation: str
    ) -> None:
        self._folder, self._names, self._ends = folder, names, ends
        self._channels, self._size = channels, size
        self._resample = Image.Resampling[interpolation.upper()]

    def batch(self, ids: np.ndarray) -> Tensor:
        pixels = np.empty((len(ids), self._channels, self._size, self._size), dtype=np.uint8)
        for row, number in enumerate(ids.tolist()):
            pixels[row] = self._middle(self._path(number))
        return torch.from_numpy(pixels)

    def one(self, number: int) -> Image.Image:
        path = self._path(number)
        return decoded(path, channels=3, source=path)

    def _path(self, number: int) -> Path:
        first = int(self._ends[number - 1]) if number else 0
        return self._folder / os.fsdecode(self._names[first : int(self._ends[number])].tobytes())

    def _middle(self, path: Path) -> np.ndarray:
        picture, size = decoded(path, channels=self._channels, source=path), self._size
        scale = size / min(picture.size)
        wide, high = (max(size, round(side * scale)) for side in picture.size)
        left, top = (wide - size) // 2, (high - size) // 2
        small = picture.resize((wide, high), resample=self._resample)
        return channels_first(small.crop((left, top, left + size, top + size)))


def packed(names: Sequence[str]) -> dict[str, np.ndarray]:
    """Names of files as arrays: their bytes one behind the other, and where each ends."""
    encoded = [os.fsencode(name) for name in names]
    return {
        "names": np.frombuffer(b"".join(encoded), dtype=np.uint8),
        "ends": np.cumsum([len(name) for name in encoded], dtype=np.int64),
    }


def digest_of(path: Path) -> np.ndarray:
    """8 bytes that tell a file by its size, beginning and end: uint8 [8]. Small files are read whole; reading all of a
    large one would take as long as decoding it."""
    size = path.stat().st_size
    digest = hashlib.blake2b(str(size).encode(), digest_size=8)
    with path.open("rb") as file:
        digest.update(file.read(_ENDS))
        if size > _ENDS:
            file.seek(max(_ENDS, size - _ENDS))
            digest.update(file.read())
    return np.frombuffer(digest.digest(), dtype=np.uint8)


def check_picture(path: Path) -> None:
    """Refuses a file by its head, without decoding it.

    Raises:
        UserError: it is no picture that Pillow knows, or too long a strip to be scaled.
    """
    try:
        with Image.open(path) as opened:
            sides = opened.size
    except Exception as error:  # Pillow's decoders raise whatever their formats' parsers meet
        said = str(error).strip().partition("\n")[0][:200]
        raise UserError(f"{path}: the picture cannot be decoded ({said})") from error
    if max(sides) > _LONGEST * min(sides):
        told = " x ".join(map(str, sides))
        raise UserError(f"{path}: {told} pixels are too long a strip to be scaled; crop it, or delete it")
