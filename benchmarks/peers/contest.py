"""One run of a contestant in processes of its own, and a round of all: ours and the peer, the same job.

Rounds are kept: they are measured anew where the code of the package, of this benchmark or of the libraries is another.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import mean

from benchmarks.peers import timm_ranks
from benchmarks.peers.timm_train import arguments_of, faster_attention, step_seconds
from benchmarks.support.kept import KeptRows, key_of
from benchmarks.support.measure import environment
from benchmarks.support.ranks import import_path
from pipetransformer.config import load_config
from pipetransformer.errors import UserError

__all__ = ["HF", "KEEPS", "OURS", "RUNS", "TIMM", "Contest", "Found", "Task", "once", "run", "settings_of"]

RUNS = "peers-runs.json"
# Runs a command and writes the most bytes that one of its processes held, its validation's with them.
_PEAK = """
import resource, subprocess, sys
ended = subprocess.run(sys.argv[2:])
open(sys.argv[1], "w").write(str(1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss))
sys.exit(ended.returncode)
"""
# Another text of these makes all rounds missing.
CODE = ("pipetransformer/**/*.py", "benchmarks/peers/*.py", "benchmarks/support/sst2.py", "config/*.yaml")
OURS, WITHOUT = "ours", {"ours, whole last block": "model.head_row_only=false", "ours, stem frozen": "freeze.stem=true"}
HF, TIMM = "Trainer (transformers)", "train.py (timm)"
KEEPS = ", freed memory kept"  # suffix of a peer's name: with the C library's settings that ours makes itself
MALLOC = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**62), "MALLOC_TOP_PAD_": str(2**26)}


@dataclass(frozen=True, slots=True)
class Task:
    """A model on some data.

    Attributes:
        config: the configuration file, with ``overrides``.
        peer: the library beside ours.
        pictures: class folders, for timm's script.
    """

    name: str
    config: Path
    overrides: tuple[str, ...]
    peer: str
    pictures: Path | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """Of one run."""

    samples_per_s: float
    step_s: float
    peak_bytes: int | None
    accuracy: float | None

    @classmethod
    def of(cls, row: object) -> Found:
        assert isinstance(row, Mapping)
        return cls(**row)


@dataclass(frozen=True, slots=True)
class Contest:
    """Ours and the peer, on so many ranks.

    Attributes:
        kept: the rounds that have been measured.
    """

    task: Task
    ranks: int
    precision: str
    timm: Path | None
    kept: KeptRows

    @property
    def name(self) -> str:
        return f"{self.task.name}, {self.ranks} rank{'s' if self.ranks > 1 else ''}"

    def contestants(self) -> dict[str, tuple[str, ...]]:
        """By name, in their order: overrides of their own."""
        ours: dict[str, tuple[str, ...]] = {OURS: (), **{name: (own,) for name, own in WITHOUT.items()}}
        task = self.task
        return ours if task.peer == TIMM and self.timm is None else {**ours, task.peer: (), task.peer + KEEPS: ()}

    def workers(self) -> tuple[int, str]:
        """Processes that prepare the peer's batches, the faster of none and one; a line that tells both rates."""
        peer = self.task.peer

        def measure() -> dict[str, object]:
            return {str(number): asdict(self._run(peer, (), workers=number)) for number in (0, 1)}

        found = once(self.kept, f"{self.name}, the peer's processes", measure, settings=self._settings())
        none, one = (Found.of(found[str(number)]).samples_per_s for number in (0, 1))
        number = int(one > none)
        rates = f"{none:.1f} samples/s with 0, {one:.1f} with 1"
        return number, f"{self.name}: {peer} takes {number} processes for its batches: {rates}."

    def round(self, number: int, *, workers: int) -> dict[str, Found]:
        """One run of each contestant, every other round in the opposite order."""
        contestants = self.contestants()

        def measure() -> dict[str, object]:
            turns = list(contestants.items())[:: 1 if number % 2 else -1]
            return {"runs": {name: asdict(self._run(name, own, workers=workers)) for name, own in turns}}

        settings = [*self._settings(), workers, {name: list(own) for name, own in contestants.items()}]
        row = once(self.kept, f"{self.name}, round {number + 1}", measure, settings=settings)
        runs = row["runs"]
        assert isinstance(runs, dict)
        return {name: Found.of(runs[name]) for name in contestants}

    def _run(self, name: str, own: Sequence[str], *, workers: int) -> Found:
        chosen = (*self.task.overrides, f"train.precision={self.precision}", *own)
        return run(name, self.task, chosen, ranks=self.ranks, timm=self.timm, workers=workers)

    def _settings(self) -> list[object]:
        script = None if self.timm is None else self.timm.read_text(encoding="utf-8")
        return [*settings_of(self.task), self.precision, script if self.task.peer == TIMM else None]


def settings_of(task: Task) -> list[object]:
    """What its figures depend on beside the code: not where its files lie."""
    own = [override for override in task.overrides if not override.startswith(("data.path=", "model.name=/"))]
    here = environment()
    versions = [here[key] for key in ("cpu", "torch", "transformers", "timm")]
    return [task.config.name, own, task.peer, *versions, version("accelerate")]


def once(
    kept: KeptRows, name: str, measure: Callable[[], Mapping[str, object]], *, settings: Sequence[object]
) -> Mapping[str, object]:
    """The row that is kept, or a new one: in the place of the one with the same settings, which had other code."""
    key = key_of([name, *settings], code=CODE)
    row = kept.row(key)
    if row is None:
        row = measure()
        kept.keep(f"{name} ({key_of(settings, code=())})", key, row)
    return row


def run(name: str, task: Task, overrides: Sequence[str], *, ranks: int, timm: Path | None, workers: int) -> Found:
    """One contestant's epoch, in processes of its own. Raises UserError where it fails."""
    keeps, name = name.endswith(KEEPS), name.removesuffix(KEEPS)
    with tempfile.TemporaryDirectory() as folder:
        result, launcher = Path(folder) / "result.json", [sys.executable]
        if ranks > 1:
            launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        if name == TIMM:
            assert timm is not None and task.pictures is not None
            config, output = load_config(task.config, overrides), Path(folder) / "out"
            given = arguments_of(config, data=task.pictures, ranks=ranks, output=output, workers=workers)
            script = [timm_ranks.__file__, str(timm.resolve())]
            command = [sys.executable, "-c", _PEAK, str(result), *launcher, *script, *given]
        else:
            script = ["benchmarks.peers.hf_trainer", str(workers)] if name == HF else ["benchmarks.peers.ours"]
            given = [*overrides, f"run.dir={folder}/runs", "run.id=peer"]
            command = [*launcher, "-m", *script, str(task.config), str(result), *given]
        environment = {**os.environ, **import_path(), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        if keeps:
            environment |= MALLOC
        if name == TIMM:
            environment |= faster_attention(config, ranks=ranks)
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=folder)
        if ended.returncode:
            raise UserError(f"{name}: {task.name} failed: {(ended.stderr or ended.stdout).strip()[-2000:]}")
        if name == TIMM:
            seconds = step_seconds(ended.stdout + ended.stderr, epoch=config.train.epochs - 1)
            return Found(config.train.batch_size / seconds, seconds, int(result.read_text()), None)
        told = json.loads(result.read_text())
    epochs = load_config(task.config, overrides).train.epochs
    steps = told["steps"][-(len(told["steps"]) // epochs) :]
    return Found(told["samples"] / epochs / sum(steps), mean(steps), told["peak_bytes"], told["accuracy"])
