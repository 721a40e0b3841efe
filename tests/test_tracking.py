"""What a run tells and leaves: events survive a killed writer, the summary is a contract, wandb costs no job."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from rich.console import Console

from pipetransformer.config import Config
from pipetransformer.errors import UserError
from pipetransformer.plan import ParallelPlan
from pipetransformer.run.step_figures import StepFigures
from pipetransformer.run.time_left import Left
from pipetransformer.run.tracking import (
    CacheBytes,
    CacheUse,
    EventLog,
    Progress,
    Summary,
    Tracker,
    Transition,
    WandbRun,
    evaluation_metrics,
    read_events,
    render,
    to_plain,
)
from pipetransformer.run.tracking.summary import write_json

PLAN = ParallelPlan(
    frozen=4, pp=2, dp=1, boundaries=(7,), num_microbatches=4, schedule="1f1b", cached=None, num_blocks=12
)
TRANSITION = Transition(
    step=412, epoch=1, frozen=4, pp=1, dp=2, microbatches=1, boundaries=(), seconds=0.09, bytes_moved=14_200_000,
    reason="froze [bold]4[/bold] blocks",
)  # fmt: skip
CONFIG = Config.model_validate(
    {
        "task": "image_classification",
        "model": {"name": "m"},
        "data": {"name": "digits"},
        "train": {"epochs": 1, "batch_size": 1, "lr": 0.1},
    }
)
SUMMARY = Summary(
    run_id="1000", task="text_classification", model="a[/b]", dataset="SST-2", world_size=2, epochs=3, steps=1234,
    global_batch_size=64, seed=0, metrics={"accuracy": 0.91}, best_metrics={"accuracy": 0.912}, wall_s=130.0,
    train_s=100.0, eval_s=20.0, transition_s=1.0, cache_advance_s=8.0, setup_s=5.0, save_s=2.0,
    samples_per_s=(812.0, 1203.0),
    peak_memory_bytes=(512_000_000, 498_000_000), transitions=(TRANSITION,),
    cache=CacheUse(hits=90, misses=10, bytes=CacheBytes(host=180_000_000)), compute_floor_s=88.0, static_step_s=0.1,
    t0_start_s=(0.2, 0.25, 0.3), t0_end_s=(0.21,), resumed_from=None,
)  # fmt: skip


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


# Plain values


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (np.float32(0.5), 0.5),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (np.arange(3), [0, 1, 2]),
        (float("nan"), "NaN"),
        (np.float64("-inf"), "-Infinity"),
        (Path("a/b"), "a/b"),
        ({4: (1, None, {"x"})}, {"4": [1, None, ["x"]]}),
        (PLAN, PLAN.as_dict()),
    ],
)
def test_reported_values_become_plain_json(value: object, plain: object) -> None:
    assert to_plain(value) == plain
    json.dumps(to_plain(value), allow_nan=False)


def test_torch_scalars_become_numbers() -> None:
    torch = pytest.importorskip("torch")
    assert to_plain({"loss": torch.tensor(0.5, dtype=torch.bfloat16, requires_grad=True)}) == {"loss": 0.5}


def test_a_value_without_a_plain_form_is_refused() -> None:
    with pytest.raises(TypeError, match="object has no plain form"):
        to_plain(object())


# Events


def test_events_come_back_in_order_also_over_a_resume(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    for step in (1, 2):
        log = EventLog(path)
        log.write("transition", step=step, plan=PLAN)
        log.close()
    events = read_events(path)
    assert [(event["event"], event["step"]) for event in events] == [("transition", 1), ("transition", 2)]
    assert ParallelPlan.from_dict(events[0]["plan"]) == PLAN
    assert abs(events[0]["time"] - time.time()) < 60


def test_an_event_is_readable_while_the_log_is_open(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.write("step", step=1)
    assert len(read_events(tmp_path / "events.jsonl")) == 1
    log.close()


WHOLE = b'{"event": "a"}\n{"event": "b"}\n'


@pytest.mark.parametrize("length", range(len(WHOLE) + 1))
def test_a_torn_last_line_is_ignored_and_does_not_spoil_the_next(tmp_path: Path, length: int) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(WHOLE[:length])
    before = read_events(path)
    assert [event["event"] for event in before] == ["a", "b"][: (length + 1) // 15]
    log = EventLog(path)
    log.write("c")
    log.close()
    assert [event["event"] for event in read_events(path)] == [*(event["event"] for event in before), "c"]


@pytest.mark.parametrize("line", ["{", "[1]", "", '{"step": 1}', "\x00\x00"])
def test_a_broken_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(f'{{"event": "a"}}\n{line}\n{{"event": "b"}}\n')
    with pytest.raises(UserError, match=re.escape(f"{path}:2: not an event")):
        read_events(path)


def test_missing_events_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        read_events(tmp_path / "none.jsonl")


# Progress


def _step(progress: Progress, step: int, *, total_steps: int = 1000) -> None:
    progress.update(
        step, total_steps=total_steps, epoch=2, num_epochs=3, loss=0.5, samples_per_second=1203.0, frozen=4, pp=1,
        dp=2, cache_hit_rate=0.98,
    )  # fmt: skip


@pytest.mark.parametrize("columns", ["80", "140"])
def test_the_bar_shows_every_figure_at_any_width(monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    progress = Progress(out=out, err=io.StringIO())
    _step(progress, 1000)
    progress.close()
    for shown in ("1000/1000", "epoch 2/3", "0.500", "1,203", "4 frozen", "pp 1 x dp 2", "cache 98 %"):
        assert shown in out.getvalue()


@pytest.mark.parametrize("columns", ["80", "140"])
def test_blocks_are_a_bar_and_words(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    progress = Progress(out=out, err=io.StringIO())
    progress.update(9, total_steps=9, frozen=2, num_blocks=6)
    progress.close()
    assert "▓▓░░░░ 2 of 6 frozen" in out.getvalue()


def test_what_matters_least_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two lines on a narrow terminal: the bar with the clock, and whole figures as far as there is room."""
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("TERM", "xterm")
    out, left = Terminal(), Left(elapsed=75.0, least=30.0, most=3700.0)
    progress = Progress(out=out, err=io.StringIO())
    progress.update(
        *(40,), total_steps=100, epoch=1, num_epochs=2, loss=0.25, metric=("macro_f1", 0.5), frozen=2, num_blocks=6,
        samples_per_second=80.0, pp=2, dp=1, microbatches=4, lr=1e-4, cache_hit_rate=1.0, time_left=lambda step: left,
    )  # fmt: skip
    progress.close()
    shown = out.getvalue()
    assert "step 40/100" in shown and "1:15 gone, 0:30 to 1:01:40 left" in shown
    assert "epoch 1/2  loss 0.250  macro_f1 0.500" in shown and "lr" not in shown and "cache" not in shown


