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


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Times layouts of three lengths under a budget; each visit takes a second."""
    visits: list[tuple[ParallelPlan, int]] = []
    engine: Any = SimpleNamespace(forget_steps=lambda: None)
    engine.enter = lambda plan: setattr(engine, "plan", plan) or SimpleNamespace(seconds=0.0)

    def one(given: Any, batch: Batch, *, num_steps: int) -> float:
        visits.append((given.plan, batch.length))
        return float(given.plan.pp)

    monkeypatch.setattr(static_layouts, "time_steps", one)
    monkeypatch.setattr(static_layouts, "slowest", float)
    monkeypatch.setattr(static_layouts, "perf_counter", lambda: float(len(visits)))
    examples = {length: Batch(0, (np.arange(8),), length) for length in LENGTHS}
    workload: Any = SimpleNamespace(counts=LENGTHS, modal_length=16, lengths=tuple(LENGTHS), examples=examples)

    def under(budget: float) -> tuple[list[tuple[ParallelPlan, int]], StaticLayouts]:
        visits.clear()
        planner = make_planner()
        plans, shortest = planner.static_layouts(JOB), planner.shortest_steps(JOB)
        assert (len(plans), len(shortest)) == (3, 3)
        found = time_static_layouts(plans, shortest, engine=engine, workload=workload, budget_seconds=budget)
        return list(visits), found

    return under


@pytest.mark.parametrize(
    ("budget", "of_a_round", "rounds"),
    [(-1.0, 1, 1), (2.9, 1, 1), (3.0, 2, 1), (9.9, 8, 1), (10.0, 9, 1), (19.9, 9, 1), (20.0, 9, 2), (1e9, 9, 7)],
)
def test_layouts_are_timed_as_far_as_the_budget_goes(timed: Any, budget: float, of_a_round: int, rounds: int) -> None:
    """Of nine visits a round and one for each round at the end of the run."""
    visits, found = timed(budget)
    assert len(visits) == of_a_round * rounds
    assert len(found.rounds) == rounds
    assert (found.spread is None) == (rounds < 3)


def test_the_fastest_layout_by_prediction_is_timed_first(timed: Any) -> None:
    planner = make_planner()
    fastest = min(planner.static_layouts(JOB), key=lambda p: p.step_seconds).plan
    visits, found = timed(0.0)
    assert visits == [(fastest, 16)]
    assert (found.best_pp, set(found.plans), found.timed) == (fastest.pp, {fastest.pp}, {fastest: float(fastest.pp)})
    assert found.floor_seconds == {16: fastest.pp, 24: fastest.pp * 24 / 16}, "a length without steps: in proportion"
    everything, _ = timed(1e9)
    assert everything[:2] == [(fastest, 16), (fastest, 24)]
