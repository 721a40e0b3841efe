"""Whatever fails, at whatever moment: one line with the cause and the rank, and the run goes on as if nothing had been.

Ranks are forks that run the project's own entry; ``supervise`` stands for torchrun.
"""

from __future__ import annotations

import hashlib
import json
import re
import signal
from pathlib import Path
from time import sleep
from typing import get_args

import numpy as np
import pytest
from faults import BESIDE, HOWS, WRITING, Fault, How, fail_at
from safetensors.numpy import load_file
from test_launch import ROOT

from benchmarks.soak.forked import Ended, ForkedJob, running
from pipetransformer.config import load_config
from pipetransformer.process.whereabouts import Phase
from pipetransformer.run.tracking import read_events

CONFIG = f"{ROOT}/config/train_config_digits_no_freeze.yaml"
SETTINGS = (
    "model.kwargs={patch_size: 2, in_chans: 1, embed_dim: 16, depth: 6, num_heads: 2}",
    *("data.max_train_samples=96", "data.max_eval_samples=32", "train.epochs=4", "train.batch_size=16"),
    *(
        "train.precision=float32",
        "train.eval_every=2 epochs",
        "checkpoint.every=3 steps",
        "log.wandb=disabled",
        "log.report=false",
    ),
    *("log.every=2", "pipe.measure=false", "pipe.initial_length=2", "run.id=x"),
)
DECIDES = ("freeze.policy=static", "freeze.max_frozen=3", "freeze.warmup=2 epochs", "freeze.guard=false")
STEPS = 24
MOMENTS: dict[Phase, int] = {  # of each phase, so many steps done that it comes at a place of its own
    "set-up": 0,
    "measuring": 0,
    "forward": 7,
    "backward": 8,
    "reduction": 16,
    "optimizer": 10,
    "transition": 12,
    "cache advance": 12,
    "evaluation": 12,
    "checkpoint write": 9,
    "checkpoint publish": 9,
    "model save": 24,
}


def run(folder: Path, *settings: str, fault: Fault | None = None, timeout: float = 4.0) -> Ended:
    overrides = [*SETTINGS, f"run.dir={folder}", f"run.timeout={timeout}", *settings]
    job = ForkedJob("image_classification", [CONFIG, *overrides], num_ranks=2, setup=fault)
    with running(job):
        return job.supervise(stop_seconds=1.5)


def final_file(folder: Path) -> Path:
    return folder / "x" / "model" / "final" / "model.safetensors"