@pytest.mark.parametrize("terminal", ["stdout", "stderr"])
def test_facts_go_to_standard_output_wherever_the_bar_is(terminal: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    out, err = (Terminal(), io.StringIO()) if terminal == "stdout" else (io.StringIO(), Terminal())
    progress = Progress(out=out, err=err)
    _step(progress, 1)
    fact = "step 412: froze [red]blocks[/red] 0-3 " + "long " * 40
    progress.line(fact)
    progress.close()
    assert fact in out.getvalue()
    assert "epoch 2/3" in (out if terminal == "stdout" else err).getvalue()


def test_without_a_terminal_lines_are_plain_and_few() -> None:
    out = io.StringIO()
    progress = Progress(out=out, err=io.StringIO())
    for step in range(1, 1001):
        _step(progress, step)
    progress.close()
    assert out.getvalue() == (
        "step 1000/1000: epoch 2/3, loss 0.500, 1,203 samples/s, 4 frozen, pp 1 x dp 2, cache 98 %\n"
    )


def test_a_step_costs_microseconds_and_reads_the_loss_only_to_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    reads = 0

    class Loss:
        def __float__(self) -> float:
            nonlocal reads
            reads += 1
            return 0.5

    progress = Progress(out=Terminal(), err=io.StringIO())
    start = time.perf_counter()
    for step in range(5000):
        progress.update(step, total_steps=10_000, loss=Loss())
    seconds = time.perf_counter() - start
    progress.close()
    assert seconds / 5000 < 50e-6
    assert reads <= 2 + seconds / 0.1


# Summary


SUMMARY_KEYS = [
    "run_id", "task", "model", "dataset", "world_size", "epochs", "steps", "global_batch_size", "seed", "metrics",
    "best_metrics", "wall_s", "train_s", "eval_s", "transition_s", "cache_advance_s", "setup_s", "save_s",
    "samples_per_s",
    "peak_memory_bytes", "transitions", "cache", "compute_floor_s", "static_step_s", "t0_start_s", "t0_end_s",
    "resumed_from",
]  # fmt: skip
TRANSITION_KEYS = [
    "step", "epoch", "frozen", "pp", "dp", "microbatches", "boundaries", "seconds", "bytes_moved", "reason",
]  # fmt: skip


def test_the_summary_is_the_contract_to_the_letter(tmp_path: Path) -> None:
    write_json(tmp_path / "summary.json", SUMMARY)
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]
    written = json.loads((tmp_path / "summary.json").read_text())
    assert list(written) == SUMMARY_KEYS
    assert list(written["transitions"][0]) == TRANSITION_KEYS
    assert list(written["cache"]) == ["hits", "misses", "bytes"]
    assert list(written["cache"]["bytes"]) == ["device", "host", "disk"]
    assert written["metrics"] == {"accuracy": 0.91}
    assert written["resumed_from"] is None


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENAMETOOLONG])
def test_a_place_that_cannot_be_written_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(path: Path, *arguments: object, **settings: object) -> None:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(Path, "open", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(UserError, match=rf"\Arun.dir: .*summary.json cannot be written \({os.strerror(number)}\)\Z"):
        write_json(tmp_path / "summary.json", SUMMARY)


def _rendered(summary: Summary, *, width: int) -> str:
    console = Console(width=width, file=io.StringIO())
    console.print(render(summary))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [80, 120])
