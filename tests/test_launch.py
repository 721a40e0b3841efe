"""A job starts from one command line and ends whole: every rank, in seconds, with the first cause as the last line."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from pipetransformer.adapter import is_peer_failure
from pipetransformer.adapter import launch as launch_adapter
from pipetransformer.launch import entry as cli
from pipetransformer.launch import node as launch
from pipetransformer.process.failure import Failure, RankEnd, cause_line, first_cause, write_report
from pipetransformer.process.shutdown import installed

ROOT = Path(__file__).resolve().parent.parent
DIGITS = str(ROOT / "config" / "train_config_digits_no_freeze.yaml")
GOOD = ("2", "1", "0", "127.0.0.1", "29511", DIGITS, "1000")
NAMES = ("NPROC", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "CONFIG", "RUN_ID")
LAUNCH = """
import sys
from pathlib import Path
from pipetransformer.launch.node import NodeJob, launch
folder, how, port = sys.argv[1:]
job = NodeJob(
    num_ranks=2, num_nodes=1, node_rank=0, address="127.0.0.1", port=int(port), config=folder, overrides=(how,)
)
sys.exit(launch(job, entry=Path("tests/crashing_entry.py")))
"""


def start(folder: Path, how: str) -> subprocess.Popen[str]:
    """Launch two ranks of ``crashing_entry`` that end as its function ``how`` does."""
    temporary = folder / "tmp"
    temporary.mkdir()
    return subprocess.Popen(
        [sys.executable, "-c", LAUNCH, str(folder), how, str(launch.free_port())],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(folder: Path, how: str) -> tuple[int, str, list[str]]:
    """Exit code, stdout, and the lines on stderr."""
    with start(folder, how) as process:
        out, err = process.communicate(timeout=60)
    assert left_behind(folder) == []
    return process.returncode, out, err.splitlines()


def left_behind(folder: Path) -> list[Path]:
    return [path for path in (folder / "tmp").iterdir() if not path.name.startswith("torchinductor")]


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("NPROC", "0", "NPROC: 0 is not allowed; give a whole number of at least 1"),
        ("NPROC", "two", "NPROC: two is not allowed; give a whole number of at least 1"),
        ("NNODES", "-1", "NNODES: -1 is not allowed; give a whole number of at least 1"),
        ("NODE_RANK", "1", "NODE_RANK: 1 is not allowed; give a whole number from 0 to 0"),
        ("MASTER_ADDR", "no.such.host.invalid", "MASTER_ADDR: no.such.host.invalid is not a known host; "),
        ("MASTER_PORT", "65536", "MASTER_PORT: 65536 is not allowed; give a whole number from 1 to 65535"),
        ("CONFIG", "nowhere.yaml", "nowhere.yaml"),
        ("RUN_ID", "", "RUN_ID: it is empty; give the job a name"),
    ],
)
def test_a_bad_argument_gets_one_line(name: str, value: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main([value if name == known else good for known, good in zip(NAMES, GOOD)]) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith("error: ")
    assert line in told


def test_too_few_arguments_get_the_usage_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(GOOD[:6]) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert told == f"error: 6 of 7 arguments; give {launch.USAGE}"


def test_a_port_in_use_is_told_before_any_rank_starts(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert launch.main([*GOOD[:4], str(port), *GOOD[5:]]) == 2
    assert capsys.readouterr().err == f"error: MASTER_PORT: {port} is in use; give another\n"


def test_the_last_argument_names_the_run_even_if_it_looks_like_a_number() -> None:
    assert launch.parse_job(GOOD).overrides == ('run.id="1000"',)


def test_the_run_has_one_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main([*GOOD, "run.id=other"]) == 2
    assert capsys.readouterr().err == "error: run.id: RUN_ID names the run; leave run.id out\n"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "the following arguments are required: CONFIG"),
        (["nowhere.yaml"], "nowhere.yaml"),
        ([DIGITS], "task: image_classification is not for main_tc.py; use main_cv.py"),
    ],
)
def test_an_entry_tells_a_mistake_in_one_line(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main("text_classification", arguments) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith("error: ")
    assert line in told


def test_ranks_get_the_configuration_and_the_overrides(tmp_path: Path) -> None:
    code, out, _ = run(tmp_path, "succeed")
    assert code == 0
    assert sorted(out.splitlines()) == [
        f"rank {rank} of 2 has arguments {[str(tmp_path), 'succeed']}" for rank in (0, 1)
    ]


def test_a_mistake_that_every_rank_finds_is_told_once(tmp_path: Path) -> None:
    code, _, lines = run(tmp_path, "every_rank_finds_the_mistake")
    assert code == 1
    assert len(lines) == 1
    assert lines[0].endswith(": data.path: there is no folder nowhere")


@pytest.mark.parametrize(
    ("how", "line"),
    [
        pytest.param("one_raises", "rank 1: ValueError: the cause", marks=pytest.mark.full),
        ("one_is_killed", "rank 1: ended by SIGKILL (out of memory?)"),
        pytest.param("one_will_not_listen", "rank 1: ValueError: the cause", marks=pytest.mark.full),
    ],
)
def test_a_failed_rank_ends_the_job_with_its_cause_as_the_last_line(tmp_path: Path, how: str, line: str) -> None:
    code, _, lines = run(tmp_path, how)
    assert time.monotonic() - float((tmp_path / "failed_at").read_text()) < 10
    assert code == 1
    assert lines[-1] == line
    assert sum("Traceback" in told for told in lines) == (0 if how == "one_is_killed" else 1)


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.full), signal.SIGTERM])
def test_a_signal_ends_ranks_that_wait_in_a_collective(tmp_path: Path, number: signal.Signals) -> None:
    with start(tmp_path, "all_wait_for_each_other") as process:
        pids = [_await_pid(tmp_path / f"ready_{rank}") for rank in (0, 1)]
        begin = time.monotonic()
        process.send_signal(number)
        time.sleep(0.5)
        process.send_signal(number)  # an impatient user
        _, err = process.communicate(timeout=30)
    assert time.monotonic() - begin < 10
    assert process.returncode == 128 + number
    assert err == f"interrupted by {number.name}\n"
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert list(tmp_path.glob("half_written_*")) == []
    assert left_behind(tmp_path) == []


def test_a_job_of_one_node_listens_to_no_other_machine(tmp_path: Path) -> None:
    """torchrun's store and every socket of gloo."""
    with start(tmp_path, "all_wait_for_each_other") as process:
        ranks = [psutil.Process(_await_pid(tmp_path / f"ready_{rank}")) for rank in (0, 1)]
        listening = [
            connection.laddr.ip
            for each in (psutil.Process(process.pid), *ranks)
            for connection in each.net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        ]
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
    assert len(listening) >= 3 and set(listening) <= {"127.0.0.1", "::1"}


