"""The compute floor by hand: two ranks, three units of 1, 2 and 3 ms forward for 2 rows, backward twice that."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
from laws import configuration_file

from pipetransformer.cache import Advance
from pipetransformer.config import load_config
from pipetransformer.pipe.planner.costs import UnitCosts, at_length, line
from pipetransformer.plan import ParallelPlan
from pipetransformer.run.compute_floor import ComputeFloor
from pipetransformer.run.events import Advanced, DecisionEnds, Stepped, Trained
from pipetransformer.run.folder import RunFolder
from pipetransformer.run.report import Report

MS = 10**6


def floor() -> ComputeFloor:
    """A full step of 8 samples takes 60 ms at the length 16, the only one that was timed; 1 MB of memcpy takes 1 ms."""
    costs = UnitCosts(
        rows=2, length=16, forward_ns=(MS, 2 * MS, 3 * MS), backward_ns=(2 * MS, 4 * MS, 6 * MS),
        activation_bytes=(0, 0, 0), boundary_bytes=(0, 0, 0), prefix_ns=(MS, 2 * MS, 3 * MS), weight_ns=(0, 0, 0),
        recompute_ns=(0, 0, 0), kept_bytes=(0, 0, 0), entering_bytes=(0, 0, 0), working_bytes=(0, 0, 0),
        prefix_bytes=(0, 0, 0), between_bytes=(0, 0, 0),
    )  # fmt: skip
    return ComputeFloor(
        step_seconds={16: 0.06}, costs={16: costs}, timed_samples=8, world_size=2, memcpy_bytes_per_second=1e9
    )


@pytest.mark.parametrize(
    ("num_samples", "first_active", "enters", "read_bytes", "milliseconds"),
    [
        (8, 0, 0, 0, 60.0),  # nothing frozen
        (4, 0, 0, 0, 30.0),  # half a batch
        (8, 2, 2, 0, 30.0),  # the last unit is half of the work; the prefix is not computed
        (8, 2, 0, 0, 30.0 + 6.0),  # 3 ms for 2 rows of the prefix, 8 rows, 2 ranks
        (8, 2, 1, 0, 30.0 + 4.0),  # entered behind the stem
        (8, 2, 2, 10**6, 30.0 + 0.5),  # each rank copies half
    ],
)
def test_a_step(num_samples: int, first_active: int, enters: int, read_bytes: int, milliseconds: float) -> None:
    seconds = floor().of_step(
        length=16, num_samples=num_samples, first_active=first_active, enters=enters, read_bytes=read_bytes
    )
    assert seconds * 1000 == pytest.approx(milliseconds)


def test_a_timed_step_that_had_frozen_units() -> None:
    """Of 12 ms for 2 rows, 3 were the prefix, which a cache saves."""
    seconds = replace(floor(), first_timed=2).of_step(length=16, num_samples=8, first_active=2, enters=2, read_bytes=0)
    assert seconds * 1000 == pytest.approx(60 * 9 / 12)


@pytest.mark.parametrize(("first", "stop", "milliseconds"), [(0, 3, 600.0), (0, 1, 100.0), (1, 2, 200.0), (2, 2, 0.0)])
def test_an_advance_of_400_samples(first: int, stop: int, milliseconds: float) -> None:
    seconds = floor().of_advance(length=16, num_samples=400, first=first, stop=stop)
    assert seconds * 1000 == pytest.approx(milliseconds)


def test_a_run_adds_up_its_floor_and_its_seconds(tmp_path: Path) -> None:
    """Two steps, a decision of 5 s, 3 of them an advance pass for training and 1 to evaluate, and a pass of set-up."""
    config = load_config(configuration_file("vit"), (f"run.dir={tmp_path}",))
    folder = RunFolder(run_id="x", path=tmp_path, changes=())
    report = Report(config, mock.Mock(), folder, mock.Mock(total_steps=2), started=0.0, best_by="accuracy")
    report._tracker, report._floor = mock.Mock(), floor()
    plan = ParallelPlan(0, 1, 2, (), 1, "1f1b", None, 1)
    batch = mock.Mock(length=16, global_count=8, enters=0)
    advance = Advance(3.0, evaluation_s=1.0, stop=3, samples=Counter({(0, 16): 400}), evaluation_samples=90)
    for event in (
        Advanced(0, 1, advance, 0, "host", is_refill=True),
        Stepped(1, 0, plan, batch, read_bytes=0),
        Advanced(1, 1, advance, 0, "host", is_refill=False),
        DecisionEnds(5.0),
        Stepped(2, 0, plan, batch, read_bytes=10**6),
        Trained(7.0, epoch_samples=None),
    ):
        report.hear(event)
    totals = report.totals
    assert totals.floor_s == pytest.approx(0.06 + 0.6 + 0.06 + 0.0005)
    assert (totals.train_s, totals.transition_s, totals.cache_advance_s, totals.eval_s) == (11.0, 1.0, 3.0, 1.0)


def test_a_length_that_was_not_timed_adds_nothing() -> None:
    assert floor().of_step(length=32, num_samples=8, first_active=0, enters=0, read_bytes=0) == 0.0
    assert floor().of_advance(length=32, num_samples=8, first=0, stop=3) == 0.0


def test_costs_of_a_length_between_two_measured_ones_are_on_their_line() -> None:
    assert line(16, {8: 10.0, 24: 30.0}) == 20.0
    assert line(32, {24: 30.0, 8: 10.0}) == 40.0
    assert line(48, {24: 30.0}) == 60.0  # a single one: in proportion
    assert line(8, {16: 10.0, 32: 40.0}) == 5.0  # never less than in proportion, however steep
    assert line(64, {8: 10.0, 32: 9.0}) == 10.0  # noise: longer is not cheaper


def test_unit_costs_of_a_length_that_was_not_measured() -> None:
    rest = [(0, 0)] * 4
    near = UnitCosts(4, 8, (1, 10), (2, 20), (100, 200), (8, 16), (1, 5), (1, 10), (0, 0), (100, 200), *rest)
    far = UnitCosts(4, 16, (3, 20), (6, 40), (200, 400), (16, 32), (1, 9), (3, 20), (0, 0), (200, 400), *rest)
    assert at_length(8, {8: near, 16: far}) is near
    assert at_length(12, {8: near, 16: far}) == UnitCosts(
        4, 12, (2, 15), (4, 30), (150, 300), (12, 24), (1, 7), (2, 15), (0, 0), (150, 300), *rest
    )
