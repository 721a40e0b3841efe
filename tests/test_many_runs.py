"""The benchmark of many runs: its trials, rows that are kept, bounds, and the blocks that the peer freezes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from tiny import tiny_bert
from transformers import AutoModelForSequenceClassification

from benchmarks.many_runs import __main__ as many_runs
from benchmarks.many_runs.__main__ import OURS, PEER, Plan, Sweep, Trial, once, table
from benchmarks.peers.hf_trainer import freeze_like
from benchmarks.support.kept import KeptRows
from pipetransformer.config import load_config


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return Plan(tmp_path / "SST-2", tmp_path / "model", 4, "float32")


def sweep(*seconds: float, found: int = 0) -> Sweep:
    trials = tuple(Trial(each, 0.8 + each / 1000, number < found) for number, each in enumerate(seconds))
    return Sweep(trials, sum(seconds))


def test_trials_are_learning_rates_by_seeds(plan: Plan) -> None:
    assert plan.trials[0] == ("train.lr=5e-5", "train.seed=0") and plan.trials[3] == ("train.lr=5e-5", "train.seed=1")
    for rate, seed in plan.trials:
        config = load_config(many_runs.CONFIG, [*many_runs.SETTINGS, "freeze.max_frozen=6", rate, seed])
        assert (config.freeze.policy, config.freeze.guard, config.train.epochs) == ("static", False, many_runs.EPOCHS)


def test_a_row_is_measured_once(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[tuple[str, int]] = []

    def measure(self: Plan, who: str, blocks: int) -> Sweep:
        measured.append((who, blocks))
        return sweep(1.0, 2.0)

    monkeypatch.setattr(Plan, "measure", measure)
    path = tmp_path / "rows.json"
    assert once(plan, OURS, 6, kept=KeptRows(path), stop=-math.inf) is None
    first = once(plan, OURS, 6, kept=KeptRows(path), stop=math.inf)
    assert once(plan, OURS, 6, kept=KeptRows(path), stop=-math.inf) == first == sweep(1.0, 2.0)
    assert once(plan, OURS, 9, kept=KeptRows(path), stop=-math.inf) is None and measured == [(OURS, 6)]


def test_all_trials_of_ours_share_one_folder(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, int]] = []

    def ours(settings: tuple[str, ...], *, name: str, folder: Path, number: int) -> Trial:
        assert "freeze.max_frozen=6" in settings and plan.trials[number][0] in settings and "6 blocks" in name
        seen.append((str(folder), number))
        return Trial(1.0, 0.5, number > 0)

    monkeypatch.setattr(many_runs, "ours", ours)
    found = plan.measure(OURS, 6)
    assert sorted(number for _, number in seen) == [0, 1, 2, 3] and len({folder for folder, _ in seen}) == 1
    assert [trial.found for trial in found.trials] == [False, True, True, True], "in the order of their numbers"


def test_the_peer_keeps_freed_memory(plan: Plan, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As ours does for itself."""
    given: list[Mapping[str, str]] = []

    def launch(script: Sequence[str], *, ranks: int, name: str, variables: Mapping[str, str]) -> str:
        given.append(variables)
        Path(script[4]).write_text('{"steps": [1.0, 2.0], "accuracy": 0.5}')
        return ""

    monkeypatch.setattr(many_runs, "launch", launch)
    assert many_runs.trainer((), name="a trial", folder=tmp_path, number=0) == Trial(3.0, 0.5)
    assert given[0]["MALLOC_TRIM_THRESHOLD_"] == str(2**62)


def test_bounds_are_shares_of_the_row_without_freezing() -> None:
    found = {
        (OURS, 0): sweep(60.0),
        (PEER, 0): sweep(90.0),
        (OURS, 9): sweep(20.0, 16.0, found=1),
        (PEER, 9): sweep(72.0),
        (OURS, 6): sweep(40.0),
    }
    rows = {(str(row["by"]), row["blocks"]): row for row in table(found, num_blocks=12)}
    own = rows[OURS, 9]
    assert (own["seconds"], own["bound, s"], own["x Trainer"], own["stores found"]) == (18.0, 15.0, 4.0, 1)
    assert own["bound over seconds"] == pytest.approx(15 / 18)
    assert rows[PEER, 9]["bound, s"] == 45.0 and rows[OURS, 6]["x Trainer"] is None


def test_the_peer_freezes_the_same_blocks(tmp_path: Path) -> None:
    tiny_bert(tmp_path / "bert", layers=4)
    for blocks in (0, 3):
        model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "bert", dtype=torch.float32)
        freeze_like(load_config(many_runs.CONFIG, [*many_runs.SETTINGS, f"freeze.max_frozen={blocks}"]), model)
        trains = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        assert any("layer.3." in name for name in trains) and any("classifier" in name for name in trains)
        assert any("layer.2." in name for name in trains) == (blocks == 0)
        assert any("embeddings" in name for name in trains) == (blocks == 0)