def test_no_rank_outlives_its_launcher(tmp_path: Path) -> None:
    with start(tmp_path, "all_wait_for_each_other") as process:
        ranks = [psutil.Process(_await_pid(tmp_path / f"ready_{rank}")) for rank in (0, 1)]
        process.kill()
        _, alive = psutil.wait_procs(ranks, timeout=10)
    assert alive == []


def _await_pid(path: Path) -> int:
    deadline = time.monotonic() + 60
    while not path.exists() or not path.read_text():
        assert time.monotonic() < deadline, f"{path.name} did not come"
        time.sleep(0.05)
    return int(path.read_text())


def test_a_second_signal_does_not_break_what_the_first_one_set_going() -> None:
    program = """
import signal
from pipetransformer.process.shutdown import installed
with installed():
    try:
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.raise_signal(signal.SIGINT)
        print("unwound")
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout, done.stderr) == (143, "unwound\n", "")


def test_a_process_that_does_not_unwind_is_ended() -> None:
    program = """
import signal, time
from pipetransformer.process.shutdown import cleaned_up, installed
with cleaned_up(lambda: print("once", flush=True)):
    pass
with cleaned_up(lambda: print("cleaned", flush=True)), installed(grace_seconds=0.2):
    try:
        signal.raise_signal(signal.SIGTERM)
    finally:
        time.sleep(60)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout, done.stderr) == (143, "once\ncleaned\n", "")


def test_handlers_come_back_and_a_forked_child_has_none() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with installed():
        pid = os.fork()
        if pid == 0:
            os._exit(signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL)
        _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert signal.getsignal(signal.SIGTERM) is before


def _report(line: str, *, time: float, followed: bool = False) -> Failure:
    return Failure(line=line, details="", followed=followed, time=time)


