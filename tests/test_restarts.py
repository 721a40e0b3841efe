"""Torch's elastic agents start ranks anew, on the nodes that are there; the run ends as if nothing had been."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import psutil
import pytest
from laws import Case, deviation, reference
from safetensors.numpy import load_file
from test_launch import DIGITS, ROOT

from pipetransformer.errors import UserError
from pipetransformer.launch.node import free_port, parse_job
from pipetransformer.run.tracking import read_events

CASE = Case("vit", 1, ((0, 3, 1),), cached=True)
SETTINGS = (
    *CASE.overrides(""),
    *("freeze.policy=static", "freeze.max_frozen=3", "freeze.guard=false", "pipe.measure=false", "run.timeout=20"),
    *("checkpoint.every=1 step", "log.every=1", "pipe.initial_length=1"),
)
SLOWLY = """
import runpy, sys, time
from pipetransformer.process.whereabouts import HERE

def pause(here):
    if here.phase == "optimizer":
        time.sleep(0.3)

HERE.listener = pause
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""


def start(
    folder: Path,
    nnodes: str,
    node: int,
    port: int,
    *more: str,
    within: Sequence[str] = (),
    address: str = "127.0.0.1",
    **environment: str,
) -> subprocess.Popen[str]:
    """One launcher of one rank, whose steps take long enough to be met; ``within`` is a command that runs it."""
    command = [*within, sys.executable, "-m", "pipetransformer.launch", "1", nnodes, str(node), address, str(port)]
    return subprocess.Popen(
        [*command, DIGITS, "x", *SETTINGS, *more, f"run.dir={folder}"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHON_EXEC": str(slow_python(folder)), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def slow_python(folder: Path) -> Path:
    """An interpreter whose jobs take their time, as torchrun's variable names one."""
    (folder / "slowly.py").write_text(SLOWLY)
    script = folder / "python.sh"
    script.write_text(f'#!/bin/sh\nshift\nexec {sys.executable} {folder / "slowly.py"} "$@"\n')
    script.chmod(0o755)
    return script


def steps_of(folder: Path) -> list[int]:
    path = folder / "x" / "events.jsonl"
    return [event["step"] for event in read_events(path) if event["event"] == "steps"] if path.exists() else []


def wait_until(has_come: Callable[[], bool], *, seconds: float = 90) -> None:
    until = time.monotonic() + seconds
    while not has_come():
        assert time.monotonic() < until, "the moment did not come"
        time.sleep(0.05)


def worlds(folder: Path) -> list[int]:
    return [event["world_size"] for event in read_events(folder / "x" / "events.jsonl") if event["event"] == "run"]


def ends_as_the_plain_loop(folder: Path, *, num_nodes: int = 1) -> None:
    weights, _ = reference(CASE, "", num_nodes=num_nodes)
    ours = load_file(folder / "x" / "model" / "final" / "model.safetensors")
    assert deviation(ours, {name: np.asarray(weights[name]) for name in ours}) < 1e-10


def test_a_rank_that_dies_is_started_anew(tmp_path: Path) -> None:
    with start(tmp_path, "1", 0, free_port(), "--max-restarts=1") as process:
        wait_until(lambda: len(steps_of(tmp_path)) >= 6)
        (rank,) = [child for child in psutil.Process(process.pid).children(recursive=True) if is_rank(child)]
        rank.kill()
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "rank 0: ended by SIGKILL (out of memory?); the ranks start anew (0 of 1 restarts are left)" in out
    assert len(worlds(tmp_path)) == 2 and steps_of(tmp_path).count(1) == 1, "it went on from a checkpoint"
    ends_as_the_plain_loop(tmp_path)


def is_rank(process: psutil.Process) -> bool:
    return "slowly.py" in " ".join(process.cmdline())


@pytest.mark.full
def test_a_node_goes_and_another_comes(tmp_path: Path) -> None:
    """Two nodes of one rank each; one is killed, the other goes on alone; a node joins it again."""
    port = free_port()
    with start(tmp_path, "1:2", 0, port, "--max-restarts=3") as first:
        try:
            second = start(tmp_path, "1:2", 1, port, "--max-restarts=3")
            wait_until(lambda: len(steps_of(tmp_path)) >= 4)
            assert worlds(tmp_path) == [2]
            os.killpg(second.pid, signal.SIGKILL)
            second.communicate()
            wait_until(lambda: worlds(tmp_path)[-1] == 1)
            at = len(steps_of(tmp_path))
            wait_until(lambda: len(steps_of(tmp_path)) >= at + 2)
            second = start(tmp_path, "1:2", 1, port, "--max-restarts=3")
            out, err = first.communicate(timeout=180)
            second.communicate(timeout=60)
        finally:
            os.killpg(first.pid, signal.SIGKILL) if first.poll() is None else None
    assert first.returncode == 0, err
    assert worlds(tmp_path) == [2, 1, 2], out
    assert "nodes have come or gone; the ranks start anew" in out
    ends_as_the_plain_loop(tmp_path, num_nodes=2)


@pytest.mark.full
def test_fewer_nodes_than_the_fewest_are_told(tmp_path: Path) -> None:
    with start(tmp_path, "2:3", 0, free_port(), "run.timeout=8") as process:
        _, err = process.communicate(timeout=120)
    assert process.returncode == 2
    assert err.splitlines()[-1].startswith("error: NNODES: fewer than 2 nodes met at 127.0.0.1:")


ARGUMENTS = ("2", "1:4", "0", "127.0.0.1", "29511", DIGITS, "x")


def test_the_command_line_of_nodes_that_come_and_go() -> None:
    job = parse_job([*ARGUMENTS, "--max-restarts=3", "train.lr=1"])
    assert (job.fewest_nodes, job.num_nodes, job.max_restarts, job.is_elastic) == (1, 4, 3, True)
    assert job.overrides == ("train.lr=1", "run.resume=auto", 'run.id="x"')
    assert parse_job([*ARGUMENTS, "run.resume=false"]).overrides == ("run.resume=false", 'run.id="x"')
    fixed = parse_job([ARGUMENTS[0], "2", *ARGUMENTS[2:]])
    assert not fixed.is_elastic and fixed.overrides == ('run.id="x"',)


@pytest.mark.parametrize(
    ("position", "value", "line"),
    [
        (1, "3:2", "NNODES: 3 is not allowed; give a whole number from 1 to 2"),
        (1, "0:2", "NNODES: 0 is not allowed; give a whole number from 1 to 2"),
        (1, "1:x", "NNODES: x is not allowed; give a whole number of at least 1"),
        (7, "--max-restarts=-1", "--max-restarts: -1 is not allowed; give a whole number of at least 0"),
    ],
)
def test_mistakes_about_them_are_one_line(position: int, value: str, line: str) -> None:
    arguments = [*ARGUMENTS, "--max-restarts=1"]
    arguments[position] = value
    with pytest.raises(UserError) as caught:
        parse_job(arguments)
    assert str(caught.value) == line
