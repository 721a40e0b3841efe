"""Arrays that one process of a node makes for all of its ranks and for every later run: made once, memory-mapped then.

They lie in ``$PIPETRANSFORMER_CACHE`` (default: ``pipetransformer`` in the user's cache folder), a folder for each
content; all may be deleted at any time. Those that are not to the bit as they were written are made anew.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np

from pipetransformer.errors import UserError
from pipetransformer.process.shutdown import cleaned_up

Result = TypeVar("Result")
_VERSION = 5
_DIGEST = "digest"


class Lead(Protocol):
    """Calls ``action`` on one process of this node and gives its result, or its UserError, to all."""

    def __call__(self, action: Callable[[], Result]) -> Result: ...


def alone(action: Callable[[], Result]) -> Result:
    """The ``Lead`` of a process without others."""
    return action()


def file_digest(path: Path) -> str:
    """SHA-256 of a file's content, in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**22):
            digest.update(block)
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Prepared:
    """Read-only arrays by name, and the SHA-256 of all of them, in hex."""

    arrays: Mapping[str, np.ndarray]
    digest: str


def prepared(key: Callable[[], object], build: Callable[[], Mapping[str, np.ndarray]], *, lead: Lead) -> Prepared:
    """The arrays that ``build`` makes.

    Args:
        key: everything that they depend on, as something whose ``repr`` tells it. Like ``build``, called on one process
            a node.

    Raises:
        UserError: what ``key`` or ``build`` raises; or the cache's folder cannot be written.
    """

    def make() -> str:
        folder = cache_folder() / hashlib.sha256(repr((_VERSION, key())).encode()).hexdigest()[:32]
        if folder.is_dir() and not _is_whole(folder):
            shutil.rmtree(folder, ignore_errors=True)
        if not folder.is_dir():
            _write(folder, build())
        return str(folder)

    folder = Path(lead(make))
    return Prepared(_mapped(folder), (folder / _DIGEST).read_text())


def _mapped(folder: Path) -> dict[str, np.ndarray]:
    return {path.stem: np.load(path, mmap_mode="r") for path in sorted(folder.glob("*.npy"))}


def _is_whole(folder: Path) -> bool:
    """Whether the arrays are those that were written, to the bit."""
    try:
        return _digest_of(_mapped(folder)) == (folder / _DIGEST).read_text()
    except Exception:  # whatever numpy makes of a damaged head
        return False


def _digest_of(arrays: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def cache_folder() -> Path:
    """The folder of all that is made once for later runs, and may be deleted at any time."""
    if named := os.environ.get("PIPETRANSFORMER_CACHE"):
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "pipetransformer"


def _write(folder: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """All files or none: another job may be making the same."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", suffix=".part", dir=folder.parent))
        with cleaned_up(partial(shutil.rmtree, part, ignore_errors=True)):
            for name, array in arrays.items():
                np.save(part / f"{name}.npy", array)
            (part / _DIGEST).write_text(_digest_of(arrays))
            try:
                part.rename(folder)
            except OSError:
                if not folder.is_dir():  # else another job was faster
                    raise
    except OSError as error:
        raise UserError(
            f"PIPETRANSFORMER_CACHE: {folder.parent} cannot be written ({error.strerror}); name another folder"
        ) from error
