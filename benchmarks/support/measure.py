"""The environment beside every result, medians with their spread, and result files."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from statistics import median

import psutil
import torch

from benchmarks.support.git import ROOT, git
from pipetransformer.process.device import device_name

__all__ = ["CONFIGS", "RESULTS", "environment", "measured_commit", "save", "spread"]

RESULTS, CONFIGS = ROOT / "benchmarks" / "results", ROOT / "config"
_CODE = ("pipetransformer", "benchmarks", "config", "*.py", "*.sh", "pyproject.toml")


def environment() -> dict[str, object]:
    """The origin of a figure: machine, libraries, commit, command and day."""
    import timm
    import transformers

    found: dict[str, object] = {
        "command": _command(sys.argv),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "commit": measured_commit(),
        "cpu": device_name(torch.device("cpu")),
        "cores": os.cpu_count(),
        "memory GiB": round(psutil.virtual_memory().total / 2**30, 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "timm": timm.__version__,
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def spread(values: Sequence[float], *, digits: int = 3) -> str:
    """``median [smallest .. largest]``."""
    low, high = min(values), max(values)
    return f"{median(values):.{digits}f} [{low:.{digits}f} .. {high:.{digits}f}]"


def save(
    name: str,
    rows: Sequence[Mapping[str, object]],
    *,
    title: str | None = None,
    notes: Sequence[str] = (),
    folder: Path = RESULTS,
) -> Path:
    """Writes ``FOLDER/NAME.json``: the rows, and the environment beside them; of a table its title and notes too."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    parts = {"environment": _line(environment()), "rows": _lines(rows)}
    if title is not None:
        parts = {"title": _line(title), **parts, "notes": _lines(notes)}
    path.write_text("{\n" + ",\n".join(f'"{key}": {text}' for key, text in parts.items()) + "\n}\n", encoding="utf-8")
    return path


def _lines(values: Sequence[object]) -> str:
    """One of them a line, so that a change shows which."""
    return "[\n " + ",\n ".join(map(_line, values)) + "\n]"


def _line(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def measured_commit() -> str:
    """The last commit of the code, "-dirty" behind it where files differ from it now or differed, or were of another
    commit, when the benchmark started: processes that it starts import what lies there then."""
    first, now = started_at(), _commit()
    return first if now == first else f"{first.removesuffix('-dirty')}-dirty"


@cache
def started_at() -> str:
    """``measured_commit`` at the first call: a benchmark calls it when it starts (``bench_parser``)."""
    return _commit()


def _commit() -> str:
    """Of code alone: neither pages nor results make it another."""
    code = [f":(top){name}" for name in _CODE] + [":(top,exclude)benchmarks/results"]
    changes = git("status", "--porcelain", "--", *code)
    return (git("log", "-1", "--format=%h", "--", *code) or "unknown") + ("-dirty" if changes else "")


def _command(argv: Sequence[str]) -> str:
    """The command line as typed: all scripts of a benchmark's folder are started by its name."""
    script = Path(argv[0]).resolve()
    if script.parent.parent != RESULTS.parent:
        return shlex.join([script.name, *argv[1:]])
    return shlex.join(["pipetransformer", "bench", script.parent.name.replace("_", "-"), *argv[1:]])
