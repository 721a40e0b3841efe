"""Check what a job needs on this machine: versions, cores, devices, memory, shared memory, writable folders."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from pipetransformer.errors import UserError

_PACKAGES = ("torch", "torchvision", "transformers", "timm", "peft", "datasets", "wandb")
_SHARED, _FREE = 64 * 2**20, 2 * 2**30  # bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--run-dir", type=Path, default=Path("runs"), metavar="FOLDER", help="where runs would go")


def run(arguments: argparse.Namespace) -> None:
    """Raises UserError where something must be mended."""
    bad = 0
    for name, told, remedy in _findings(arguments.run_dir):
        bad += bool(remedy)
        print(f"{'mend' if remedy else 'ok':4}  {name:14} {told}{f'; {remedy}' if remedy else ''}")
    if bad:
        raise UserError(f"doctor: {bad} thing{'s' if bad > 1 else ''} to mend, above")


def _findings(run_dir: Path) -> Iterator[tuple[str, str, str]]:
    """(name, finding, remedy); no remedy where nothing need be done."""
    version = platform.python_version()
    yield "python", version, "" if sys.version_info >= (3, 10) else "install Python 3.10 or newer"
    for name in _PACKAGES:
        try:
            yield name, metadata.version(name), ""
        except metadata.PackageNotFoundError:
            yield name, "is missing", f"pip install {name}"
    yield from _machine()
    for name, folder in (
        ("run folder", run_dir),
        ("cache", _cache_folder()),
        ("temporary", Path(tempfile.gettempdir())),
    ):
        yield name, *_folder(folder)


def _machine() -> Iterator[tuple[str, str, str]]:
    import torch

    from pipetransformer.process.control_group import available_host_memory

    capable = torch.backends.cpu.get_cpu_capability()
    yield "cores", f"{len(os.sched_getaffinity(0))} for this process, {capable}", ""
    devices = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    yield "GPUs", ", ".join(devices) or "none: jobs run on the CPU", ""
    free = available_host_memory()
    yield "memory", f"{free / 2**30:.1f} GiB free", "" if free > _FREE else "free some: models and cache lie there"
    shared = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0
    remedy = "" if shared > _SHARED else "give the container more (docker run --shm-size=2g): the cache lies there"
    yield "shared memory", f"{shared / 2**30:.2f} GiB free", remedy


def _cache_folder() -> Path:
    from pipetransformer.data import cache_folder

    return cache_folder()


def _folder(folder: Path) -> tuple[str, str]:
    there = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    if not os.access(there, os.W_OK | os.X_OK):
        return f"{folder}: {there} cannot be written", "give another, or its permissions"
    free = shutil.disk_usage(there).free
    return f"{folder}: {free / 2**30:.1f} GiB free", "" if free > _FREE else "free some of this disk"
