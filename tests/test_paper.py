"""The paper's setting, simulated: each assumption does what it says, and fits nothing on a row that it is judged by."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

import benchmarks.paper.__main__ as paper
from benchmarks.paper.assumptions import ASSUMPTIONS, STATIC, Halving, fitted_rate, seconds
from benchmarks.support.measure import CONFIGS
from pipetransformer.simulation.run import run_simulation
from pipetransformer.simulation.schema import load_simulation

PLANNED, HALVING, RATE, EVALUATION, READING = ASSUMPTIONS
FEW = ["pipe.microbatches=8", "train.epochs=4", "freeze.frozen=[0,4,7,12]"]
cifar = partial(seconds, "cifar100", test_samples=10_000)


def test_the_pipeline_halves_when_no_rank_gets_more_than_it_had() -> None:
    """Of 12 blocks on 8 ranks 1.5 each: half of them active need 4 ranks, a quarter 2, none one."""
    frozen = [0, 4, 6, 8, 9, 10, 11, 12]
    given = ["pipe.microbatches=8", "train.epochs=8", f"freeze.frozen={frozen}"]
    segments = run_simulation(load_simulation(CONFIGS / "simulation_paper_cifar100.yaml", given), planning=Halving)
    lengths = {segment.prediction.plan.frozen: segment.prediction.plan.pp for segment in segments}
    assert lengths == {0: 8, 4: 8, 6: 4, 8: 4, 9: 2, 10: 2, 11: 1, 12: 1}


def test_each_assumption_changes_what_it_says() -> None:
    planned, halving = (cifar(FEW, assumption=each) for each in (PLANNED, HALVING))
    assert planned < halving, "a planner that is free to choose is not slower"
    evaluated = cifar(FEW, assumption=replace(HALVING, evaluates=True))
    forward = 10_000 * (12 * (24 * 197 * 768**2 + 4 * 197**2 * 768) + 231_211_008 + 2 * 78_436) / 5.5e12 / 16
    assert evaluated - halving == pytest.approx(4 * forward, rel=1e-3), "four epochs, each one forward of the test set"
    bound = partial(cifar, FEW, samples_per_s=100.0)
    assert bound(assumption=HALVING) == halving
    assert bound(assumption=replace(HALVING, reads=True)) > 4 * 50_000 / 100.0


def test_the_rate_is_that_of_the_run_without_freezing() -> None:
    rate = fitted_rate("cifar100", 2106.0, assumption=EVALUATION, test_samples=10_000)
    assert cifar(STATIC, assumption=EVALUATION, rate=rate) == pytest.approx(2106.0, rel=1e-3)


def test_the_table_has_all_published_rows_and_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        paper, "run_seconds", lambda name, given, assumption: 2.0 if "freeze.alpha=0.0" in given else 1.0
    )
    monkeypatch.setattr(paper, "rate_of", lambda name, assumption: 1e12)
    paper.write(tmp_path)
    kept = json.loads((tmp_path / "paper.json").read_text())
    published = [*(gain for _, gain, _ in paper.ABLATION), *(gain for _, gain in paper.ALPHAS)]
    assert [row["published"] for row in kept["rows"]] == [*published, *(gain for *_, gain in paper.DATA)]
    assert {row[each.name] for row in kept["rows"] for each in ASSUMPTIONS} == {2.0}
    assert (tmp_path / "paper.png").exists()
