"""However a job ends, it ends whole: in seconds, with one last line, no process, shared memory or half a file left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from test_launch import ROOT

from pipetransformer.launch.node import free_port
from pipetransformer.plan import ParallelPlan
from pipetransformer.process.shutdown import installed
from pipetransformer.run.tracking import read_events

NUM_BLOCKS = 6
CONFIG = f"""
task: image_classification
model:
  name: vit_tiny_patch16_224
  pretrained: false
  kwargs: {{patch_size: 2, in_chans: 1, embed_dim: 192, depth: {NUM_BLOCKS}, num_heads: 4}}
data: {{name: digits, image_size: 8}}
train: {{epochs: 10, batch_size: 64, lr: 1e-4, eval_every: 4 steps}}
checkpoint: {{every: 4 steps, keep: 2}}
log: {{wandb: disabled, every: 1}}
run: {{id: x, dir: FOLDER}}
"""
LAUNCH = """
import sys
from pathlib import Path
from pipetransformer.launch.node import NodeJob, launch
config, port, *overrides = sys.argv[1:]
job = NodeJob(num_ranks=2, num_nodes=1, node_rank=0, address="127.0.0.1", port=int(port), config=config,
          overrides=tuple(overrides))
sys.exit(launch(job, entry=Path("tests/probed_entry.py")))
"""


@dataclass(frozen=True)
class Phase:
    """A moment of a run: how its entry runs, and how one sees from outside that the moment has come."""

    how: str
    has_come: Callable[[Path], bool]
    overrides: tuple[str, ...] = ()


def is_calibrating(folder: Path) -> bool:
    return all((folder / f"calibrating_{rank}").exists() for rank in (0, 1))


def happened(event: str, **fields: object) -> Callable[[Path], bool]:
    """The run has told ``event`` with these ``fields``."""

    def has_come(folder: Path) -> bool:
        path = folder / "x" / "events.jsonl"
        events = read_events(path) if path.exists() else []
        return any(e["event"] == event and fields.items() <= e.items() for e in events)

    return has_come


def exists(pattern: str) -> Callable[[Path], bool]:
    return lambda folder: next(folder.glob(pattern), None) is not None


PHASES = {
    "calibration": Phase("say_when_it_calibrates", is_calibrating),
    "steps at pp 2": Phase("train_only", happened("steps", step=3), ("log.wandb=offline",)),
    "evaluation": Phase("train_only", happened("steps", step=4)),
    "saving the best model": Phase("save_slowly", exists("x/model/best.part/model.safetensors")),
    "writing a checkpoint": Phase("train_only", exists("x/checkpoints/*.part/*.distcp")),
    "deleting an old checkpoint": Phase("train_only", exists("x/checkpoints/step-00000012"), ("checkpoint.keep=1",)),
    "cache advance": Phase("train_only", happened("transition", step=6)),
    "steps from the cache, with workers": Phase("train_only", happened("steps", step=7), ("data.num_workers=2",)),
    "saving the final model": Phase(
        "save_slowly", exists("x/model/final.part/*"), ("train.epochs=1", "data.max_train_samples=320")
    ),
}
QUICK = {"writing a checkpoint": signal.SIGTERM, "cache advance": signal.SIGINT}


def write_replay(path: Path) -> None:
    """From pp 2 to dp 2 and half of the blocks frozen and cached, after 6 steps."""
    first = ParallelPlan(0, 2, 1, (NUM_BLOCKS // 2 + 1,), 4, "1f1b", None, NUM_BLOCKS)
    second = ParallelPlan(NUM_BLOCKS // 2, 1, 2, (), 1, "1f1b", NUM_BLOCKS // 2, NUM_BLOCKS)
    events = [{"event": "plan", "step": step, "plan": plan.as_dict()} for step, plan in ((0, first), (6, second))]
    path.write_text("".join(f"{json.dumps(event)}\n" for event in events))


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Of one job. ``tmp`` in it is short when resolved, as a machine's is: sockets in it have a longest name."""
    with tempfile.TemporaryDirectory(prefix="end_", dir="/tmp") as temporary:
        (tmp_path / "tmp").symlink_to(temporary)
        yield tmp_path