def test_the_readable_summary_has_the_figures_and_fits(width: int) -> None:
    shown = _rendered(SUMMARY, width=width)
    assert max(map(len, shown.splitlines())) <= width
    assert "…" not in shown
    facts = (
        "0.9100 final, 0.9120 best",
        "812, 1,203",
        "90.0 % hit",
        "180.0 MB on host",
        "= 0.88",
        "412",
        "14.2",
        "a[/b]",
    )
    for fact in (*facts, "[bold]4[/bold]"):
        assert fact in shown


def test_a_run_that_did_nothing_has_a_readable_summary_too() -> None:
    empty = replace(SUMMARY, wall_s=0.0, train_s=0.0, transitions=(), cache=CacheUse(), samples_per_s=(), metrics={})
    assert "not used" in _rendered(empty, width=80)


# Names


def test_metric_names_are_the_original_s() -> None:
    phases = {"data": [0.5, 1.0], "forward": [1.0, 4.0], "prefix": [0.0, 2.0], "backward": [3.0, 4.0]}
    phases["reduction"] = [8.0, 1.0]
    figures = StepFigures(
        num_steps=2, seconds=8.0, loss=0.5, accuracy=0.9, samples_per_s=12.0, hits=0, misses=0,
        sent_bytes_by_rank=[480, 160], phase_seconds_by_rank=phases, gradient_norms=None,
    )  # fmt: skip
    assert figures.metrics(replace(PLAN, pp=1, dp=2, boundaries=()), transition_seconds=7.0) == {
        "Train/Loss": 0.5, "Train/Acc": 0.9, "sample_throughput": 12.0, "comm_frequency": 0.25,
        "size_params_ddp_sum": 160.0, "bandwidth": 40.0, "data_time_per_batch": 0.5, "forward_time_per_batch": 3.0,
        "backwards_time_per_batch": 2.0, "reduction_time_per_batch": 4.0,
        "frozen_blocks": PLAN.frozen, "pp": 1, "dp": 2, "microbatches": 4, "transition_seconds": 7.0,
    }  # fmt: skip
    metrics, best = {"loss": 0.5, "accuracy": 0.9}, {"loss": 0.4, "accuracy": 0.95}
    assert evaluation_metrics("image_classification", metrics, best=best) == {
        "Test/Loss": 0.5,
        "Test/Acc": 0.9,
    }
    assert evaluation_metrics("text_classification", metrics, best=best) == {
        "Evaluation Loss": 0.5,
        "Evaluation Accuracy": 0.9,
        "Evaluation Accuracy (best)": 0.95,
    }
    answers = {"exact_match": 70.0, "f1": 80.0}
    assert evaluation_metrics("question_answering", answers, best=answers) == {
        "Evaluation EM": 70.0,
        "Evaluation EM (best)": 70.0,
        "Evaluation F1": 80.0,
        "Evaluation F1 (best)": 80.0,
    }


# wandb and the tracker, each in a process of its own, as in a job


