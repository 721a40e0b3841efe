"""What the benchmarks of whole runs keep, and what ``bench --stale`` finds."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from laws import REPOSITORY
from rich.console import Console

sys.path.insert(0, str(REPOSITORY))

import benchmarks.runs.__main__ as runs
from benchmarks.support import measure, stale
from pipetransformer.commands import bench, main
from pipetransformer.errors import UserError
from pipetransformer.run.tracking import Transition
from pipetransformer.run.tracking.render import render
from pipetransformer.run.tracking.summary import CacheUse, Summary

SUMMARY = {
    "metrics": {"accuracy": 0.9},
    "train_s": 100.0,
    "compute_floor_s": 83.0,
    "peak_memory_bytes": [1_385_400_000, 1_253_000_000],
    "transitions": [{"step": 500, "frozen": 3}, {"step": 1000, "frozen": 5}],
}


# ---- where a result comes from ---------------------------------------------------------------------------------------


def test_a_result_tells_command_day_machine_and_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = REPOSITORY / "benchmarks" / "ddp_vs_pipe" / "__main__.py"
    monkeypatch.setattr(sys, "argv", [str(script), "--method", "a b"])
    told = json.loads(measure.save("name", [{"a": 1}], folder=tmp_path).read_text())["environment"]
    assert told["command"] == "pipetransformer bench ddp-vs-pipe --method 'a b'"
    assert told["commit"] == measure.measured_commit() and len(told["date"]) == len("2026-11-22")
    assert told["memory GiB"] > 0.1 and told["cores"] > 0 and told["cpu"]


def test_the_commit_is_that_of_the_start_and_says_whether_it_stayed(monkeypatch: pytest.MonkeyPatch) -> None:
    measure.started_at.cache_clear()
    told = iter(["abc", "abc", "def", "abc-dirty"])
    monkeypatch.setattr(measure, "_commit", lambda: next(told))
    assert [measure.measured_commit() for _ in range(3)] == ["abc", "abc-dirty", "abc-dirty"]
    measure.started_at.cache_clear()


def test_pages_and_results_are_no_code(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "git", partial(measure.git, folder=clone))
    monkeypatch.setattr(measure, "started_at", measure._commit)
    first = measure.measured_commit()
    for name in ("docs/results.md", "benchmarks/results/new.json"):
        (clone / name).parent.mkdir(exist_ok=True, parents=True)
        (clone / name).write_text("1")
    assert measure.measured_commit() == first
    (clone / "benchmarks" / "new.py").write_text("")
    assert measure.measured_commit() == f"{first}-dirty"


# ---- whole runs ------------------------------------------------------------------------------------------------------


class Trained:
    """In place of training: what was run, and a summary for each."""

    def __init__(self, *, fails: str = "") -> None:
        self.runs: list[str] = []
        self.fails = fails

    def __call__(self, job: runs.Job) -> dict[str, Any]:
        if job.run == self.fails:
            raise UserError(f"{job.run}: the run failed")
        self.runs.append(job.run)
        train_s, wall_s = (100.0, 120.0) if job.run.endswith("no_freeze") else (50.0, 90.0)
        return {**SUMMARY, "train_s": train_s, "wall_s": wall_s, "compute_floor_s": 40.0}


def run_pair(monkeypatch: pytest.MonkeyPatch, trained: Trained, *arguments: str, commit: str = "abc1234") -> None:
    monkeypatch.setattr(sys, "argv", ["__main__.py", "sst2", "data.path=SST-2", *arguments])
    monkeypatch.setattr(runs, "train", trained)
    monkeypatch.setattr(runs, "measured_commit", lambda: commit)
    monkeypatch.setattr(measure, "measured_commit", lambda: commit)
    runs.main()


def test_a_pair_is_kept_with_lines_summaries_and_the_twin_beside_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_pair(monkeypatch, Trained(), "--output", str(tmp_path))
    first, second = json.loads((tmp_path / "runs-sst2.json").read_text())["rows"]
    assert first["command"].startswith(
        "sh run_pipetransformer.sh 2 1 0 127.0.0.1 29500 config/train_config_sst2_no_freeze.yaml bench-sst2-no_freeze "
    )
    assert first["command"].endswith("train.epochs=1 data.path=SST-2 run.overwrite=true")
    assert (first["floor over train"], second["floor over train"]) == (0.4, 0.8)
    assert (second["floor over train of the twin"], second["train s over the twin's"]) == (0.4, 0.5)
    assert (second["wall s"], second["wall s over the twin's"]) == (90.0, 0.75)
    assert (second["slower than the twin"], second["floor over train, over the twin's"]) == ("no", 2.0)
    assert (second["frozen at step"], second["MB by rank"]) == ("3 at 500, 5 at 1000", "1385 1253")
    assert second["summary"] == {**SUMMARY, "train_s": 50.0, "wall_s": 90.0, "compute_floor_s": 40.0}
    told = capsys.readouterr().out
    assert [line.split() for line in told.splitlines() if line.startswith("floor over train ")][0][-2:] == [
        "0.4",
        "0.8",
    ]


@pytest.mark.parametrize(("train_s", "wall_s", "slower"), [(5.0, 9.0, "no"), (11.0, 9.0, "yes"), (5.0, 12.0, "yes")])
def test_a_run_is_slower_by_its_training_or_by_its_whole_time(train_s: float, wall_s: float, slower: str) -> None:
    first, second = (
        {"train s": train, "wall s": wall, "floor over train": 0.9} for train, wall in ((10.0, 10.0), (train_s, wall_s))
    )
    assert runs.beside_the_twin(first, second)["slower than the twin"] == slower


def test_runs_that_ended_are_kept_and_others_trained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    output = ("--output", str(tmp_path))
    with pytest.raises(UserError, match="sst2 all_in_one: the run failed"):
        run_pair(monkeypatch, Trained(fails="sst2 all_in_one"), *output)
    for commit, overrides, trained_then in (
        ("abc1234", (), ["sst2 all_in_one"]),
        ("abc1234", (), []),
        ("abc1234", ("train.lr=1e-4",), ["sst2 no_freeze", "sst2 all_in_one"]),
        ("def5678", ("train.lr=1e-4",), ["sst2 no_freeze", "sst2 all_in_one"]),
        ("def5678-dirty", ("train.lr=1e-4",), ["sst2 no_freeze", "sst2 all_in_one"]),
        ("def5678-dirty", ("train.lr=1e-4",), ["sst2 no_freeze", "sst2 all_in_one"]),
    ):
        trained = Trained()
        run_pair(monkeypatch, trained, *output, *overrides, commit=commit)
        assert trained.runs == trained_then, (commit, overrides)


@pytest.mark.parametrize("name", runs.SMALL)
def test_configurations_of_pairs_are_there(name: str) -> None:
    for job in runs.jobs(name, num_ranks=2, overrides=[]):
        assert (REPOSITORY / job.arguments[5]).is_file()


@pytest.mark.full
def test_a_pair_is_trained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    small = ["train.epochs=3", "data.max_train_samples=256", "checkpoint.every=null", "log.wandb=disabled"]
    small += ["freeze.every=1 epoch", "freeze.warmup=1 epoch"]
    monkeypatch.setattr(sys, "argv", ["__main__.py", "digits", "--output", str(tmp_path), *small])
    monkeypatch.chdir(tmp_path)
    runs.main()
    rows = json.loads((tmp_path / "runs-digits.json").read_text())["rows"]
    assert [row["summary"]["run_id"] for row in rows] == ["bench-digits-no_freeze", "bench-digits-all_in_one"]
    assert rows[0]["frozen at step"] is None
    has_frozen = any(move["frozen"] for move in rows[1]["summary"]["transitions"])  # where it pays, by measured times
    assert (rows[1]["frozen at step"] is not None) == has_frozen


@pytest.mark.parametrize("moved", [True, False])
def test_a_share_of_the_floor_is_called_what_it_is(moved: bool) -> None:
    """A run that is elastic in nothing has one too."""
    move = Transition(500, 0, 3, 1, 2, 1, (), 0.1, 10, "schedule")
    fields: dict[str, Any] = {field.name: None for field in dataclasses.fields(Summary)}
    fields |= {**SUMMARY, "best_metrics": {}, "transitions": [move] * moved, "cache": CacheUse(), "samples_per_s": []}
    fields |= dict.fromkeys([name for name in fields if name.endswith("_s") and fields[name] is None], 1.0)
    fields |= {"t0_start_s": [0.2, 0.25, 0.3], "t0_end_s": [0.5]}
    fields |= {"static_step_s": 2.0}
    fields |= dict.fromkeys(["epochs", "steps", "global_batch_size", "world_size"], 1)
    console = Console(width=120)
    with console.capture() as captured:
        console.print(render(Summary(**fields)))
    told = " ".join(captured.get().split())
    assert "83.0 s of 100.0 s trained = 0.83: against its own calibrated static step" in told
    assert "250 ms [200 .. 300] before training, 500 ms [500 .. 500] behind it" in told
    assert ("compare the share of a no_freeze run" in told) == moved
    unfrozen = (
        "without freezing about 2.0 to 4.0 s of training, by steps of 2,000 and 4,000 ms, timed before and behind "
        "it; this run: 100.0 s"
    )
    assert (f"{unfrozen} (+4900% to +2400%)" in told) == moved, "one that froze nothing has nothing to tell"


# ---- results whose code has changed ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "there", "not_there"),
    [
        ("bench partitioner", "pipetransformer/pipe/planner/partition.py", "pipetransformer/trainer.py"),
        ("bench paper", "config/simulation_paper_squad.yaml", "pipetransformer/engine/step.py"),
        ("bench paper", "pipetransformer/simulation/run.py", "benchmarks/balance/__main__.py"),
        ("bench overhead --model vit", "pipetransformer/trainer.py", "pipetransformer/launch/entry.py"),
        ("bench ddp-vs-pipe", "benchmarks/ddp_vs_pipe/rank.py", "benchmarks/support/measure.py"),
        ("bench amoebanet-speed", "benchmarks/resnet101_speed/speed.py", "benchmarks/runs/__main__.py"),
        ("bench runs sst2", "pipetransformer/trainer.py", "benchmarks/balance/__main__.py"),
        ("bench runs sst2", "run_pipetransformer.sh", "pipetransformer/graphs/zoo/resnet.py"),
        ("partition --model gpt2", "pipetransformer/graphs/zoo/gpt2.py", "pipetransformer/trainer.py"),
    ],
)
def test_code_of_a_result_is_what_its_benchmark_imports_and_names(command: str, there: str, not_there: str) -> None:
    code = stale.code_of(f"pipetransformer {command}")
    assert there in code and not_there not in code


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project of one benchmark that imports one module, in a repository of its own."""
    root = tmp_path / "clone"
    for name, text in {
        "benchmarks/a_table/__main__.py": "def main():\n    from pipetransformer.used import f\n",
        "pipetransformer/used.py": "f = 1\n" * 9,
        "pipetransformer/unused.py": "g = 1\n",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "benchmarks" / "results").mkdir()
    monkeypatch.setattr(stale, "ROOT", root)
    monkeypatch.setattr(stale, "RESULTS", root / "benchmarks" / "results")
    for known in (stale.changed_lines, stale.code_of, stale._uses):
        known.cache_clear()
    git(root, "init", "-q")
    commit_all(root)
    return root