def final_model(folder: Path) -> str:
    return hashlib.sha256(final_file(folder).read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The events of a run without faults, and the digest of its model."""
    folder = tmp_path_factory.mktemp("undisturbed")
    ended = run(folder, *DECIDES, timeout=60.0)
    assert ended.exit_code == 0, ended.cause
    return folder / "x" / "events.jsonl", final_model(folder)


def replayed(events: Path) -> str:
    """Plans depend on times: those of the undisturbed run are taken again."""
    return f"run.replay={events}"


def goes_on(folder: Path, undisturbed: tuple[Path, str]) -> None:
    """Resumed, the run ends with the weights of the undisturbed one, to the bit."""
    events, digest = undisturbed
    ended = run(folder, replayed(events), "run.resume=auto", timeout=60.0)
    assert ended.exit_code == 0, ended.cause
    assert final_model(folder) == digest


def line_of(phase: Phase, how: How, rank: int) -> str:
    """The beginning of the last line of a job that such a fault ends."""
    return {
        "raise": f"rank {rank}: RuntimeError: planted (step {MOMENTS[phase]}, {phase})",
        "kill": f"rank {rank}: ended by SIGKILL (out of memory?)",
        "stop": f"rank {rank}: it did not answer within run.timeout, nor end when it was told to: it hung, or was sto",
        "hang": f"rank {rank}: no answer within run.timeout; it was at step {MOMENTS[phase]}, {phase}",
        "out of memory": f"rank {rank}: out of memory at step {MOMENTS[phase]}, {phase} (CUDA out of memory. Tried"
        if MOMENTS[phase]
        else f"rank {rank}: OutOfMemoryError: CUDA out of memory",
        "sigterm": f"rank {rank}: ended by SIGTERM",
    }[how]


QUICK = {("backward", "raise"), ("transition", "hang"), ("checkpoint write", "kill")}
QUICK |= {("forward", "sigterm"), ("checkpoint publish", "full disk"), ("checkpoint write", "slow disk")}
CASES = [
    pytest.param(phase, how, marks=() if (phase, how) in QUICK else pytest.mark.full, id=f"{phase}-{how}")
    for phase in get_args(Phase)
    for how in HOWS
    if phase in WRITING or how not in ("slow disk", "full disk")  # the others write nothing that they wait for
    if (phase, how) != ("reduction", "sigterm")  # as in every phase of a step
    if phase not in BESIDE or how != "hang"  # a disk that never answers is waited for like a slow one
]


@pytest.mark.parametrize(("phase", "how"), CASES)
def test_a_fault_is_named_and_nothing_is_lost(
    phase: Phase, how: How, undisturbed: tuple[Path, str], tmp_path: Path
) -> None:
    rank = 0 if phase in ("checkpoint publish", "model save", "measuring") else 1
    fault = fail_at(rank=rank, step=MOMENTS[phase], phase=phase, how=how)
    ended = run(tmp_path, replayed(undisturbed[0]), fault=fault)
    if how == "slow disk" or (how == "full disk" and phase != "model save"):
        assert (ended.exit_code, ended.cause) == (0, "")
        assert final_model(tmp_path) == undisturbed[1]
        if how == "full disk":
            (warning,) = [line for line in ended.out.splitlines() if "the checkpoint is not saved" in line]
            assert warning.startswith("warning: step 9: the checkpoint is not saved (")
            assert warning.endswith("; training goes on; the last good checkpoint is step-00000006")
            assert "No space left on device" in warning
            assert not list((tmp_path / "x" / "checkpoints").glob("*.part"))
            (event,) = [e for e in read_events(tmp_path / "x" / "events.jsonl") if e["event"] == "not_saved"]
            assert event["good"] == "step-00000006"
        return
    if how == "sigterm" and ended.exit_code == 0:  # the last step was done
        assert phase == "model save" and final_model(tmp_path) == undisturbed[1]
        return
    if how == "full disk":
        assert "run.dir: " in ended.cause and "cannot be written" in ended.cause
    else:
        assert ended.cause.startswith(line_of(phase, how, rank))
    if how == "sigterm" and MOMENTS[phase] > 0:
        step = json.loads(next(Path(tmp_path, "x", "checkpoints").glob("step-*/state.json")).read_text())["step"]
        assert ended.cause.endswith(f"; step {step} is saved; go on with run.id=x run.resume=true")
        assert MOMENTS[phase] <= step <= MOMENTS[phase] + (5 if phase in BESIDE else 1)
    goes_on(tmp_path, undisturbed)


def test_an_end_where_an_evaluation_is_due_does_not_lose_it(undisturbed: tuple[Path, str], tmp_path: Path) -> None:
    fault = fail_at(rank=1, step=11, phase="optimizer", how="sigterm")
    ended = run(tmp_path, replayed(undisturbed[0]), fault=fault)
    assert ended.cause.endswith("; step 12 is saved; go on with run.id=x run.resume=true")
    goes_on(tmp_path, undisturbed)
    told = read_events(tmp_path / "x" / "events.jsonl")
    assert [event["step"] for event in told if event["event"] == "evaluation"] == [12, 24]


def test_out_of_memory_goes_on_with_a_smaller_plan(tmp_path: Path) -> None:
    nothing_frozen = ("freeze.policy=none", "train.batch_size=24", "pipe.initial_length=1")
    fault = fail_at(rank=1, step=8, phase="backward", how="out of memory")
    assert run(tmp_path / "undisturbed", *nothing_frozen, timeout=60.0).exit_code == 0
    ended = run(tmp_path, *nothing_frozen, fault=fault)
    assert "pp 1 x dp 2, M 1 was to take " in ended.cause, "the fastest plan"
    said = re.search(r"run.resume=auto goes on with pp 1 x dp 2, M (\d+), for ([\d,]+) at most$", ended.cause)
    assert said, ended.cause
    assert run(tmp_path, *nothing_frozen, "run.resume=auto", timeout=60.0).exit_code == 0
    told = read_events(tmp_path / "x" / "events.jsonl")
    (resumed,) = [event for event in told if event["event"] == "plan" and event["reason"] == "resume"]
    assert (resumed["step"], resumed["plan"]["num_microbatches"]) == (8, int(said[1])) and int(said[1]) > 1
    settings = load_config(tmp_path / "x" / "config.yaml", is_past=True)
    assert settings.pipe.memory_limit == int(said[2].replace(",", ""))
    ours, usual = (load_file(final_file(folder)) for folder in (tmp_path, tmp_path / "undisturbed"))
    assert all(np.allclose(ours[name], usual[name], rtol=1e-3, atol=1e-5) for name in usual)


def test_sigterm_may_end_at_once(undisturbed: tuple[Path, str], tmp_path: Path) -> None:
    fault = fail_at(rank=1, step=8, phase="forward", how="sigterm")
    ended = run(tmp_path, replayed(undisturbed[0]), "run.on_sigterm=end", fault=fault)
    assert ended.cause == "rank 1: ended by SIGTERM (step 8, forward)"
    goes_on(tmp_path, undisturbed)


def test_a_scheduler_tells_all_ranks_to_end(undisturbed: tuple[Path, str], tmp_path: Path) -> None:
    """They save once, and the run goes on from there."""
    overrides = [*SETTINGS, f"run.dir={tmp_path}", "checkpoint.every=1000 steps", replayed(undisturbed[0])]
    job = ForkedJob("image_classification", [CONFIG, *overrides], num_ranks=2, setup=_slow_steps)
    with running(job):
        events = tmp_path / "x" / "events.jsonl"
        while not (events.exists() and '"steps"' in events.read_text()):
            sleep(0.01)
        job.signal([0, 1], signal.SIGTERM)
        ended = job.supervise()
    assert ended.exit_code == 128 + signal.SIGTERM
    (saved,) = (tmp_path / "x" / "checkpoints").iterdir()
    assert f"told to end: step {int(saved.name[-8:])} is saved; go on with run.id=x run.resume=true" in ended.out
    goes_on(tmp_path, undisturbed)


def _slow_steps(rank: int) -> None:
    from pipetransformer.process.whereabouts import HERE, Whereabouts

    def pause(here: Whereabouts) -> None:
        if here.phase == "optimizer":
            sleep(0.2)

    HERE.listener = pause