def _python(code: str, *, cwd: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=cwd, text=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


TRACKED = """
    import sys
    from pathlib import Path
    import psutil
    from pipetransformer.config import Config
    from pipetransformer.run.tracking import Tracker
    config = Config.model_validate({
        "task": "image_classification", "model": {"name": "m"}, "data": {"name": "digits"},
        "train": {"epochs": 1, "batch_size": 1, "lr": 0.1}, "log": {"wandb": "offline"},
    })
    tracker = Tracker(config, rank=0, run_dir=Path("."), run_id="10/00")
    tracker.event("start", step=0)
    tracker.metrics({"Train/Loss": 0.5}, step=1)
    tracker.step(1, total_steps=2)
    """


def test_offline_wandb_is_quiet_stays_in_the_run_directory_and_ends_with_it(tmp_path: Path) -> None:
    code = TRACKED + 'tracker.close(exit_code=1); tracker.close(); print("left", psutil.Process().children())'
    process = _python(code, cwd=tmp_path)
    output, _ = process.communicate(timeout=60)
    assert output == "left []\n"
    assert len(list((tmp_path / "wandb").glob("offline-run-*-10-00-*/run-10-00-*.wandb"))) == 1
    assert len(read_events(tmp_path / "events.jsonl")) == 1


def test_no_wandb_process_outlives_a_killed_job(tmp_path: Path) -> None:
    process = _python(TRACKED + 'print("ready", flush=True); import time; time.sleep(60)', cwd=tmp_path)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    children = psutil.Process(process.pid).children(recursive=True)
    assert children
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=10)
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive


def test_a_wandb_that_cannot_start_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    lines: list[str] = []
    run = WandbRun(CONFIG, run_dir=tmp_path, run_id="1", mode="offline", report=lines.append)
    run.log({"pp": 1}, step=1)
    run.finish()
    assert len(lines) == 1
    assert lines[0].startswith("wandb could not start: ")
    assert lines[0].endswith("; the run goes on without it")


class Board:
    """In the place of wandb's run."""

    def __init__(self) -> None:
        self.logged = list[tuple[dict[str, Any], int | None]]()
        self.defined = dict[str, dict[str, Any]]()

    def log(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self.logged.append((metrics, step))

    def define_metric(self, name: str, **options: Any) -> None:
        self.defined[name] = options


def test_the_dashboard_keeps_the_best_over_seconds_of_training_and_tables(tmp_path: Path) -> None:
    lines: list[str] = []
    run = WandbRun(CONFIG, run_dir=tmp_path, run_id="1", mode="disabled", report=lines.append)
    run._run = board = Board()
    for _ in range(2):
        run.keep_best({"Test/Acc": 0.5, "Test/Loss": 1.0, "lr": 0.1})
    assert board.defined == {
        "Test/Acc": {"step_metric": "train_seconds", "summary": "max"},
        "Test/Loss": {"step_metric": "train_seconds", "summary": "min"},
    }
    run.table("decisions", ("step", "why"), [(3, "it is so"), (4, (1, 2))])
    ((logged, _),) = board.logged
    assert logged["decisions"].data == [[3, "it is so"], [4, "(1, 2)"]] and not lines


def test_disabled_wandb_and_torch_are_never_imported(tmp_path: Path) -> None:
    code = TRACKED.replace("offline", "disabled") + 'print({"wandb", "torch"} & set(sys.modules))'
    output, _ = _python(code, cwd=tmp_path).communicate(timeout=60)
    assert output == "set()\n"


def test_other_ranks_leave_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tracker = Tracker(CONFIG, rank=1, run_dir=tmp_path, run_id="1")
    tracker.event("start")
    tracker.line("a fact")
    tracker.step(1, total_steps=1)
    tracker.metrics({"pp": 1}, step=1)
    tracker.summarise(SUMMARY)
    tracker.close()
    assert not list(tmp_path.iterdir())
    assert capfd.readouterr() == ("", "")


def test_the_first_rank_s_summary_is_written_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tracker = Tracker(CONFIG.with_overrides({"log.wandb": "disabled"}), rank=0, run_dir=tmp_path, run_id="1")
    tracker.summarise(SUMMARY)
    tracker.close()
    assert (tmp_path / "summary.json").exists()
    assert "compute floor" in capsys.readouterr().out


def test_text_that_is_no_utf_8_reaches_the_log(tmp_path: Path) -> None:
    """Such a folder's name comes from the system with surrogates in it."""
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    log.write("checkpoint", path="caf\udce9/runs", loss=float("nan"), steps=range(2))
    log.close()
    (event,) = read_events(path)
    assert (event["path"], event["loss"], event["steps"]) == ("caf\udce9/runs", "NaN", [0, 1])


def test_a_closed_standard_output_ends_no_job(tmp_path: Path) -> None:
    code = """
        import os, sys
        from pipetransformer.run.tracking import Progress, say
        reader, writer = os.pipe()
        os.dup2(writer, 1)
        os.close(writer)
        os.close(reader)
        say("no one reads this")
        progress = Progress()
        for step in range(1, 4):
            progress.update(step, total_steps=3)
            progress.line("nor this")
        progress.close()
        print("still here", file=sys.stderr)
        """
    process = _python(code, cwd=tmp_path)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and "still here" in output
