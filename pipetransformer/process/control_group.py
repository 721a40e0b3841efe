"""Free memory on this node, as the kernel and the process's control groups have it. No torch.

Batch systems and containers limit memory by control groups, which lie in each other: a job's in its user's, a step's in
its job's. The tightest of them counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

_MOUNT = Path("/sys/fs/cgroup")
_OF_PROCESS = Path("/proc/self/cgroup")


@dataclass(frozen=True, slots=True)
class _Version:
    """The files of a control group's memory.

    Attributes:
        limit, used: files of one number each; the limit may be the word ``max``.
        freeable: line of ``memory.stat`` that counts files read once, which the kernel frees on demand.
    """

    limit: str
    used: str
    freeable: str


_FIRST = _Version("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_SECOND = _Version("memory.max", "memory.current", "inactive_file")


def available_host_memory() -> int:
    """Free bytes of memory on this node: those of the kernel, or fewer where a control group sets a lower limit."""
    free = [room for folder, version in _groups() if (room := _room(folder, version)) is not None]
    return max(0, min([int(psutil.virtual_memory().available), *free]))


def _groups() -> Iterator[tuple[Path, _Version]]:
    """The control groups of this process, from its own up to the mount."""
    for path, mount, version in _memberships():
        own = mount / path.lstrip("/")
        # Note: inside a container the path may be the host's, of which no folder is there.
        yield from ((folder, version) for folder in (own, *own.parents) if folder == mount or mount in folder.parents)


def _memberships() -> Iterator[tuple[str, Path, _Version]]:
    """Path, mount and version of each hierarchy that counts memory, by lines such as ``0::/job`` (version 2) and
    ``4:memory:/job`` (version 1)."""
    try:
        lines = _OF_PROCESS.read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            yield path, _MOUNT, _SECOND
        elif "memory" in controllers.split(","):
            yield path, _MOUNT / "memory", _FIRST


def _room(folder: Path, version: _Version) -> int | None:
    """Bytes that are left to a control group; None where it has no limit, or is not to be seen."""
    try:
        limit, used = (int((folder / name).read_text()) for name in (version.limit, version.used))
        counters = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return limit - used + int(counters[version.freeable])
    except (OSError, ValueError, KeyError):
        return None
