"""Set-up: tested versions where the index has them, ranges where it has not, nothing where nothing changed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from laws import REPOSITORY

# In place of an environment's python: notes what pip is asked for, with which constraints; fails as $FAILS says.
PYTHON = """#!/bin/sh
case "$*" in
    "-m pip --version") exit 0 ;;
esac
while [ $# -gt 0 ]; do
    [ "$1" = --constraint ] && constraints=$2
    shift
done
{ echo "---"; cat "$constraints"; } >>pip_calls
if [ -e says ] && grep -q "$(cat needs)" "$constraints"; then cat says; exit 1; fi
"""
LACKING = {
    "alone": "ERROR: No matching distribution found for torch==2.15.0\n",
    "beside others": "    The user requested torch>=2.11\n    The user requested (constraint) torch==2.15.0\n",
}


def folder_of(tmp_path: Path, *, venv: str = ".venv") -> Path:
    for name in ("setup.sh", "pyproject.toml", "constraints.txt"):
        shutil.copy(REPOSITORY / name, tmp_path)
    python = tmp_path / venv / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON)
    python.chmod(0o755)
    return tmp_path


def set_up(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["sh", "setup.sh", *arguments], cwd=folder, capture_output=True, text=True)


def calls(folder: Path) -> list[list[str]]:
    """The constraints of each installation."""
    found = (folder / "pip_calls").read_text().split("---\n")[1:]
    return [[line for line in text.splitlines() if not line.startswith("#")] for text in found]


def test_tested_versions_are_installed_once_and_again_where_they_change(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    for changed, num_calls in ((None, 1), (None, 1), ("constraints.txt", 2), ("pyproject.toml", 3), (None, 3)):
        if changed is not None:
            later = (folder / ".venv" / "installed").stat().st_mtime + 1
            os.utime(folder / changed, (later, later))
        assert set_up(folder).returncode == 0
        if changed is not None:
            os.utime(folder / changed, (0, 0))
        assert len(calls(folder)) == num_calls
    pinned = [line for line in (REPOSITORY / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert calls(folder)[0] == pinned


@pytest.mark.parametrize("said", LACKING)
def test_what_an_index_lacks_is_told_in_a_line_and_taken_from_the_range(tmp_path: Path, said: str) -> None:
    folder = folder_of(tmp_path)
    (folder / "says").write_text(LACKING[said])
    (folder / "needs").write_text("torch==")
    done = set_up(folder)
    assert done.returncode == 0 and done.stderr == ""
    told = (
        "note: pip cannot install torch==2.15.0 here, as tested (constraints.txt); taking the ranges of pyproject.toml"
    )
    assert done.stdout.splitlines()[1:] == [told]
    first, second = calls(folder)
    assert "torch==2.15.0" in first and second == []
    assert (folder / ".venv" / "installed").exists()


def test_another_failure_is_told_and_not_tried_again(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    (folder / "says").write_text("ERROR: the disk is full\n")
    (folder / "needs").write_text(".")
    done = set_up(folder)
    assert done.returncode == 1 and len(calls(folder)) == 1
    assert done.stderr == "ERROR: the disk is full\nerror: pip could not install; its message is above\n"
    assert not (folder / ".venv" / "installed").exists()


@pytest.mark.parametrize(("version", "expected"), [("2.11", ["torch==2.11.*"]), ("newest", [])])
def test_another_torch_has_its_own_environment(tmp_path: Path, version: str, expected: list[str]) -> None:
    folder = folder_of(tmp_path, venv=f".venv-torch-{version}")
    assert set_up(folder, version).returncode == 0
    (found,) = calls(folder)
    assert [line for line in found if line.startswith("torch=")] == expected
    assert not any(line.startswith("torchvision") for line in found) and "torchmetrics" in " ".join(found)
    assert set_up(folder, "../2.11").stderr == (
        "error: torch version ../2.11 is not allowed; give one like 2.11, or newest\n"
    )


def test_make_test_has_torchgpipe() -> None:
    """Else the tests of the sweep would be skipped everywhere."""
    text = (REPOSITORY / "pyproject.toml").read_text()
    extras = {name: re.search(rf"^{name} = \[(.*)\]$", text, re.M) for name in ("dev", "bench")}
    assert extras["dev"] and '"pipetransformer[bench]"' in extras["dev"][1]
    assert extras["bench"] and '"torchgpipe' in extras["bench"][1]


def test_every_direct_dependency_has_a_tested_version() -> None:
    text = (REPOSITORY / "pyproject.toml").read_text()
    lists = [re.search(r"^dependencies = \[(.*?)^\]", text, re.M | re.S)]
    lists += [re.search(rf"^{extra} = \[(.*)\]$", text, re.M) for extra in ("dev", "bench")]
    wanted = {name.lower() for found in lists if found for name in re.findall(r'"([\w-]+)', found[1])} - {
        "pipetransformer"
    }
    lines = [line for line in (REPOSITORY / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w-]+==[\w.]+", line) for line in lines)  # no host, no local suffix
    assert {line.partition("==")[0].lower() for line in lines} == wanted
