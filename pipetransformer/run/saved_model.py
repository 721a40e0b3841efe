"""The trained model as a folder in the format of its library."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor

from pipetransformer.errors import writing
from pipetransformer.models import BuiltModel
from pipetransformer.process.shutdown import cleaned_up

_PART = ".part"


def _give_usual_permissions(folder: Path) -> None:
    """Sets the permissions that the umask asks for.

    Note: safetensors makes files that only their owner can read, whatever the umask is.
    """
    umask = os.umask(0)
    os.umask(umask)
    for path in folder.rglob("*"):
        path.chmod((0o777 if path.is_dir() else 0o666) & ~umask)


def save_model(built: BuiltModel, folder: Path, units: Iterator[Mapping[str, Tensor]]) -> None:
    """Writes the model in the format of its library. A reader sees the old folder or the whole new one.

    Not collective: only rank 0 calls it.

    Args:
        folder: the folder to write or to replace.
        units: parameters and persistent buffers by name, on the CPU, of one unit after the other.

    Raises:
        UserError: if it cannot be written.
    """
    part, old = folder.with_name(folder.name + _PART), folder.with_name(folder.name + ".old")

    def tidy() -> None:
        if old.exists() and not folder.exists():
            old.rename(folder)
        for path in (part, old):
            shutil.rmtree(path, ignore_errors=True)

    with cleaned_up(tidy):
        tidy()
        with writing(folder):
            part.mkdir(parents=True)
            built.save(part, _pairs(units))
            _give_usual_permissions(part)
            if folder.exists():
                folder.rename(old)
            part.rename(folder)


def _pairs(units: Iterator[Mapping[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    for of_unit in units:
        yield from of_unit.items()
        del of_unit  # while the next one is gathered
