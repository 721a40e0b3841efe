"""Static layouts are timed as far as their share of the run goes, the most telling ones first."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from test_planner import JOB, make_planner

from pipetransformer.data import Batch
from pipetransformer.pipe.measure import static_layouts
from pipetransformer.pipe.measure.static_layouts import StaticLayouts, time_static_layouts
from pipetransformer.plan import ParallelPlan

LENGTHS = {16: 3, 24: 1}
Visits = list[tuple[ParallelPlan, int]]


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Times layouts of three lengths under a budget. A visit takes its predicted step, as all of a round."""
    visits: Visits = []
    planner = make_planner()
    plans, shortest = planner.static_layouts(JOB), planner.shortest_steps(JOB)
    assert (len(plans), len(shortest)) == (3, 3)
    seconds = {p.plan: p.step_seconds for p in (*plans, *shortest)}
    engine: Any = SimpleNamespace(forget_steps=lambda: None)
    engine.enter = lambda plan: setattr(engine, "plan", plan) or SimpleNamespace(seconds=0.0)

    def one(given: Any, batch: Batch, *, num_steps: int) -> float:
        visits.append((given.plan, batch.length))
        return float(given.plan.pp)

    monkeypatch.setattr(static_layouts, "time_steps", one)
    monkeypatch.setattr(static_layouts, "slowest", float)
    monkeypatch.setattr(static_layouts, "perf_counter", lambda: sum(seconds[plan] * at / 16 for plan, at in visits))
    examples = {length: Batch(0, (np.arange(8),), length) for length in LENGTHS}
    workload: Any = SimpleNamespace(counts=LENGTHS, modal_length=16, lengths=tuple(LENGTHS), examples=examples)

    def under(budget: float) -> tuple[Visits, StaticLayouts]:
        """A budget of 1 is that of one round and the first layout's at the end."""
        full = sum(2.5 * p.step_seconds for p in plans) + sum(p.step_seconds for p in shortest)
        one_round = full + min(p.step_seconds for p in plans)
        visits.clear()
        found = time_static_layouts(
            plans, shortest, engine=engine, workload=workload, budget_seconds=budget * one_round
        )
        return list(visits), found

    return under


@pytest.mark.parametrize(
    ("budget", "of_a_round", "rounds"), [(-1.0, 1, 1), (0.0, 1, 1), (1.01, 9, 1), (1.9, 9, 1), (2.01, 9, 2), (99, 9, 7)]
)
def test_layouts_are_timed_as_far_as_the_budget_goes(timed: Any, budget: float, of_a_round: int, rounds: int) -> None:
    """A round at the end of the run included, for each of the start's."""
    visits, found = timed(budget)
    assert len(visits) == of_a_round * rounds
    assert len(found.rounds) == rounds
    assert (found.spread is None) == (rounds < 3)


def test_the_fastest_layout_by_prediction_is_timed_first_and_its_shortest_step_next(timed: Any) -> None:
    planner = make_planner()
    fastest = min(planner.static_layouts(JOB), key=lambda p: p.step_seconds).plan
    visits, found = timed(0.0)
    assert visits == [(fastest, 16)]
    assert (found.best_pp, set(found.plans), found.timed) == (fastest.pp, {fastest.pp}, {fastest: float(fastest.pp)})
    assert found.floor_seconds == {16: fastest.pp, 24: fastest.pp * 24 / 16}, "a length without steps: in proportion"
    (_, (shortest, at), third, *_), _ = timed(99)
    assert (shortest.pp, shortest.frozen > 0, at) == (fastest.pp, True, 16)
    assert third == (fastest, 24)


def test_what_the_budget_has_room_for_is_timed(timed: Any) -> None:
    """Half of a round: the fastest layout with its shortest step, and of the rest the steps that are short enough."""
    visits, found = timed(0.5)
    assert 2 <= len(visits) < 9 and len(set(visits)) == len(visits)
    assert set(found.timed) == {plan for plan, length in visits if length == 16}


def test_short_steps_are_counted_by_one_that_builds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step takes 30 ms and the others 2: 25 of these are 50 ms."""
    now, taken = [0.0], list[int]()

    def step(entering: object, *, step: int, lr: float, probed: bool) -> None:
        taken.append(step)
        now[0] += 0.002 if step else 0.03

    chain = SimpleNamespace(train=lambda: None, device=None)
    feed = SimpleNamespace(batches=lambda batches, epoch: (batch for batch in batches))
    engine: Any = SimpleNamespace(chain=chain, feed=lambda split: feed, step=step)
    monkeypatch.setattr(static_layouts, "perf_counter", lambda: now[0])
    monkeypatch.setattr(static_layouts, "slowest", float)
    monkeypatch.setattr(static_layouts, "synchronize", lambda device: None)
    monkeypatch.setattr(static_layouts, "_behind_prefix", lambda batch, engine: batch)
    monkeypatch.setattr(static_layouts.dist, "barrier", lambda: None)
    batch = Batch(0, (np.arange(8),), 16)
    assert static_layouts.time_steps(engine, batch, num_steps=2) == pytest.approx(0.002)
    assert len(taken) == 1 + 25
    assert static_layouts.round_seconds(0.00201, num_steps=2) == pytest.approx(0.00201 * len(taken))
    assert static_layouts.round_seconds(0.7, num_steps=2) == pytest.approx(0.7 * 3)
