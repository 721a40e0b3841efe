"""Runs that have ended, a row each in ``FOLDER/resnet101-accuracy-runs.json``: they are not trained again.

A row counts as long as its settings and the code that trained it are today's. Pictures are known by their numbers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from benchmarks.resnet101_accuracy.training import Outcome, Run
from benchmarks.support.git import ROOT
from benchmarks.support.measure import environment
from pipetransformer.errors import UserError
from pipetransformer.process.files import write_whole

__all__ = ["FILE", "KeptRuns", "key_of"]

FILE = "resnet101-accuracy-runs.json"
# Another text of these makes all runs missing again.
_CODE = (
    *(
        f"benchmarks/resnet101_accuracy/{name}.py"
        for name in ("checkpoints", "methods", "network", "pictures", "training")
    ),
    "benchmarks/support/graphs.py",
    "pipetransformer/adapter/pipelining.py",
    "pipetransformer/graphs/graph/*.py",
    "pipetransformer/graphs/zoo/resnet.py",
)


class KeptRuns:
    """Raises UserError: the file is no such file."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self._rows: list[dict[str, object]] = []
        if self._path.exists():
            try:
                self._rows = json.loads(self._path.read_text(encoding="ascii"))["rows"]
                assert all(row["key"] and row["name"] and isinstance(row["error"], float) for row in self._rows)
            except (ValueError, TypeError, KeyError, AssertionError) as error:
                raise UserError(f"--output: {self._path} does not hold runs; delete it to train all anew") from error

    def error(self, run: Run) -> float | None:
        """Top-1 in per cent; None where the run is missing."""
        key = key_of(run)
        return next((float(str(row["error"])) for row in self._rows if row["key"] == key), None)

    def keep(self, run: Run, outcome: Outcome) -> None:
        """In the place of the same row and seed of other settings or other code on these pictures."""
        name = f"{run.pictures.kind}: {run.setting.name} seed {run.seed}"
        row: dict[str, object] = {
            "name": name,
            "key": key_of(run),
            **asdict(outcome),
            "settings": asdict(run),
            "environment": environment(),
        }
        self._rows = [kept for kept in self._rows if kept["name"] != name] + [row]
        lines = ",\n ".join(map(json.dumps, self._rows))
        text = f'{{\n"environment": {json.dumps(environment())},\n"rows": [\n {lines}\n]\n}}\n'
        write_whole(self._path, text, key="--output")


def key_of(run: Run) -> str:
    """Of its settings and of the code that trains it, in hex."""
    digest = hashlib.sha256(json.dumps(asdict(run), sort_keys=True).encode())
    for name, text in sources().items():
        digest.update(f"{name} {len(text)} {text}".encode())
    return digest.hexdigest()[:16]


def sources() -> Mapping[str, str]:
    """By path from the top of the project."""
    paths = sorted(path for pattern in _CODE for path in ROOT.glob(pattern))
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}
