"""The free memory that a process sees is that of the tightest control group around it, as batch systems set them."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from pipetransformer.process import control_group
from pipetransformer.process.control_group import available_host_memory

Group = tuple[str, str, int]  # limit, bytes in use, bytes of them that the kernel frees on demand
FREE = 10_000  # bytes of the machine


def groups(root: Path, of_process: str, *, second: dict[str, Group], first: dict[str, Group]) -> None:
    """Writes the files of control groups by path, those of version 2 below ``root`` and of version 1 in ``memory``."""
    (root / "self").write_text(of_process)
    for folder, found, names in (
        (root, second, ("memory.max", "memory.current", "inactive_file")),
        (root / "memory", first, ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")),
    ):
        for path, (limit, used, freeable) in found.items():
            group = folder / path
            group.mkdir(parents=True, exist_ok=True)
            (group / names[0]).write_text(limit)
            (group / names[1]).write_text(used)
            (group / "memory.stat").write_text(f"anon 7\n{names[2]} {freeable}\n")


@pytest.mark.parametrize(
    ("of_process", "second", "first", "expected"),
    [
        ("0::/", {"": ("1000", "800", 300)}, {}, 500),
        ("0::/", {"": ("1000", "1200", 0)}, {}, 0),
        ("0::/", {"": ("max", "800", 300)}, {}, FREE),
        ("0::/", {"": (str(2**60), "0", 0)}, {}, FREE),
        ("0::/user/job/step", {"user/job": ("1000", "400", 0), "user/job/step": ("max", "400", 0)}, {}, 600),
        ("0::/user/job", {"user": ("1000", "700", 0), "user/job": ("900", "100", 0)}, {}, 300),
        ("0::/of/the/host", {"": ("1000", "400", 0)}, {}, 600),  # its path is not there inside a container
        (
            "5:cpu:/a\n4:memory,hugetlb:/job/task",
            {},
            {"job": ("800", "500", 100), "job/task": (str(2**63), "5", 0)},
            400,
        ),
        ("4:cpu:/job", {}, {"job": ("800", "500", 100)}, FREE),
        ("1:name=systemd:/\n0::/job", {"job": ("800", "500", 0)}, {}, 300),
    ],
)
def test_the_tightest_group_counts(
    of_process: str,
    second: dict[str, Group],
    first: dict[str, Group],
    expected: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    groups(tmp_path, of_process, second=second, first=first)
    monkeypatch.setattr(control_group, "_MOUNT", tmp_path)
    monkeypatch.setattr(control_group, "_OF_PROCESS", tmp_path / "self")
    machine = psutil.virtual_memory()._replace(available=FREE)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: machine)
    assert available_host_memory() == expected


def test_where_there_are_none_the_kernel_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_group, "_OF_PROCESS", tmp_path / "none")
    machine = psutil.virtual_memory()._replace(available=FREE)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: machine)
    assert available_host_memory() == FREE
