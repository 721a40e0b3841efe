"""``report.html``: complete, true to the run's files, and readable on any screen."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from benchmarks.soak.forked import ForkedJob, running
from pipetransformer import commands
from pipetransformer.run.page import history, page, read_history, write_report
from pipetransformer.run.page.history import History
from pipetransformer.run.tracking.summary import parts_of_time

SETTINGS = (
    *("train.epochs=6", "train.precision=float32", "train.batch_size=16", "data.max_train_samples=160"),
    *(
        "data.max_eval_samples=60",
        "train.eval_every=1 epoch",
        "log.every=2",
        "log.wandb=disabled",
        "pipe.measure=false",
    ),
)
FREEZES = ("freeze.policy=schedule", "freeze.alpha=0.3", "freeze.guard=false", "pipe.initial_length=2")
NAMES = {"elastic": FREEZES, "plain": ("freeze.policy=none",)}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """A run that freezes on 2 ranks, and one that does not."""
    folder = tmp_path_factory.mktemp("runs")
    for name, settings in NAMES.items():
        arguments = ["digits", *SETTINGS, *settings, f"run.id={name}", f"run.dir={folder}"]
        job = ForkedJob("image_classification", arguments, num_ranks=2)
        with running(job):
            ended = job.supervise()
        assert ended.exit_code == 0, ended.cause
        assert f"report       {folder / name / 'report.html'}" in ended.out
        assert f"next         pipetransformer predict {folder / name} DATA" in ended.out
    yield {name: folder / name for name in NAMES}


def test_a_run_tells_of_itself(runs: dict[str, Path]) -> None:
    page = (runs["elastic"] / "report.html").read_text()
    summary = json.loads((runs["elastic"] / "summary.json").read_text())
    assert not re.search(r"""(src|href)=["']?(http|//|file)""", page.replace('xlink:href="#', "")), (
        "it needs nothing else"
    )
    steps = min(4, len(summary["transitions"]) + 1)  # real ones, of the first plans and of the last
    assert page.count("<svg") == 9 + (summary["cache"]["hits"] > 0) + steps
    assert all(svg.count("<path") > 5 for svg in page.split("<svg")[1:])
    for title in ("Metric and loss", "What froze, when and why", "Where a step", "Memory, cache and time", "Repeat it"):
        assert title in page
    for move in summary["transitions"]:
        assert f"pp {move['pp']} x dp {move['dp']}, M {move['microbatches']}, {move['frozen']} frozen" in page
    assert f"<b>{max(m['accuracy'] for m in accuracies(runs['elastic'])):.4f}</b>" in page


def accuracies(run: Path) -> list[dict[str, float]]:
    return [dict(point.figures) for point in read_history(run).evaluations]


def test_its_times_add_up(runs: dict[str, Path]) -> None:
    summary = json.loads((runs["elastic"] / "summary.json").read_text())
    parts = dict(parts_of_time(summary))
    other = parts.pop("other")
    assert sum(parts.values()) <= 1.02 * summary["wall_s"], "no second is counted twice"
    assert 0 < other < 0.35 * summary["wall_s"] and all(seconds >= 0 for seconds in parts.values())


def test_the_history_is_that_of_the_files(runs: dict[str, Path]) -> None:
    history = read_history(runs["elastic"])
    summary = json.loads((runs["elastic"] / "summary.json").read_text())
    assert [(c.step, c.plan["frozen"]) for c in history.plans[1:]] == [
        (move["step"], move["frozen"]) for move in summary["transitions"]
    ]
    first = summary["transitions"][0]
    assert history.frozen_at(first["step"] - 1) == 0 and history.frozen_at(first["step"]) == first["frozen"]
    assert history.steps[-1].step == history.total_steps == summary["steps"]
    assert history.evaluations[-1].train_s == pytest.approx(summary["train_s"]), "the events before it lack a little"
    told = [json.loads(line) for line in (runs["elastic"] / "events.jsonl").read_text().splitlines()]
    kinds = [event["event"] for event in told]
    last, final = (len(kinds) - 1 - kinds[::-1].index(kind) for kind in ("steps", "evaluation"))
    before = max(at for at in range(final) if kinds[at] == "evaluation")
    timed = ("steps", "transition", "advance", "probe", "guard")
    since = sum(event["seconds"] for event in told[before + 1 : last + 1] if event["event"] in timed)
    assert since > 0 and history.steps[-1].train_s == pytest.approx(history.evaluations[-2].train_s + since)
    assert history.best_by == "accuracy" and not read_history(runs["plain"]).plans[-1].plan["frozen"]


