"""A cell of the table: one run of one row with one seed, in processes of its own, and what is kept of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.elastic.tasks import PEER, Row, Task
from benchmarks.support.git import ROOT
from benchmarks.support.kept import KeptRows, key_of
from benchmarks.support.measure import environment
from benchmarks.support.ranks import import_path
from pipetransformer.config import load_config
from pipetransformer.errors import UserError

__all__ = ["Cell", "Figures"]

# Another text of these makes a cell missing.
CODE = (
    *("pipetransformer/**/*.py", "main_*.py", "config/*.yaml"),
    *("benchmarks/elastic/*.py", "benchmarks/peers/*.py", "benchmarks/support/sst2.py"),
)
_ENTRIES = {
    "text_classification": "main_tc.py",
    "image_classification": "main_cv.py",
    "question_answering": "main_qa.py",
}


@dataclass(frozen=True, slots=True)
class Figures:
    """A run's figures.

    Attributes:
        curve: (seconds of training so far, metric) of each evaluation; their own seconds are in none.
        train_s: seconds of steps, transitions, advance passes and guard passes.
        wall_s: seconds of the whole run.
        floor_s: the compute floor; None where there is none.
        frozen: (step, frozen blocks) of each plan.
    """

    curve: tuple[tuple[float, float], ...]
    train_s: float
    wall_s: float
    floor_s: float | None
    frozen: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, row: Mapping[str, object]) -> Figures:
        """The figures of a row that is kept."""
        found = {name: row[name] for name in cls.__slots__}
        for name in ("curve", "frozen"):
            found[name] = tuple(map(tuple, found[name]))  # type: ignore[call-overload]
        return cls(**found)  # type: ignore[arg-type]

    @property
    def final(self) -> float:
        """The metric at the end."""
        return self.curve[-1][1]

    @property
    def best(self) -> float:
        """The best metric of all evaluations."""
        return max(metric for _, metric in self.curve)

    def seconds_to(self, target: float) -> float | None:
        """Training seconds at the first evaluation that reaches ``target``; None for a miss."""
        return next((seconds for seconds, metric in self.curve if metric >= target), None)


@dataclass(frozen=True, slots=True)
class Cell:
    """One run.

    Attributes:
        ranks: processes of one thread.
        precision: of all rows.
    """

    task: Task
    row: Row
    seed: int
    ranks: int
    precision: str

    @property
    def name(self) -> str:
        return f"{self.task.name}, {self.row.name}, seed {self.seed}"

    @property
    def settings(self) -> tuple[str, ...]:
        """All settings but the places of files."""
        return (*self.task.settings(self.row, seed=self.seed), f"train.precision={self.precision}")

    @property
    def key(self) -> str:
        """The digest of all that the run depends on, but for what else the machine does."""
        own = [each for each in self.settings if not each.startswith(("data.path=", "model.name=/"))]
        here = environment()
        versions = [here[key] for key in ("cpu", "torch", "transformers", "timm")]
        return key_of([self.task.name, self.row.name, own, self.ranks, versions], code=CODE)

    def found(self, kept: KeptRows) -> Figures | None:
        """Its figures; None where it is missing."""
        row = kept.row(self.key)
        return None if row is None else Figures.of(row)

    def measure(self, kept: KeptRows) -> Figures:
        """Runs it, and keeps its figures. Raises UserError where it fails."""
        found = self._peer() if self.row.name == PEER else self._ours()
        kept.keep(self.name, self.key, asdict(found))
        return found

    def _ours(self) -> Figures:
        config = load_config(self.task.config, self.settings)
        with tempfile.TemporaryDirectory() as folder:
            place = (f"run.dir={folder}", "run.id=cell")
            self._launch([str(ROOT / _ENTRIES[config.task]), str(self.task.config), *self.settings, *place])
            summary = json.loads((Path(folder) / "cell" / "summary.json").read_text())
            lines = (Path(folder) / "cell" / "events.jsonl").read_text().splitlines()
        told = [json.loads(line) for line in lines]
        evaluations = [event for event in told if event["event"] == "evaluation"]
        return Figures(
            curve=tuple((event["train_s"], event["metrics"][self.task.metric]) for event in evaluations),
            train_s=summary["train_s"],
            wall_s=summary["wall_s"],
            floor_s=summary["compute_floor_s"],
            frozen=tuple((event["step"], event["plan"]["frozen"]) for event in told if event["event"] == "plan"),
        )

    def _peer(self) -> Figures:
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder) / "result.json"
            script = ["-m", "benchmarks.peers.hf_trainer", "0", str(self.task.config), str(result)]
            self._launch([*script, *self.settings])
            told = json.loads(result.read_text())
        curve = tuple((seconds, metric) for seconds, metric in told["curve"])
        return Figures(curve, train_s=sum(told["steps"]), wall_s=told["wall_s"], floor_s=None, frozen=())

    def _launch(self, arguments: list[str]) -> None:
        launcher = [sys.executable]
        if self.ranks > 1:
            launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.ranks)]
        variables = {**os.environ, **import_path(), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        ended = subprocess.run([*launcher, *arguments], env=variables, capture_output=True, text=True)
        if ended.returncode:
            raise UserError(f"{self.name} failed: {(ended.stderr or ended.stdout).strip()[-2000:]}")
