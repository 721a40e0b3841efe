"""A cell of the table: one run of one row with one seed, in processes of its own, and what is kept of it."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from time import perf_counter
from unittest.mock import patch

import torch

from benchmarks.elastic.processes import launch
from benchmarks.elastic.tasks import PEER, Row, Task
from benchmarks.peers import timm_ranks
from benchmarks.peers.timm_train import arguments_of, curve_of, faster_attention, write_class_folders
from benchmarks.support.git import ROOT
from benchmarks.support.kept import KeptRows, key_of
from benchmarks.support.measure import environment
from pipetransformer.config import load_config
from pipetransformer.data.prepared import file_digest
from pipetransformer.process.device import device_name

__all__ = ["CODE", "Cell", "Figures", "code_digest"]

# Another text of these makes a cell missing, unless it is known to learn the same (``same_code``). Not that of tasks
# and rows: their settings stand in a cell's key, so that a new recipe of one task leaves the cells of the others.
_ALL = ("config/*.yaml", "benchmarks/support/sst2.py", "benchmarks/elastic/cells.py", "benchmarks/elastic/processes.py")
_READ = ("pipetransformer/config/**/*.py", "pipetransformer/data/**/*.py")  # what a peer goes through of the package
CODE = {
    "ours": (
        *(*_ALL, "pipetransformer/**/*.py", "main_*.py"),
        *(f"benchmarks/elastic/{name}.py" for name in ("inverted_guard", "ladder", "redrawn")),
    ),
    "Trainer": (*_ALL, *_READ, "benchmarks/peers/hf_trainer.py"),
    "timm": (*_ALL, *_READ, "benchmarks/peers/timm_train.py", "benchmarks/peers/timm_ranks.py"),
}
_ENTRIES = {
    "text_classification": "main_tc.py",
    "image_classification": "main_cv.py",
    "question_answering": "main_qa.py",
}


def code_digest(who: str = "ours") -> str:
    """Of the code that cells of one of ``CODE`` are measured by today, in hex."""
    return key_of(who, code=CODE[who])


@dataclass(frozen=True, slots=True)
class Figures:
    """A run's figures.

    Attributes:
        curve: (seconds of training so far, metric) of each evaluation; their own seconds are in none.
        train_s: seconds of steps, transitions, guard passes, and advance passes over what these read.
        wall_s: seconds of the whole run.
        floor_s: the compute floor; None where there is none.
        plans: (step, frozen blocks, blocks before the cache's boundary or None) of each plan.
        steps: number of steps; 0 of a peer.
        cpu: the processor that it ran on.
        start: digest of the weights that it began with, where those depend on the processor; else empty.
        loss: mean loss of the last evaluation; None of a peer.
        guard_s: seconds of the guard's passes, a part of ``train_s``.
    """

    curve: tuple[tuple[float, float], ...]
    train_s: float
    wall_s: float
    floor_s: float | None
    plans: tuple[tuple[int, int, int | None], ...] = ()
    steps: int = 0
    cpu: str = field(default_factory=lambda: device_name(torch.device("cpu")))
    start: str = ""
    loss: float | None = None
    guard_s: float = 0.0

    @classmethod
    def of(cls, row: Mapping[str, object]) -> Figures:
        """The figures of a row that is kept."""
        found = {name: row[name] for name in cls.__slots__}
        for name in ("curve", "plans"):
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

    def bound(self, *, num_blocks: int, epochs: int) -> float | None:
        """How many times faster than without freezing the run's plans could at best have been: blocks count alone, a
        forward a third of a step, the cache free to read. None of a peer.

        In epochs of training without freezing (``docs/results.md``): a step of n frozen blocks of L, k of them cached,
        costs 1 - n/L + (n - k) / 3L, an advance pass over k more blocks k / 3L.
        """
        if not self.steps:
            return None
        cost, cached_before = 0.0, 0
        for (step, frozen, cached), after in zip(self.plans, [*(plan[0] for plan in self.plans[1:]), self.steps]):
            held = cached or 0
            share = 1 - frozen / num_blocks + (frozen - held) / num_blocks / 3
            cost += share * (after - step) / self.steps * epochs
            cost += (held - cached_before if held >= cached_before else held) / num_blocks / 3
            cached_before = held
        return epochs / cost

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
        """The digest of all that the run learns by but the code, whose own digest is kept with its figures, as is what
        its seconds depend on beside that.
        """
        own = [each for each in self.settings if not each.startswith(("data.path=", "model.name=/"))]
        here = environment()
        versions = [here[key] for key in ("torch", "transformers", "timm")]
        task, script = self.task, self._script
        of_task = [task.name, task.config.name, task.metric, list(task.origin)]
        of_peer = None if script is None else file_digest(script)
        variables = dict(self.row.variables)
        return key_of([*of_task, self.row.name, own, variables, self.ranks, versions, of_peer], code=())

    @property
    def code(self) -> str:
        """The digest of the code that measures it today."""
        peer = "Trainer" if self.task.timm is None else "timm"
        return code_digest(peer if self.row.name == PEER else "ours")

    def found(self, kept: KeptRows, *, codes: Collection[str]) -> Figures | None:
        """Its figures by code with one of these digests; None where it is missing."""
        return next((figures for figures, code in self.of_any_code(kept) if code in codes), None)

    def of_any_code(self, kept: KeptRows) -> Iterator[tuple[Figures, str]]:
        """Its figures and the digest of the code that they were measured by, where it was ever measured."""
        row = kept.row(self.key)
        if row is not None:
            yield Figures.of(row), str(row["code"])

    def measure(self, kept: KeptRows) -> Figures:
        """Runs it, and keeps its figures. Raises UserError where it fails."""
        found = self.run()
        kept.keep(self.name, self.key, {**asdict(found), "code": self.code})
        return found

    def run(self) -> Figures:
        """Raises UserError where it fails."""
        with patch.dict(os.environ, self.row.variables):
            if self._script is not None:
                found = self._timm(self._script)
            else:
                found = self._trainer() if self.row.name == PEER else self._ours()
        return replace(found, start=self.task.start)

    @property
    def _script(self) -> Path | None:
        """timm's, where it runs the cell."""
        return self.task.timm if self.row.name == PEER else None

    def _ours(self) -> Figures:
        config = load_config(self.task.config, self.settings)
        with tempfile.TemporaryDirectory() as folder:
            place = (f"run.dir={folder}", "run.id=cell")
            entry = [str(ROOT / _ENTRIES[config.task])] if self.row.script is None else ["-m", self.row.script]
            launch([*entry, str(self.task.config), *self.settings, *place], ranks=self.ranks, name=self.name)
            summary = json.loads((Path(folder) / "cell" / "summary.json").read_text())
            lines = (Path(folder) / "cell" / "events.jsonl").read_text().splitlines()
        told = [json.loads(line) for line in lines]
        evaluations = [event for event in told if event["event"] == "evaluation"]
        return Figures(
            curve=tuple((event["train_s"], event["metrics"][self.task.metric]) for event in evaluations),
            train_s=summary["train_s"],
            wall_s=summary["wall_s"],
            floor_s=summary["compute_floor_s"],
            plans=tuple(
                (event["step"], event["plan"]["frozen"], event["plan"]["cached"])
                for event in told
                if event["event"] == "plan"
            ),
            steps=summary["steps"],
            loss=evaluations[-1]["metrics"].get("loss"),
            guard_s=sum(event["seconds"] for event in told if event["event"] == "guard"),
        )

    def _trainer(self) -> Figures:
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder) / "result.json"
            script = ["-m", "benchmarks.peers.hf_trainer", "0", str(self.task.config), str(result)]
            launch([*script, *self.settings], ranks=self.ranks, name=self.name)
            told = json.loads(result.read_text())
        curve = tuple((seconds, metric) for seconds, metric in told["curve"])
        return Figures(curve, train_s=sum(told["steps"]), wall_s=told["wall_s"], floor_s=None)

    def _timm(self, script: Path) -> Figures:
        config = load_config(self.task.config, self.settings)
        with tempfile.TemporaryDirectory() as folder:
            data, output = Path(folder) / "pictures", Path(folder) / "output"
            write_class_folders(config, data)
            given = arguments_of(config, data=data, ranks=self.ranks, output=output, workers=0, by_step=True)
            command = [timm_ranks.__file__, str(script.resolve()), *given]
            variables = faster_attention(config, ranks=self.ranks)
            begun = perf_counter()
            printed = launch(command, ranks=self.ranks, name=self.name, variables=variables)
            wall_s = perf_counter() - begun
            curve = curve_of(printed, output=output)
        return Figures(curve, train_s=curve[-1][0], wall_s=wall_s, floor_s=None)
