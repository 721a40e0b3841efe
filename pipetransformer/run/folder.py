"""The folder of a run: found before set-up, made when nothing can refuse the run any more, locked until its end."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from time import monotonic, sleep
from typing import IO

from pipetransformer.config import Config, load_config
from pipetransformer.errors import UserError, writing
from pipetransformer.process.collectives import led_by, patiently, values_of_ranks
from pipetransformer.process.files import write_whole
from pipetransformer.process.world import World

PART = ".part"
"""The end of the name of what is not whole yet."""
_LOCK = ".lock"
_SEEN_WITHIN_SECONDS = 5.0
_FOLLOWS = {"train.epochs": ": the learning rate goes on as if the run had been planned so"}


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The place of a run's files.

    Attributes:
        run_id: id of the run, the name of its folder.
        path: the folder.
        changes: one text for each setting that affects the weights and has changed since the run's start.
        is_shared: whether all nodes see the same files there.
        ended_at: number of steps of the run that has ended there and is resumed; None for none.
    """

    run_id: str
    path: Path
    changes: tuple[str, ...]
    is_shared: bool = True
    ended_at: int | None = None


def with_resumption(config: Config) -> Config:
    """Collective. The configuration with ``run.resume: auto`` decided, by rank 0 for all: true where the run has a
    complete checkpoint, else false, and what a start without one has left is overwritten.

    Raises:
        UserError: on every rank, if the run's id is not given.
    """
    if config.run.resume != "auto":
        return config
    return config.with_overrides(led_by(0, lambda: _resumption(config)))


def _resumption(config: Config) -> dict[str, object]:
    if config.run.id is None:
        raise UserError("run.resume: which run is not said; give run.id")
    path = Path(config.run.dir).expanduser() / config.run.id
    if complete_checkpoints(path) or (path / "summary.json").exists():
        return {"run.resume": True}
    return {"run.resume": False, "run.overwrite": path.exists()}


def with_first_nodes(world: World, config: Config) -> World:
    """Collective. ``world`` with the number of nodes that a run that is resumed began on."""
    if not config.run.resume or config.run.id is None:
        return world
    run_dir = Path(config.run.dir).expanduser() / config.run.id
    return replace(world, first_nodes=led_by(0, lambda: _first_nodes(run_dir)))


def _first_nodes(run_dir: Path) -> int | None:
    """As the last checkpoint tells; None where none can be read."""
    for path in reversed(complete_checkpoints(run_dir)):
        try:
            return int(json.loads((path / "state.json").read_text(encoding="utf-8"))["identity"]["nodes"])
        except (OSError, ValueError, KeyError, TypeError):  # damaged: another may be whole
            continue
    return None


def complete_checkpoints(run_dir: Path) -> list[Path]:
    """The checkpoints of a run that were written to their end, the last one last."""
    return sorted(path for path in (run_dir / "checkpoints").glob("step-*") if not path.name.endswith(PART))


def find_run_folder(config: Config, *, num_nodes: int = 1) -> RunFolder:
    """Collective. Finds the folder; rank 0 decides the run's id. A refused job leaves no trace.

    Raises:
        UserError: on every rank, if the folder exists and is neither resumed nor overwritten; if it does not exist and
            is to be resumed; if it cannot be made; or if another job is at work in it.
    """
    found = led_by(0, lambda: folder_of(config))
    return found if num_nodes == 1 else replace(found, is_shared=is_shared(found.path))


def is_shared(folder: Path) -> bool:
    """Collective. Whether all ranks see a file that rank 0 makes for the time of the call, in ``folder`` or the nearest
    of its parents that is there."""
    mark: list[Path] = []

    def make() -> str:
        there = next(parent for parent in (folder, *folder.absolute().parents) if parent.is_dir())
        mark.append(there / f".pipetransformer-{secrets.token_hex(8)}")
        with writing(there):
            mark[0].touch(exist_ok=False)
        return mark[0].name

    try:
        name = led_by(0, make)
        return all(values_of_ranks(patiently(lambda: _appears(name, below=folder))))
    finally:
        for path in mark:
            path.unlink(missing_ok=True)


def _appears(name: str, *, below: Path) -> bool:
    """A shared file system may take seconds to show what another node has made."""
    until = monotonic() + _SEEN_WITHIN_SECONDS
    while True:
        if any((parent / name).exists() for parent in (below, *below.absolute().parents)):
            return True
        if monotonic() > until:
            return False
        sleep(0.1)


