"""Sweeps: the trials that a file makes, one after the other or side by side, ranked, and resumed where they were."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from test_launch import ROOT

from pipetransformer import commands
from pipetransformer.commands import sweep
from pipetransformer.config.sweeps import load_sweep
from pipetransformer.errors import UserError

SMALL = [
    *("train.epochs=1", "train.precision=float32", "data.max_train_samples=48", "data.max_eval_samples=20"),
    *("log.wandb=disabled", "log.report=false", "pipe.measure=false", "freeze.policy=none"),
]


def write(path: Path, **values: object) -> Path:
    path.write_text(yaml.safe_dump({"config": "digits", "settings": SMALL, **values}, sort_keys=False))
    return path


def test_a_grid_is_every_combination(tmp_path: Path) -> None:
    keys = {"train.lr": [1e-3, 1e-2], "train.seed": [0, 1, 2]}
    trials = load_sweep(str(write(tmp_path / "lr.yaml", keys=keys))).trials
    assert [tuple(trial.values.values()) for trial in trials] == [(lr, s) for lr in (1e-3, 1e-2) for s in (0, 1, 2)]
    assert trials[0].overrides == ("train.lr=0.001", "train.seed=0") and len({trial.name for trial in trials}) == 6


def test_a_list_goes_along_and_draws_are_the_same_each_time(tmp_path: Path) -> None:
    keys = {"train.lr": [1e-3, 1e-2], "freeze.policy": ["none", "guarded"]}
    along = load_sweep(str(write(tmp_path / "a.yaml", keys=keys, combine="list")))
    assert [[*trial.values.values()] for trial in along.trials] == [[1e-3, "none"], [1e-2, "guarded"]]
    drawn = [
        load_sweep(str(write(tmp_path / "r.yaml", keys={"train.seed": list(range(99))}, combine="random", trials=5)))
        for _ in range(2)
    ]
    assert len(drawn[0].trials) == 5 and drawn[0] == drawn[1]


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"keys": {"train.lr": []}}, "keys: train.lr has no value; give some"),
        ({"keys": {}}, "keys: keys has no value; give some"),
        ({"keys": {"train.sed": [1]}}, "train.sed: no such key; did you mean train.seed?"),
        ({"keys": {"train.lr": [1, -1]}}, "train.lr: -1 is not allowed; give a number above 0"),
        ({"keys": {"train.lr": [1], "train.seed": [1, 2]}, "combine": "list"}, "combine list needs as many of each"),
        ({"keys": {"train.lr": [1]}, "combine": "random"}, "trials: is the number of draws of combine random"),
        ({"keys": {"train.lr": [1]}, "combine": "tree"}, 'combine: "tree" is not allowed; give one of grid, list'),
    ],
)
def test_a_mistake_is_one_line(values: dict[str, object], line: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        load_sweep(str(write(tmp_path / "bad.yaml", **values)))
    assert line in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["ablation", "alpha", "microbatches"])
def test_the_papers_tables_are_shipped(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(load_sweep(name).trials) >= 4
    if name == "ablation":
        assert commands.main(["sweep", name, "--wandb"]) == 2
        assert "takes its values together (combine: list), which wandb's sweeps cannot" in capsys.readouterr().err
        return
    assert commands.main(["sweep", name, "--wandb"]) == 0
    told = yaml.safe_load(capsys.readouterr().out)
    assert told["metric"] == {"name": "Test/Acc", "goal": "maximize"} and told["command"][:3] == [
        *("pipetransformer", "train", "digits")
    ]
    assert commands.main(["sweep", "nothing"]) == 2
    assert "no shipped sweep; shipped are ablation, alpha, microbatches" in capsys.readouterr().err


def test_trials_at_once_have_gpus_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    places = sweep._places(2, ranks=2)
    assert [places.get() for _ in range(2)] == ["0,1", "2,3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert sweep._places(1, ranks=1).get() is None


@pytest.mark.full
def test_trials_are_run_ranked_and_taken_up_again(tmp_path: Path) -> None:
    path = write(tmp_path / "lr.yaml", keys={"train.lr": [1e-12, 3e-3, 1e9]})
    command = [sys.executable, "-m", "pipetransformer", "sweep", str(path), "--jobs", "2"]
    options = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": str(ROOT)}, "capture_output": True, "text": True}
    ended = subprocess.run(command, **options)
    assert ended.returncode == 2, "one has diverged"
    assert ended.stderr.splitlines()[-1].startswith("error: sweep: 1 of 3 trials failed: 002-")
    folder = tmp_path / "sweeps" / "lr"
    rows = list(csv.DictReader((folder / "results.csv").open()))
    assert len(rows) == 2 and float(rows[0]["best accuracy"]) >= float(rows[1]["best accuracy"])
    assert (folder / "comparison.html").is_file()
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*/summary.json")}
    write(path, keys={"train.lr": [1e-12, 3e-3]})
    again = subprocess.run(command, **options)
    assert again.returncode == 0 and "2 trials in sweeps/lr, 2 of them done" in again.stdout
    assert before == {path: path.stat().st_mtime_ns for path in folder.glob("*/summary.json")}, "nothing is run twice"
    assert {json.loads(path.read_text())["epochs"] for path in before} == {1}