@contextmanager
def started(folder: Path, how: str, *overrides: str) -> Iterator[subprocess.Popen[str]]:
    """A job of two ranks, in a session of its own as in a terminal of its own."""
    (folder / "config.yaml").write_text(CONFIG.replace("FOLDER", str(folder)))
    write_replay(folder / "replay.jsonl")
    replay = f"run.replay={folder / 'replay.jsonl'}"
    command = [sys.executable, "-c", LAUNCH, str(folder / "config.yaml"), str(free_port()), how, replay, *overrides]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str((folder / "tmp").resolve())},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_until(has_come: Callable[[Path], bool], *, folder: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while not has_come(folder):
        assert process.poll() is None, "the job ended before the moment came"
        assert time.monotonic() < deadline, "the moment did not come"
        time.sleep(0.001)


def ranks_of(process: subprocess.Popen[str]) -> dict[int, psutil.Process]:
    children = psutil.Process(process.pid).children()
    return {int(child.environ()["RANK"]): child for child in children if "RANK" in child.environ()}


def assert_nothing_is_left(folder: Path, *, family: list[psutil.Process], shared_memory: set[str]) -> None:
    _, alive = psutil.wait_procs(family, timeout=0.5)
    assert [p for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []  # dead, and not yet buried by its parent
    assert set(os.listdir("/dev/shm")) <= shared_memory
    assert [path for path in folder.rglob("*") if path.suffix in (".part", ".old")] == []
    assert [path for path in (folder / "tmp").iterdir() if not path.name.startswith("torchinductor")] == []
    for checkpoint in folder.glob("x/checkpoints/*"):
        assert json.loads((checkpoint / "state.json").read_text())["step"] == int(checkpoint.name[-8:])
    for model in folder.glob("x/model/*"):
        assert {path.name for path in model.iterdir()} == {"config.json", "model.safetensors"}


@pytest.mark.parametrize(
    ("name", "number"),
    [
        pytest.param(
            *(name, number),
            marks=() if QUICK.get(name) == number else pytest.mark.full,
            id=f"{name}-{number.name}",
        )
        for name in PHASES
        for number in (signal.SIGINT, signal.SIGTERM)
    ],
)
def test_a_signal_ends_the_job_in_every_phase(folder: Path, name: str, number: signal.Signals) -> None:
    """SIGINT goes to all processes, as from a terminal; SIGTERM to the launcher alone, as from a scheduler."""
    phase, shared_memory = PHASES[name], set(os.listdir("/dev/shm"))
    with started(folder, phase.how, *phase.overrides) as process:
        wait_until(phase.has_come, folder=folder, process=process)
        family = psutil.Process(process.pid).children(recursive=True)
        begin = time.monotonic()
        if number == signal.SIGINT:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        _, err = process.communicate(timeout=30)
    assert time.monotonic() - begin < 10
    assert err.splitlines()[0] == f"interrupted by {number.name}"
    assert process.returncode == 128 + number
    assert_nothing_is_left(folder, family=family, shared_memory=shared_memory)
    if name == "calibration":
        assert not (folder / "x").exists()


def test_what_nohup_has_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with installed():
            os.kill(os.getpid(), signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.full
def test_a_signal_ends_an_entry_that_runs_alone(folder: Path) -> None:
    """It saves after each step: the signal comes to libraries that catch whatever is raised."""
    shared_memory = set(os.listdir("/dev/shm"))
    (folder / "config.yaml").write_text(CONFIG.replace("FOLDER", str(folder)))
    overrides = ["checkpoint.every=1 steps", "train.eval_every=1 steps", "data.max_eval_samples=8", "log.wandb=offline"]
    with subprocess.Popen(
        [sys.executable, "main_cv.py", str(folder / "config.yaml"), *overrides],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str((folder / "tmp").resolve())},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        wait_until(exists("x/checkpoints/step-00000003.part/*"), folder=folder, process=process)
        family = psutil.Process(process.pid).children(recursive=True)
        begin = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert time.monotonic() - begin < 10
    assert err.splitlines()[0] == "interrupted by SIGINT"
    assert process.returncode == 128 + signal.SIGINT
    assert_nothing_is_left(folder, family=family, shared_memory=shared_memory)


SAVE = """
import os, signal, sys
from concurrent.futures import wait
from contextlib import contextmanager
from pathlib import Path
import torch
from torch.distributed.checkpoint.filesystem import FileSystem
from pipetransformer.adapter import save_tensors
from pipetransformer.launch.entry import run_guarded
from pipetransformer.process.collectives import begun

class Interrupting:
    def __init__(self, stream):
        self.stream = stream

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def write(self, data):
        os.kill(os.getpid(), signal.SIGINT)
        return self.stream.write(data)

opened = FileSystem.create_stream

@contextmanager
def interrupting(self, path, mode):
    with opened(self, path, mode) as stream:
        yield Interrupting(stream) if mode == "wb" else stream

FileSystem.create_stream = interrupting
tensors, folder = {"weight": torch.ones(1000)}, Path(sys.argv[1])

def save():
    answer = begun(lambda: save_tensors(tensors, folder, group=None))
    try:
        answer.result()
    finally:
        wait([answer], timeout=2)  # as a run does

sys.exit(run_guarded(save))
"""


def test_a_signal_is_not_raised_inside_a_write_of_torch(tmp_path: Path) -> None:
    """Else its writer aborts the process: "terminate called ...", exit code -6."""
    command = [sys.executable, "-c", SAVE, str(tmp_path)]
    ended = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (128 + signal.SIGINT, "interrupted by SIGINT\n")


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        pytest.param("cache advance", 0, marks=pytest.mark.full),
        pytest.param("steps at pp 2", 1, marks=pytest.mark.full),
        pytest.param("writing a checkpoint", 0, marks=pytest.mark.full),
        pytest.param("writing a checkpoint", 1, marks=pytest.mark.full),
    ],
)
def test_the_death_of_a_rank_ends_the_job(folder: Path, name: str, rank: int) -> None:
    phase, shared_memory = PHASES[name], set(os.listdir("/dev/shm"))
    with started(folder, phase.how, *phase.overrides, "log.wandb=offline") as process:
        wait_until(phase.has_come, folder=folder, process=process)
        family = psutil.Process(process.pid).children(recursive=True)
        begin = time.monotonic()
        ranks_of(process)[rank].kill()
        _, err = process.communicate(timeout=30)
    assert time.monotonic() - begin < 10
    assert err.splitlines()[-1] == f"rank {rank}: ended by SIGKILL (out of memory?)"
    assert process.returncode == 1
    assert_nothing_is_left(folder, family=family, shared_memory=shared_memory)


def test_a_rank_that_raises_ends_the_job_with_its_cause(folder: Path) -> None:
    shared_memory = set(os.listdir("/dev/shm"))
    with started(folder, "raise_on_rank_1_at_step_5") as process:
        wait_until(happened("steps", step=5), folder=folder, process=process)
        family = psutil.Process(process.pid).children(recursive=True)
        begin = time.monotonic()
        _, err = process.communicate(timeout=30)
    assert time.monotonic() - begin < 10
    assert err.splitlines()[-1] == "rank 1: ValueError: the cause (step 5, optimizer)"
    assert err.count("Traceback") == 1
    assert process.returncode == 1
    assert_nothing_is_left(folder, family=family, shared_memory=shared_memory)


@pytest.mark.full
def test_a_loss_that_is_not_finite_names_the_rank_that_computed_it(folder: Path) -> None:
    with started(folder, "train_only", "train.lr=1e30") as process:
        _, err = process.communicate(timeout=60)
    (line,) = err.splitlines()
    assert line.startswith("rank 1: step 1, rank 1: the loss is not finite; there is no checkpoint; lower train.lr")
    assert process.returncode == 1


PREPARE = """
import sys, threading, time
import numpy as np
from pipetransformer.process import shutdown
from pipetransformer.launch.entry import run_guarded
from pipetransformer.data.prepared import alone, prepared

class Endless:
    def __array__(self, *arguments, **settings):
        time.sleep(60)

def prepare():
    prepared(lambda: "key", lambda: {"first": np.arange(3), "second": Endless()}, lead=alone)

def wait():
    threading.Thread(target=prepare, daemon=True).start()
    time.sleep(60)

if sys.argv[1] == "alone":
    sys.exit(run_guarded(prepare))
shutdown.leave(run_guarded(wait))  # as a process ends that has peers
"""


@pytest.mark.parametrize("how", ["alone", "with peers"])
def test_an_interrupted_preparation_leaves_no_half(folder: Path, how: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PIPETRANSFORMER_CACHE": str(folder / "cache")}
    command = [sys.executable, "-c", PREPARE, how]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        wait_until(exists("cache/*.part/second.npy"), folder=folder, process=process)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert (process.returncode, err.splitlines()[0]) == (128 + signal.SIGINT, "interrupted by SIGINT")
    assert list((folder / "cache").iterdir()) == []