def git(root: Path, *arguments: str) -> str:
    author = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
    return subprocess.run(["git", *author, *arguments], cwd=root, check=True, capture_output=True, text=True).stdout


def commit_all(root: Path) -> None:
    git(root, "add", "-A")
    git(root, "commit", "-qm", "all", "--no-verify")


def result(root: Path, name: str, **environment: str) -> None:
    text = json.dumps({"environment": {"command": "pipetransformer bench a-table", **environment}, "rows": []})
    (root / "benchmarks" / "results" / name).write_text(text)


def test_results_are_stale_where_their_code_changed(clone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = git(clone, "rev-parse", "--short", "HEAD").strip()
    (clone / "pipetransformer" / "unused.py").write_text("g = 2\n")
    commit_all(clone)
    result(clone, "same.json", commit=first, date="2026-11-22")
    assert [dict(age.changes or {}) for age in stale.ages_of(sorted(stale.RESULTS.glob("*.json")))] == [{}]
    (clone / "pipetransformer" / "used.py").write_text("f = 2\nf = 3\n" + "f = 1\n" * 8)
    (clone / "benchmarks" / "a_table" / "rank.py").write_text("1\n")
    commit_all(clone)
    stale.changed_lines.cache_clear(), stale.code_of.cache_clear()
    result(clone, "dirty.json", commit=f"{first}-dirty")
    result(clone, "gone.json", commit="0123abc")
    result(clone, "new.json", commit=git(clone, "rev-parse", "HEAD").strip())
    stale.main()
    *lines, last = capsys.readouterr().out.splitlines()
    told = {line.split()[0]: line.split()[1:] for line in lines if ".json" in line}
    worst = ["2", "4", "pipetransformer/used.py", "3,", "benchmarks/a_table/rank.py", "1"]
    assert list(told) == ["gone.json", "dirty.json", "same.json", "new.json"]
    assert told["same.json"] == [first, "2026-11-22", *worst]
    assert told["dirty.json"] == [f"{first}-dirty", "unknown", *worst]
    assert told["gone.json"][2:5] == ["-", "-", "the"] and told["new.json"][2:] == ["0", "0"]
    assert last.startswith("3 of 4 are older than their code")


def test_a_file_that_moved_counts_for_what_changed_in_it(clone: Path) -> None:
    first = git(clone, "rev-parse", "HEAD").strip()
    git(clone, "config", "diff.renames", "false")  # as some users have it
    git(clone, "mv", "pipetransformer/used.py", "pipetransformer/moved.py")
    commit_all(clone)
    (clone / "benchmarks" / "a_table" / "__main__.py").write_text("from pipetransformer.moved import f\n")
    result(clone, "a.json", commit=first)
    (age,) = stale.ages_of([stale.RESULTS / "a.json"])
    assert age.changes == {"benchmarks/a_table/__main__.py": 3}


@pytest.mark.parametrize("lacking", ["git", "repository"])
def test_without_git_or_a_repository_it_is_one_line(lacking: str, clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if lacking == "git":
        monkeypatch.setenv("PATH", "")
    else:
        monkeypatch.setenv("GIT_DIR", str(clone / "no.git"))
    with pytest.raises(UserError, match="bench --stale: it asks git for what changed; run it in a clone"):
        stale.main()
    monkeypatch.setattr(measure, "ROOT", clone)
    measure.started_at.cache_clear()
    assert measure.measured_commit() == "unknown"
    measure.started_at.cache_clear()


def test_stale_lists_all_results_or_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["bench", "--stale", "memory"]) == 2
    assert "bench --stale: it lists all results; leave memory out" in capsys.readouterr().err
    started: list[Path] = []
    monkeypatch.setattr(bench, "_start", lambda script, *arguments: started.append(script))
    assert main(["bench", "--stale"]) == 0
    assert [path.relative_to(REPOSITORY).as_posix() for path in started] == ["benchmarks/support/stale.py"]


def test_stale_ends_without_a_word_where_nobody_reads_on() -> None:
    command = [sys.executable, REPOSITORY / "benchmarks" / "support" / "stale.py"]
    path = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=path) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == -signal.SIGPIPE  # as any filter's, not a failure of ours
