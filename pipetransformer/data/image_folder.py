"""Folders of pictures: ``train/CLASS/*.png`` and ``val/CLASS/*.png``, any format that Pillow reads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from pipetransformer.data.reader import PictureReader, PictureSplit
from pipetransformer.data.reading import locate, one_line
from pipetransformer.errors import UserError

_SPLITS = {"train": ("train",), "eval": ("val", "validation", "dev", "test")}
_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm"})
_RESAMPLING = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}


class FolderReader(PictureReader):
    def label_names(self) -> tuple[str, ...]:
        return folder_label_names(self._folder())

    def read(self, wanted: PictureSplit) -> dict[str, np.ndarray]:
        resample = _RESAMPLING[wanted.interpolation]
        return read_folder(self._files(wanted), size=wanted.size, channels=wanted.channels, resample=resample)

    def digest(self, wanted: PictureSplit) -> object:
        """Of the files' names, sizes and times, because reading them all would take as long as decoding."""
        stats = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path, _ in self._files(wanted)]
        return (stats, wanted.size, wanted.interpolation)

    def _files(self, wanted: PictureSplit) -> list[tuple[Path, int]]:
        return folder_files(self._folder(), split=wanted.split, label_names=wanted.label_names)[: wanted.max_samples]

    def _folder(self) -> Path:
        if self.data.path is None:
            raise UserError("data.path: missing; give the folder that holds train and val")
        folder = locate(self.data, default_hub_id="")
        if not isinstance(folder, Path):
            raise UserError(f"data.path: {self.data.path} is no local folder; give the one that holds train and val")
        return folder


def folder_label_names(folder: Path) -> tuple[str, ...]:
    """The classes: the folders of the training split, in the alphabet's order."""
    names = tuple(path.name for path in _class_folders(_split_folder(folder, "train")))
    if not names:
        raise UserError(f"data.path: {folder}/train holds no folder; give one for each class")
    return names


def folder_files(folder: Path, *, split: str, label_names: tuple[str, ...]) -> list[tuple[Path, int]]:
    """Pictures of a split with their class, in an order that mixes the classes and is always the same."""
    root = _split_folder(folder, split)
    found: list[tuple[Path, int]] = []
    for directory in _class_folders(root):
        if directory.name not in label_names:
            raise UserError(f"{directory}: is no class of the training split")
        files = sorted(path for path in directory.rglob("*") if path.suffix.lower() in _SUFFIXES)
        if split == "train" and not files:
            raise UserError(f"{directory}: holds no pictures; give the class some, or leave it out")
        found += [(path, label_names.index(directory.name)) for path in files]
    if not found:
        raise UserError(f"{root}: holds no pictures; at least 1 is needed")
    order = np.random.RandomState(0).permutation(len(found))  # a leading part is then a fair sample
    return [found[index] for index in order]


def read_folder(files: list[tuple[Path, int]], *, size: int, channels: int, resample: int) -> dict[str, np.ndarray]:
    """``pictures`` uint8 ``[num_samples, channels, size, size]`` and ``labels`` int64.

    As timm evaluates: the shorter side is resized to ``size`` and the middle is taken.
    """
    pictures = np.empty((len(files), channels, size, size), dtype=np.uint8)
    for row, (path, _) in enumerate(files):
        try:
            with Image.open(path) as opened:
                picture = opened.convert("L" if channels == 1 else "RGB")
        except Exception as error:  # Pillow's decoders raise whatever their formats' parsers meet
            raise UserError(f"{path}: the picture cannot be decoded ({one_line(error)})") from error
        scale = size / min(picture.size)
        wide, high = (max(size, round(side * scale)) for side in picture.size)
        left, top = (wide - size) // 2, (high - size) // 2
        small = picture.resize((wide, high), resample=Image.Resampling(resample))
        cropped = np.asarray(small.crop((left, top, left + size, top + size)))
        pictures[row] = cropped[None] if channels == 1 else cropped.transpose(2, 0, 1)
    return {"pictures": pictures, "labels": np.array([label for _, label in files], dtype=np.int64)}


def _class_folders(root: Path) -> list[Path]:
    """Hidden folders, which some tools leave behind, are no classes."""
    return sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))


def _split_folder(folder: Path, split: str) -> Path:
    found = [folder / name for name in _SPLITS[split] if (folder / name).is_dir()]
    if not found:
        raise UserError(f"data.path: {folder} holds no folder {' or '.join(_SPLITS[split])}")
    return found[0]
