"""Folders of pictures: ``train/CLASS/*.png`` and ``val/CLASS/*.png``, any format that Pillow reads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from pipetransformer.data.pictures import FilePictures, Pictures, check_picture, digest_of, packed
from pipetransformer.data.reader import PictureReader, PictureSplit, parted
from pipetransformer.errors import UserError

_SPLITS = {"train": ("train",), "eval": ("val", "validation", "valid", "dev")}
SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm"})


class FolderReader(PictureReader):
    metrics = ("accuracy", "macro_f1")

    def label_names(self) -> tuple[str, ...]:
        """The folders of the training split, in the alphabet's order."""
        root = self._folder("train")
        names = tuple(path.name for path in _class_folders(root))
        if not names:
            raise UserError(f"data.path: {root} holds no folder; give one for each class")
        return names

    def read(self, wanted: PictureSplit) -> dict[str, np.ndarray]:
        """The files' names: a picture is decoded when a batch needs it, so that folders larger than memory train."""
        files, root = self._files(wanted), self._folder(wanted.split)
        for path, _ in files:
            check_picture(path)
        names = [str(path.relative_to(root)) for path, _ in files]
        labels = np.array([label for _, label in files], dtype=np.int64)
        return {**packed(names), "labels": labels, "digests": np.stack([digest_of(path) for path, _ in files])}

    def opened(self, arrays: Mapping[str, np.ndarray], wanted: PictureSplit) -> Pictures:
        return FilePictures(
            self._folder(wanted.split),
            arrays["names"],
            arrays["ends"],
            channels=wanted.channels,
            size=wanted.size,
            interpolation=wanted.interpolation,
        )

    def digest(self, wanted: PictureSplit) -> object:
        """Of the files' names, sizes and times, because reading them all would take as long as decoding."""
        stats = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path, _ in self._files(wanted)]
        return (stats, self.data.eval_fraction)

    def _files(self, wanted: PictureSplit) -> list[tuple[Path, int]]:
        """The pictures to read with their class, class by class."""
        root = self._folder(wanted.split)
        found: list[tuple[Path, int]] = []
        for directory in _class_folders(root):
            if directory.name not in wanted.label_names:
                raise UserError(f"{directory}: is no class of the training split")
            files = sorted(path for path in directory.rglob("*") if path.suffix.lower() in SUFFIXES)
            if others := [path for path in files if not path.is_file()]:  # a broken link, a folder, a pipe
                raise UserError(f"{others[0]}: is no file; delete it")
            if wanted.split == "train" and not files:
                raise UserError(f"{directory}: holds no pictures; give the class some, or leave it out")
            found += [(path, wanted.label_names.index(directory.name)) for path in files]
        if not found:
            raise UserError(f"{root}: holds no pictures; at least 1 is needed")
        if (fraction := self.data.eval_fraction) is not None:
            found = [found[row] for row in parted([label for _, label in found], fraction=fraction)[wanted.split]]
        return [found[row] for row in wanted.rows(len(found))]

    def _folder(self, split: str) -> Path:
        """The folder of a split; with ``data.eval_fraction``, that of both."""
        if self.data.path is None:
            raise UserError("data.path: missing; give the folder that holds train and val")
        folder = self.location
        if isinstance(folder, str):
            holds = "train and val" if self.data.eval_fraction is None else "a folder for each class"
            raise UserError(f"data.path: {folder} is no local folder; give the one that holds {holds}")
        given, apart = dict(self.data.splits), self.data.eval_fraction is None
        names = {name: [given[name]] if name in given else [*_SPLITS[name]] for name in ("train", "eval")}
        found = {name: [folder / each for each in names[name] if (folder / each).is_dir()] for name in names}
        if not apart:
            if found["eval"]:
                there = found["eval"][0]
                raise UserError(f"data.eval_fraction: {there} is there to evaluate on; leave one of them out")
            return found["train"][0] if found["train"] else folder
        if not found[split]:
            wanted = " or ".join(names[split])
            rest = "; if its folders are the classes, give data.eval_fraction=0.2" if not found["train"] else ""
            if split == "eval":
                test = ", or data.splits={eval: test}" if (folder / "test").is_dir() else ""
                rest = f"; give one, or data.eval_fraction=0.1 to keep a tenth of the training data{test}"
            if any(folder.glob("*.tar")):
                rest = "; shards of WebDataset are not read, as a stream has no order to resume by: unpack them"
            raise UserError(f"data.path: {folder} holds no folder {wanted}{rest}")
        return found[split][0]


def _class_folders(root: Path) -> list[Path]:
    """Hidden folders, which some tools leave behind, are no classes."""
    return sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
