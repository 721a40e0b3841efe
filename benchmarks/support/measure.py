"""The environment beside every result, medians with their spread, and result files."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

import torch

from pipetransformer.process.device import device_name

__all__ = ["CONFIGS", "RESULTS", "environment", "save", "spread"]

_BENCHMARKS = Path(__file__).resolve().parent.parent
RESULTS, CONFIGS = _BENCHMARKS / "results", _BENCHMARKS.parent / "config"


def environment() -> dict[str, object]:
    """All that a figure depends on beside the code."""
    import timm
    import transformers

    found: dict[str, object] = {
        "cpu": device_name(torch.device("cpu")),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "timm": timm.__version__,
        "commit": _commit(),
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


def _commit() -> str:
    """Of the code; another result that was written anew does not make it another."""
    changes = _git("status", "--porcelain", "--untracked-files=no", "--", ":/", ":(top,exclude)benchmarks/results")
    return _git("rev-parse", "--short", "HEAD") + ("-dirty" if changes else "")


def _git(*arguments: str) -> str:
    ended = subprocess.run(["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True)
    return ended.stdout.strip()
