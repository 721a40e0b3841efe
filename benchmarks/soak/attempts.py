"""Runs that are killed at random instants and resumed until they end, and what each kill costs."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, sleep

import psutil

from benchmarks.soak.forked import ForkedJob, running
from pipetransformer.launch.node import free_port
from pipetransformer.run.tracking import read_events

ROOT = Path(__file__).resolve().parents[2]
RANKS = 4
_COMMON = (
    *("train.epochs=4", "train.precision=float32", "train.batch_size=32", "checkpoint.every=2 steps", "log.every=5"),
    *(
        "log.wandb=disabled",
        "log.report=false",
        "pipe.measure=false",
        "pipe.initial_length=4",
        "freeze.policy=schedule",
        "run.id=soak",
    ),
    *("freeze.every=4 steps", "freeze.alpha=0.4", "freeze.guard=false", "run.timeout=60", "train.eval_every=1 epoch"),
)
TASKS: dict[str, tuple[str, str, tuple[str, ...]]] = {  # task, configuration, settings
    "digits": (
        "image_classification",
        "train_config_digits_all_in_one.yaml",
        (
            "model.kwargs={patch_size: 2, in_chans: 1, embed_dim: 16, depth: 6, num_heads: 2}",
            *("data.max_train_samples=150", "data.max_eval_samples=40"),
        ),
    ),
    "text": (
        "text_classification",
        "train_config_demo_text.yaml",
        (
            "model.kwargs={hidden_size: 16, intermediate_size: 32, num_hidden_layers: 6, num_attention_heads: 2}",
            *("data.max_train_samples=120", "data.max_eval_samples=40", "data.max_length=32", "train.epochs=2"),
        ),
    ),
}


@dataclass
class Tally:
    """Kills survived, and what they cost. Times are in seconds.

    Attributes:
        kills: number of kills.
        runs: number of runs that ended with the weights of the undisturbed one, to the bit.
        detect: from each kill to the end of the last rank.
        restart: from each start to the resumption, with all that is read.
        load: from a resumption to the first step, but for the refill.
        refill: of the cache, where the checkpoint's plan had one.
    """

    kills: int = 0
    runs: int = 0
    detect: list[float] = field(default_factory=list)
    restart: list[float] = field(default_factory=list)
    load: list[float] = field(default_factory=list)
    refill: list[float] = field(default_factory=list)


class Soak:
    """One task, killed again and again.

    Args:
        folder: of everything that it writes.
        seed: of the moments and the ranks of the kills.
    """

    def __init__(self, task: str, folder: Path, *, seed: int) -> None:
        self._kind, config, settings = TASKS[task]
        self._config, self._folder = ROOT / "config" / config, folder
        self._settings, self._draws = (*_COMMON, *settings), random.Random(f"{task} {seed}")
        reference = folder / "undisturbed"
        reference.mkdir(parents=True, exist_ok=True)
        for _ in range(2):  # the first waits for the server's imports
            began = monotonic()
            seconds = self._forked(self._arguments(reference, "run.overwrite=true"), kills=False)
            assert seconds is None
        self._seconds = monotonic() - began
        self._events, self.digest = reference / "soak" / "events.jsonl", digest_of(reference / "soak")

    def _arguments(self, folder: Path, *more: str) -> list[str]:
        return [str(self._config), *self._settings, f"run.dir={folder}", *more]

    def run(self, tally: Tally, *, most_kills: int, through_script: bool = False) -> None:
        """One run, killed until it ends, or ``most_kills`` times.

        Raises:
            AssertionError: if its weights are not those of the undisturbed run, or something is left behind.
        """
        folder = self._folder / "killed"
        before = set(os.listdir("/dev/shm"))
        killed = 0
        # Plans depend on times: those of the undisturbed run are taken again.
        settings = (f"run.replay={self._events}", "run.resume=auto")
        attempt = self._by_script if through_script else self._forked
        while True:
            began, seen = _now(folder), len(_events(folder))
            kills = killed < most_kills
            seconds = attempt(self._arguments(folder, *settings), kills=kills)
            self._note(tally, folder, began=began, seen=seen)
            if seconds is None:
                break
            killed, tally.kills = killed + 1, tally.kills + 1
            tally.detect.append(seconds)
        assert digest_of(folder / "soak") == self.digest, f"other weights after {killed} kills"
        _assert_nothing_is_left(folder, shared_memory=before)
        tally.runs += 1
        _delete(folder)

    def _forked(self, arguments: Sequence[str], *, kills: bool) -> float | None:
        """Returns the seconds that the other ranks took to end; None where the run has ended well."""
        with running(ForkedJob(self._kind, arguments, num_ranks=RANKS)) as job:
            if kills:
                sleep(self._draws.uniform(0.0, 0.6 * self._seconds))
                job.kill(self._victims())
            ended = job.supervise()
        assert kills or ended.exit_code == 0, ended.cause
        return ended.seconds if ended.exit_code else None

    def _victims(self) -> Sequence[int]:
        return range(RANKS) if self._draws.random() < 0.2 else [self._draws.randrange(RANKS)]

    def _by_script(self, arguments: Sequence[str], *, kills: bool) -> float | None:
        """The same through ``run_pipetransformer.sh``: a rank is killed, or the launcher with all of them."""
        config, *overrides = arguments
        overrides = [text for text in overrides if not text.startswith("run.id=")]
        command = ["sh", "run_pipetransformer.sh", str(RANKS), "1", "0", "127.0.0.1", str(free_port()), config, "soak"]
        with subprocess.Popen(
            [*command, *overrides],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                if kills:
                    self._await_ranks(process.pid)
                    sleep(self._draws.uniform(0.0, 4.0 * self._seconds))  # imports take the first of them
                    began = monotonic()
                    for each in self._family(process.pid):
                        each.kill()
                _, err = process.communicate(timeout=120)
            finally:
                os.killpg(process.pid, signal.SIGKILL) if process.poll() is None else None
        if process.returncode == 0:
            return None
        assert kills, err
        return monotonic() - began

    def _await_ranks(self, launcher: int) -> None:
        until = monotonic() + 60
        while len(_ranks_of(launcher)) < RANKS:
            assert monotonic() < until, "the ranks did not come"
            sleep(0.05)

    def _family(self, launcher: int) -> list[psutil.Process]:
        ranks = _ranks_of(launcher)
        if self._draws.random() < 0.2:
            return [psutil.Process(launcher), *ranks] if psutil.pid_exists(launcher) else ranks
        return [self._draws.choice(ranks)] if ranks else []

    def _note(self, tally: Tally, folder: Path, *, began: float, seen: int) -> None:
        """The times of an attempt, from its events."""
        new = _events(folder)[seen:]
        resumed = next((event["time"] for event in new if event["event"] == "resume"), None)
        if resumed is None:
            return
        tally.restart.append(resumed - began)
        started = next((event["time"] for event in new if event["event"] == "run"), None)
        begun = next((number for number, event in enumerate(new) if event["event"] == "run"), 0)
        refills = [event["seconds"] + event["evaluation_s"] for event in new[:begun] if event["event"] == "advance"]
        if started is not None:
            tally.load.append(started - resumed - sum(refills))
            tally.refill += [sum(refills)] if refills else []


def digest_of(run: Path) -> str:
    """SHA-256 of the final weights, in hex."""
    return hashlib.sha256((run / "model" / "final" / "model.safetensors").read_bytes()).hexdigest()


def _events(folder: Path) -> list[dict[str, float]]:
    path = folder / "soak" / "events.jsonl"
    return read_events(path) if path.exists() else []


def _now(folder: Path) -> float:
    """The clock of events."""
    from time import time

    folder.mkdir(parents=True, exist_ok=True)
    return time()


def _ranks_of(launcher: int) -> list[psutil.Process]:
    found = []
    with _vanishing():
        for child in psutil.Process(launcher).children(recursive=True):
            with _vanishing():
                if "RANK" in child.environ() and child.ppid() != 1:
                    found.append(child)
    return [child for child in found if _is_rank(child)]


def _is_rank(process: psutil.Process) -> bool:
    with _vanishing():
        return any(argument.endswith(".py") for argument in process.cmdline())
    return False


@contextmanager
def _vanishing() -> Iterator[None]:
    with suppress(psutil.Error):
        yield


def _assert_nothing_is_left(folder: Path, *, shared_memory: set[str]) -> None:
    assert set(os.listdir("/dev/shm")) <= shared_memory, "shared memory is left"
    halves = [path for path in folder.rglob("*") if path.suffix in (".part", ".old")]
    assert halves == [], f"left: {halves}"
    for checkpoint in (folder / "soak" / "checkpoints").iterdir():
        assert json.loads((checkpoint / "state.json").read_text())["step"] == int(checkpoint.name[-8:])


def _delete(folder: Path) -> None:
    import shutil

    shutil.rmtree(folder)