def make_run_folder(folder: RunFolder, config: Config) -> IO[str] | None:
    """Collective. Makes the folder that ``find_run_folder`` found, or empties it if it is to be overwritten.

    Returns:
        On rank 0, the lock against other jobs, which holds while it is open; None on other ranks.

    Raises:
        UserError: on every rank, if the folder cannot be written, or another job is at work in it.
    """
    locks: list[IO[str]] = []
    led_by(0, lambda: locks.append(_make_run_folder(folder, config)))
    return locks[0] if locks else None


def folder_of(config: Config) -> RunFolder:
    run = config.run
    if run.resume and run.id is None:
        raise UserError("run.resume: which run is not said; give run.id")
    run_id = run.id or datetime.now().strftime("%Y%m%d-%H%M%S")
    path = Path(run.dir).expanduser() / run_id
    try:
        if run.resume and not path.is_dir():
            raise UserError(f"run.resume: there is no run {path}; start it without run.resume")
        if path.exists() and not (run.resume or run.overwrite):
            raise UserError(
                f"run.id: {path} exists; continue it with run.resume=true, delete it with run.overwrite=true, "
                "or give another run id"
            )
        if run.overwrite and path.exists() and not _may_be_deleted(path):
            raise UserError(f"run.overwrite: {path} is not the folder of a run; delete it yourself, or give another id")
        if (path / _LOCK).exists():
            _lock(path).close()
        there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    except OSError as error:
        raise UserError(f"run.dir: {path} cannot be read ({error.strerror})") from error
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        raise UserError(f"run.dir: {path} cannot be made, because {there} is no folder that this user may write to")
    if not run.resume:
        return RunFolder(run_id, path, changes=())
    return RunFolder(run_id, path, changes=_changes(path, config), ended_at=_ended_at(path))


def _ended_at(path: Path) -> int | None:
    """The number of steps that the summary in ``path`` tells of."""
    try:
        return int(json.loads((path / "summary.json").read_text(encoding="utf-8"))["steps"])
    except (OSError, ValueError, KeyError, TypeError):  # not ended, or damaged
        return None


def _changes(path: Path, config: Config) -> tuple[str, ...]:
    """One text for each key of these sections that differs from the configuration saved in ``path``."""
    if not (path / "config.yaml").is_file():
        return ()
    try:
        old, new = load_config(path / "config.yaml", is_past=True).model_dump(), config.model_dump()
    except UserError as error:
        return (f"which one is not known: config.yaml, as it was before, cannot be read ({error})",)
    return tuple(
        f"{section}.{key} was {old[section][key]} and is {value} now{_FOLLOWS.get(f'{section}.{key}', '')}"
        for section in ("model", "data", "train", "freeze", "cache")
        for key, value in new[section].items()
        if value != old[section][key]
    )


def _may_be_deleted(path: Path) -> bool:
    """Whether an earlier run made ``path``. A run that was killed at its start leaves an empty folder."""
    return path.is_dir() and ((path / "config.yaml").is_file() or all(p.name == _LOCK for p in path.iterdir()))


def _make_run_folder(folder: RunFolder, config: Config) -> IO[str]:
    with writing(folder.path):
        folder.path.mkdir(parents=True, exist_ok=True)
        lock = _lock(folder.path)
        if config.run.overwrite:
            # The configuration is deleted last: by this file, the folder of a run is recognised.
            for path in sorted(folder.path.iterdir(), key=lambda path: path.name == "config.yaml"):
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                elif path.name != _LOCK:
                    path.unlink()
        # Settings of this launch alone would do harm if the file is used again.
        kept = {"run.id": folder.run_id, "run.overwrite": False, "run.resume": False, "run.replay": None}
        write_whole(folder.path / "config.yaml", config.with_overrides(kept).to_yaml())
    return lock


def _lock(folder: Path) -> IO[str]:
    """Locks the folder. The kernel frees the lock at the end of the process, also after a crash.

    Raises:
        UserError: if another job holds the lock.
    """
    file = (folder / _LOCK).open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise UserError(f"run.id: another job is at work in {folder}; wait for it, or give another run id") from None
    return file