def test_figures_that_are_no_numbers_break_no_page(runs: dict[str, Path], tmp_path: Path) -> None:
    """JSON has words for them; and what a resumption has done again is told once."""
    folder = tmp_path / "odd"
    shutil.copytree(runs["elastic"], folder)
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    evaluations = [event for event in lines if event["event"] == "evaluation"]
    evaluations[0]["metrics"]["accuracy"] = "NaN"
    steps = [event for event in lines if event["event"] == "steps"]
    steps[0]["loss"], steps[1]["gradient_norms"] = "Infinity", ["NaN"] * 6
    again = [event for event in lines if event["event"] in ("transition", "freeze_decision")]
    resumed = {"event": "resume", "time": 0.0, "step": 0, "resumed_from": "step-00000000"}
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in [*again, resumed, *lines]))
    history = read_history(folder)
    assert [told[0] for told in history.told if told[1] == "transition"] == [
        event["step"] for event in lines if event["event"] == "transition"
    ]
    best = history.best
    assert best is not None and best.figures["accuracy"] == max(e["metrics"]["accuracy"] for e in evaluations[1:])
    write_report([history], tmp_path / "odd.html")
    assert "<svg" in (tmp_path / "odd.html").read_text()


def test_runs_are_compared(runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "both.html"
    assert commands.main(["report", *map(str, runs.values()), "--output", str(output)]) == 0
    page = output.read_text()
    assert page.count("<svg") == 6 and "<td>freeze.policy</td><td>schedule</td><td>none</td>" in page
    assert commands.main(["report", str(tmp_path)]) == 2
    assert "holds no events.jsonl; give the folder of a run" in capsys.readouterr().err


@pytest.mark.parametrize("width", [390, 1280])
def test_a_browser_shows_it_without_an_error(width: int, runs: dict[str, Path], tmp_path: Path) -> None:
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("needs chromium")
    page = (runs["elastic"] / "report.html").read_text()
    # In a frame of that width: a window is never narrower than 500 pixels.
    inner = tmp_path / "inner.html"
    inner.write_text(page)
    script = """<script>
      frames[0].addEventListener('load', () => {})
      onload = () => { const d = document.querySelector('iframe').contentDocument
        const drawn = [...d.querySelectorAll('svg')].filter(s => s.getBoundingClientRect().width > 100).length
        document.title = [d.documentElement.scrollWidth, d.documentElement.clientWidth, drawn].join(' ') }
    </script>"""
    (tmp_path / "outer.html").write_text(
        f'<!doctype html><title>none</title><iframe src="inner.html" width="{width}" height="800"></iframe>{script}'
    )
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"]
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    ended = subprocess.run(
        [*command, profile, "--enable-logging=stderr", "--dump-dom", (tmp_path / "outer.html").as_uri()],
        capture_output=True,
        text=True,
        timeout=60,
    )
    found = re.search(r"<title>(\d+) (\d+) (\d+)</title>", ended.stdout)
    if not ended.stdout:
        pytest.skip(f"chromium shows no page here: {ended.stderr[-200:]}")
    assert found, ended.stdout[:500]
    whole, shown, drawn = map(int, found.groups())
    assert whole <= shown <= width and drawn == page.count("<svg")
    assert "CONSOLE" not in ended.stderr, ended.stderr


def test_a_probe_tells_why_nothing_froze() -> None:
    told: list[tuple[int, str, Any]] = [
        (0, "probe", {"scores": [0.19, 0.26, 0.3], "free": 0, "seconds": 0.5}),
        (0, "freeze_decision", {"frozen": 0, "asked": 0, "reason": ""}),
    ]
    probed, decided = page._decisions(cast(History, SimpleNamespace(told=told)))
    assert probed[1:] == (
        "linear probe: 0 blocks are free",
        "share of the labels' variance that it explains, behind the stem and each block: 0.19, 0.26, 0.30",
    )
    assert decided[1] == "AutoFreeze: 0 blocks"
    assert "probe" in history._TOLD
