"""Stores that outlive their run: on disk, found by what their content depends on, checked, bounded, shared by jobs.

    KEY.lock         held by every job that uses the entry: together by its readers, alone by the one that fills it
    KEY/             a complete entry: its files were synced before the record, and the record before the folder's name
        record.json  sizes and SHA-256 of the files, and what the entry is of
        train.store  a store of each of its splits
    KEY.part/        an entry that is being filled, or that a job left unfinished; a spilled one goes with its job

The kernel frees the locks of a process that ends, however it ends. All of it may be deleted at any time.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep, time
from typing import Any
from uuid import uuid4

from pipetransformer.data import cache_folder
from pipetransformer.process.files import write_whole

__all__ = ["Entry", "Held", "KeptStores", "key_of", "stores_folder"]

_RECORD = "record.json"
_VERSION = 1
_BLOCK_BYTES = 2**22
_DISK_SHARE = 10  # of what is free, a tenth
_PAUSE = 0.2  # seconds between two looks at a lock
LONGEST_WAIT = 300.0
"""Seconds that a job waits for another one that fills an entry it needs; then it computes for itself."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A complete entry.

    Attributes:
        num_bytes: bytes of its stores.
        about: what it is of, in words, by name; empty where another version of the code wrote its record.
        used: time of its last use, in seconds since the epoch.
        in_use: whether a job has it open.
    """

    key: str
    num_bytes: int
    about: Mapping[str, Any]
    used: float
    in_use: bool


class Held:
    """An entry that this process holds: ``paths`` of its stores by split, complete or to be filled.

    Attributes:
        is_complete: whether the stores can be read; else this process alone may write them.
    """

    def __init__(self, key: str, folder: Path, descriptor: int, splits: Mapping[str, int], *, complete: bool) -> None:
        self.key, self.is_complete = key, complete
        self._folder, self._descriptor, self._splits = folder, descriptor, dict(splits)

    @property
    def paths(self) -> dict[str, str]:
        """Path of the store of each split."""
        return {split: str(self._place / f"{split}.store") for split in self._splits}

    @property
    def _place(self) -> Path:
        return self._folder / (self.key if self.is_complete else f"{self.key}.part")

    def publish(self, about: Mapping[str, Any], *, is_cancelled: Callable[[], bool] = lambda: False) -> bool:
        """Completes an entry whose stores are filled, for other jobs to find: data first, then their record.

        Returns:
            False where it was cancelled. Raises OSError for a disk that fails.
        """
        assert not self.is_complete
        digests: dict[str, str] = {}
        for split, path in self.paths.items():
            if is_cancelled():
                return False
            _sync(Path(path))
            digests[split] = _digest(Path(path), is_cancelled)
            if is_cancelled():
                return False
        record = {"version": _VERSION, "sizes": self._splits, "digests": digests, "about": dict(about)}
        place = self._place
        write_whole(place / _RECORD, json.dumps(record), key="cache")
        _sync(place)
        place.rename(self._folder / self.key)
        _sync(self._folder)
        self.is_complete = True
        fcntl.flock(self._descriptor, fcntl.LOCK_SH)
        return True

    def close(self) -> None:
        """Gives the entry back; one that is not complete is deleted. May be called twice."""
        if self._descriptor >= 0:
            if not self.is_complete:
                shutil.rmtree(self._place, ignore_errors=True)
                with contextlib.suppress(OSError):
                    (self._folder / f"{self.key}.lock").unlink()
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # also where a forked process has it open too
            os.close(self._descriptor)
            self._descriptor = -1


class KeptStores:
    """The entries in ``folder``, which is made where it is missing and may be shared by all jobs of a node.

    Attributes:
        folder: the folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def entries(self) -> list[Entry]:
        """All complete entries, the one used last at the end. Raises OSError for a folder that cannot be read."""
        found = []
        for place in os.scandir(self.folder) if self.folder.exists() else ():
            if place.is_dir() and not place.name.endswith(".part"):
                with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                    found.append(self._entry(place.name))
        return sorted(found, key=lambda entry: entry.used)

    def _entry(self, key: str) -> Entry:
        folder, record = self.folder / key, self._record(key)
        about = {} if record is None else record["about"]
        num_bytes = _num_bytes(folder)
        own = folder / _RECORD
        return Entry(key, num_bytes, about, (own if own.exists() else folder).stat().st_mtime, self._is_in_use(key))

    def has(self, key: str) -> bool:
        """Whether there is such an entry, complete; its content is not looked at."""
        return self._record(key) is not None

    def find(self, key: str, *, sizes: Mapping[str, int], wait: float | None = None) -> Held | None:
        """The entry with this key, for reading, once whoever fills it is ready; None where there is none.

        One whose files are not as its record says is deleted. Note: it may have to read all of its bytes.

        Args:
            sizes: bytes of the store of each split.
            wait: the most seconds to wait for who fills it; None for ``LONGEST_WAIT``.
        """
        # Who makes room for an entry has nothing but its lock yet.
        if not any((self.folder / name).exists() for name in (key, f"{key}.part", f"{key}.lock")):
            return None
        descriptor = None
        with contextlib.suppress(OSError):
            descriptor = self._lock(key, fcntl.LOCK_SH, wait=LONGEST_WAIT if wait is None else wait)
        if descriptor is None:
            return None
        record = self._record(key)
        if record is not None:
            held = Held(key, self.folder, descriptor, sizes, complete=True)
            if record["sizes"] == dict(sizes) and self._is_whole(held, record):
                with contextlib.suppress(OSError):
                    os.utime(self.folder / key / _RECORD)
                return held
        os.close(descriptor)
        if record is not None:
            with contextlib.suppress(OSError):
                self.delete(key)
        return None

    def begin(self, key: str, *, sizes: Mapping[str, int], budget: int) -> Held | None:
        """A new entry, to be filled by this process; entries that were not used for longest make room.

        Args:
            sizes: bytes of the store of each split; the files are not made yet.
            budget: the most bytes of all entries together.

        Returns:
            None where the budget does not hold it, another job has the entry, or the folder cannot be written.
        """
        descriptor = None
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            descriptor = self._lock(key, fcntl.LOCK_EX)
        if descriptor is None:
            return None
        held = Held(key, self.folder, descriptor, sizes, complete=False)
        try:
            if not self.has(key) and self.make_room(_total(sizes), budget):
                for place in (self.folder / key, held._place):  # the first without a record that can be read
                    shutil.rmtree(place, ignore_errors=True)
                held._place.mkdir()
                return held
        except OSError:
            pass
        held.close()
        return None

    def spill(self, sizes: Mapping[str, int], *, setting: int | str) -> tuple[Held | None, int]:
        """A place for stores of these bytes, by split, which no other job finds, or None where no room can be made; and
        the most bytes that there can be room for. Raises OSError where the folder cannot be made.

        Args:
            setting: as in ``budget``.
        """
        budget = self.budget(setting)
        held = self.begin(f"spilled-{uuid4().hex}", sizes=sizes, budget=budget)
        return held, max(0, budget - self.num_bytes() + _sum_of(self._unused()))

    def delete(self, key: str) -> bool:
        """Deletes an entry, complete or left unfinished. Returns False where a job has it open.

        Raises OSError where the folder does not allow it.
        """
        descriptor = self._lock(key, fcntl.LOCK_EX)
        if descriptor is None:
            return False
        try:
            for place in (self.folder / key, self.folder / f"{key}.part"):
                if place.exists():
                    shutil.rmtree(place)
            (self.folder / f"{key}.lock").unlink(missing_ok=True)
        finally:
            os.close(descriptor)
        return True

    def clear(self, *, unused_for: float = 0.0) -> tuple[list[Entry], list[Entry]]:
        """Deletes all entries that were not used for so many seconds, and what unfinished ones left.

        Returns:
            The deleted ones, and those that a job has open. Raises OSError where the folder does not allow it.
        """
        deleted: list[Entry] = []
        kept: list[Entry] = []
        for entry in self.entries():
            if time() - entry.used >= unused_for:
                (deleted if self.delete(entry.key) else kept).append(entry)
        self._delete_unfinished()
        return deleted, kept

    def _delete_unfinished(self) -> None:
        """Deletes what no job fills any more, and locks without an entry."""
        begun = {place.stem for name in ("*.part", "*.lock") for place in self.folder.glob(name)}
        for key in begun:
            if not (self.folder / key).exists():  # else its lock stays, and what is beside it is deleted with it
                self.delete(key)

    def num_bytes(self) -> int:
        """Bytes of all entries, those that are being filled too."""
        filling = 0
        for place in self.folder.glob("*.part"):
            with contextlib.suppress(FileNotFoundError):  # complete or deleted meanwhile
                filling += _num_bytes(place)
        return filling + sum(entry.num_bytes for entry in self.entries())

    def budget(self, setting: int | str) -> int:
        """Bytes that all stores in the folder may take together. Raises OSError where it cannot be made.

        Args:
            setting: ``cache.disk_budget``, ``auto`` or bytes.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        if isinstance(setting, int):
            return setting
        return (shutil.disk_usage(self.folder).free + self.num_bytes()) // _DISK_SHARE

    def make_room(self, num_bytes: int, budget: int) -> bool:
        """Deletes entries until ``num_bytes`` more fit, if enough can be deleted. Returns whether they fit.

        Raises OSError where the folder does not allow it.
        """
        self._delete_unfinished()
        excess, unused = self.num_bytes() + num_bytes - budget, self._unused()
        if excess > _sum_of(unused):
            return False
        for entry in unused:
            if excess > 0 and self.delete(entry.key):
                excess -= entry.num_bytes
        return excess <= 0

    def _unused(self) -> list[Entry]:
        """The complete entries that no job has open, the one used last at the end."""
        return [entry for entry in self.entries() if not entry.in_use]

    def _record(self, key: str) -> dict[str, Any] | None:
        """The record of a complete entry; None where there is none that can be read."""
        try:
            record = json.loads((self.folder / key / _RECORD).read_text(encoding="ascii"))
            names = ("sizes", "digests", "about")
            is_one = record["version"] == _VERSION and all(isinstance(record[name], dict) for name in names)
            return record if is_one else None
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def _is_whole(self, held: Held, record: Mapping[str, Any]) -> bool:
        try:
            return all(_digest(Path(path)) == record["digests"].get(split) for split, path in held.paths.items())
        except OSError:
            return False

    def _is_in_use(self, key: str) -> bool:
        """Not known of a folder that cannot be written; then no."""
        try:
            descriptor = self._lock(key, fcntl.LOCK_EX)
        except OSError:
            return False
        if descriptor is not None:
            os.close(descriptor)
        return descriptor is None

    def _lock(self, key: str, kind: int, *, wait: float = 0.0) -> int | None:
        """The open descriptor of an entry's lock, held; None where others hold it for longer than ``wait`` seconds.

        Raises OSError for a folder that is not there or cannot be written, and for a disk without locks.
        """
        path, until = self.folder / f"{key}.lock", monotonic() + wait
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                if monotonic() >= until:
                    return None
                sleep(_PAUSE)
                continue
            except OSError:
                os.close(descriptor)
                raise
            with contextlib.suppress(FileNotFoundError):
                if os.fstat(descriptor).st_ino == path.stat().st_ino:
                    return descriptor
            os.close(descriptor)  # it was deleted meanwhile: another file has its name, or none


def stores_folder() -> Path:
    """The folder of all entries, in the user's cache folder."""
    return cache_folder() / "activations"


def key_of(parts: object) -> str:
    """The key of an entry: a digest of everything that its content depends on, as something whose ``repr`` tells it."""
    return hashlib.sha256(repr((_VERSION, parts)).encode()).hexdigest()[:32]


def _total(sizes: Mapping[str, int]) -> int:
    return sum(sizes.values())


def _sum_of(entries: Iterable[Entry]) -> int:
    return sum(entry.num_bytes for entry in entries)


def _num_bytes(folder: Path) -> int:
    """Bytes of the stores in an entry's folder. Raises FileNotFoundError where another job takes it away meanwhile."""
    return sum(store.stat().st_size for store in folder.glob("*.store"))


def _digest(path: Path, is_cancelled: Callable[[], bool] = lambda: False) -> str:
    """SHA-256 of a file's content, in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while (block := file.read(_BLOCK_BYTES)) and not is_cancelled():
            digest.update(block)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    """Puts a file's or folder's content on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
