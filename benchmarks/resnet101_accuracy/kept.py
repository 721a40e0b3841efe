"""Runs that have ended, a row each in ``FOLDER/resnet101-accuracy-runs.json``. Pictures are known by their numbers."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from benchmarks.resnet101_accuracy.training import Outcome, Run
from benchmarks.support import kept

__all__ = ["FILE", "KeptRuns", "key_of"]

FILE = "resnet101-accuracy-runs.json"
# Another text of these makes all runs missing again.
CODE = (
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
        self._rows = kept.KeptRows(folder / FILE)

    def error(self, run: Run) -> float | None:
        """Top-1 in per cent; None where the run is missing."""
        row = self._rows.row(key_of(run))
        return None if row is None else float(str(row["error"]))

    def keep(self, run: Run, outcome: Outcome) -> None:
        """In the place of the same row and seed of other settings or other code on these pictures."""
        name = f"{run.pictures.kind}: {run.setting.name} seed {run.seed}"
        self._rows.keep(name, key_of(run), {**asdict(outcome), "settings": asdict(run)})


def key_of(run: Run) -> str:
    """Of its settings and of the code that trains it, in hex."""
    return kept.key_of(asdict(run), code=CODE)