@pytest.mark.parametrize(
    ("ends", "line"),
    [
        ({0: RankEnd(1, 9.0, _report("b", time=9.5)), 1: RankEnd(1, 9.0, _report("a", time=9.1))}, "a"),
        (
            {0: RankEnd(1, 5.0, _report("lost 1", time=5.0, followed=True)), 1: RankEnd(-9, 6.0, None)},
            "rank 1: ended by",
        ),
        ({0: RankEnd(143, 5.0, None), 1: RankEnd(1, 6.0, _report("lost 2", time=6.0, followed=True))}, "lost 2"),
        ({0: RankEnd(-9, 20.0, None), 1: RankEnd(1, 6.0, _report("a", time=6.0))}, "a"),
        ({0: RankEnd(7, 1.0, None)}, "rank 0: ended with exit code 7"),
        (
            {
                0: RankEnd(1, 5.0, _report("RuntimeError: Timed out waiting 20000ms", time=5.0, followed=True)),
                1: RankEnd(-9, 12.0, None),
            },
            "rank 1: it did not answer within run.timeout",
        ),
    ],
)
def test_the_first_cause_is_no_consequence(ends: dict[int, RankEnd], line: str) -> None:
    assert first_cause(ends).line.startswith(line)


def _interrupted(line: str, *, time: float, by: int, place: str = "", waits: bool = False) -> Failure:
    return Failure(line, "", False, time, by, place, waits)


@pytest.mark.parametrize(
    ("ends", "line"),
    [
        (  # SIGTERM came to rank 1 alone: the others lost it
            {
                0: RankEnd(1, 6.0, _report("rank 0: lost 1", time=5.1, followed=True)),
                1: RankEnd(143, 5.0, _interrupted("rank 1: ended by SIGTERM", time=5.0, by=15)),
            },
            "rank 1: ended by SIGTERM",
        ),
        (  # rank 2 hung in a loop of its own, rank 1 still waited for it
            {
                0: RankEnd(1, 9.0, _report("rank 0: Timed out waiting", time=7.0, followed=True)),
                1: RankEnd(131, 9.5, _interrupted("rank 1", time=9.2, by=3, place="reducer.py:9", waits=True)),
                2: RankEnd(131, 9.1, _interrupted("rank 2", time=9.1, by=3, place="step 4, forward, stage.py:7")),
            },
            "rank 2: no answer within run.timeout; it was at step 4, forward, stage.py:7",
        ),
        (  # the launcher ended rank 0, which is no cause
            {
                0: RankEnd(131, 5.0, _interrupted("rank 0", time=5.0, by=3, place="reducer.py:9")),
                1: RankEnd(1, 6.0, _report("rank 1: lost 2", time=6.0, followed=True)),
            },
            "rank 1: lost 2",
        ),
        (
            {
                0: RankEnd(1, 9.0, _report("rank 0: the cause", time=7.0)),
                1: RankEnd(131, 9.5, _interrupted("rank 1", time=9.2, by=3, place="reducer.py:9")),
            },
            "rank 0: the cause",
        ),
    ],
)
def test_who_was_silent_is_told_from_who_waited(ends: dict[int, RankEnd], line: str) -> None:
    assert first_cause(ends).line == line


def test_a_timeout_is_a_peers_doing() -> None:
    assert is_peer_failure(RuntimeError("[unbound_buffer.cc:78] Timed out waiting 20000ms for recv operation"))
    assert not is_peer_failure(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


def test_a_report_that_cannot_be_written_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_report(tmp_path / "nowhere" / "error.json", rank=1, report=_report("no space left", time=1.0))
    assert capfd.readouterr().err == "rank 1: no space left\n"


def test_folders_of_launchers_that_are_gone_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    names = ["pipetransformer_killed", "pipetransformer_live", "pipetransformer_older", "other"]
    for name in names:
        (tmp_path / name).mkdir()
    (tmp_path / "pipetransformer_killed" / ".lock").touch()
    with launch_adapter._locked(tmp_path / "pipetransformer_live"):
        launch_adapter._sweep()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names[1:])


def test_a_cause_is_the_error_at_the_bottom() -> None:
    try:
        try:
            raise ValueError("at the bottom\nmore")
        except ValueError as error:
            raise RuntimeError("stage 0 failed") from error
    except RuntimeError as error:
        assert cause_line(error) == "ValueError: at the bottom"
