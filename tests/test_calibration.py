"""Lines from simulated to real seconds of a step: exact through exact points, and moved with the machine's speed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipetransformer.pipe.planner import calibration
from pipetransformer.pipe.planner.calibration import Line, Observed, Point, fitted, lines_of
from pipetransformer.plan import ParallelPlan

POSITIVE = st.floats(1e-4, 10)
WHOLE = ParallelPlan(0, 1, 2, (), 1, "1f1b", None, 6)
FROZEN = replace(WHOLE, frozen=6)
HALF = replace(WHOLE, frozen=3)
LONG = ParallelPlan(0, 2, 1, (4,), 2, "1f1b", None, 6)
SIMULATED = {WHOLE: 1.0, HALF: 0.5, FROZEN: 0.01, LONG: 0.8}


@given(constant=st.floats(0, 1), slope=POSITIVE, works=st.lists(POSITIVE, min_size=2, max_size=6, unique=True))
def test_points_on_a_line_give_that_line(constant: float, slope: float, works: list[float]) -> None:
    points = [Point(work, constant + slope * work, weight) for weight, work in enumerate(works, start=1)]
    line = fitted(points)
    assert all(line.seconds(p.simulated) == pytest.approx(p.real, rel=0.02) for p in points)


def test_one_point_gives_a_factor() -> None:
    assert fitted([Point(0.5, 1.0)]) == Line(0.0, 2.0)
    assert fitted([]) == Line()


def test_neither_constant_nor_slope_is_negative() -> None:
    steeper = fitted([Point(1.0, 1.0), Point(0.5, 0.1)])
    assert steeper.constant == 0 and steeper.slope > 0
    falling = fitted([Point(1.0, 0.1), Point(0.5, 1.0)])
    assert falling.slope == 0 and 0.1 < falling.constant < 1


def test_the_shortest_step_tells_the_constant() -> None:
    lines = lines_of({WHOLE: 1.5, FROZEN: 0.025, LONG: 1.2}, {}, lengths=(1, 2), simulated=SIMULATED.__getitem__)
    assert lines[1].constant == pytest.approx(0.0101, rel=0.01) and lines[1].slope == pytest.approx(1.49, rel=0.01)
    assert lines[2] == Line(0.0, pytest.approx(1.5))


def test_a_slower_machine_is_slower_in_every_plan() -> None:
    """Steps of the first plan took twice as long as before training: so will those of all others."""
    timed = {WHOLE: 1.5, FROZEN: 0.025, LONG: 1.2}
    before = lines_of(timed, {}, lengths=(1, 2), simulated=SIMULATED.__getitem__)
    after = lines_of(timed, {WHOLE: Observed(1.0, 3.0)}, lengths=(1, 2), simulated=SIMULATED.__getitem__)
    for pp, line in before.items():
        for simulated in (1.0, 0.3, 0.01):
            assert after[pp].seconds(simulated) == pytest.approx(2 * line.seconds(simulated), rel=0.01)


def test_steps_of_part_of_a_full_one_s_work_tell_the_same() -> None:
    timed = {WHOLE: 1.5, FROZEN: 0.025}
    line = lines_of(timed, {}, lengths=(1, 2), simulated=SIMULATED.__getitem__)[1]
    seen = {WHOLE: Observed(0.7, line.seconds(0.7))}
    assert lines_of(timed, seen, lengths=(1, 2), simulated=SIMULATED.__getitem__)[1].seconds(0.01) == pytest.approx(
        line.seconds(0.01), rel=0.01
    )


def test_what_ran_counts_more_than_what_was_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half-frozen steps took longer than the timings before training say: the line goes towards them, and farther than
    if they counted as one more timing."""
    timed = {WHOLE: 1.0, FROZEN: 0.02}
    seen = {HALF: Observed(1.0, 0.7), WHOLE: Observed(1.0, 1.0)}

    def half(observed: dict[ParallelPlan, Observed]) -> float:
        lines = lines_of(timed, observed, lengths=(1, 2), simulated=SIMULATED.__getitem__)
        return lines[1].seconds(SIMULATED[HALF])

    before, after = half({WHOLE: seen[WHOLE]}), half(seen)
    monkeypatch.setattr(calibration, "_LIVE_WEIGHT", 1.0)
    assert before < half(seen) < after < 0.7


def test_a_length_that_was_never_timed_moves_with_the_others() -> None:
    one = lines_of({WHOLE: 1.5}, {}, lengths=(1, 2), simulated=SIMULATED.__getitem__)
    assert one[1] == one[2] == Line(0.0, pytest.approx(1.5)), (
        "real steps take longer than simulated ones, at any length"
    )
    lines = lines_of({}, {WHOLE: Observed(1.0, 3.0)}, lengths=(1, 2), simulated=SIMULATED.__getitem__)
    assert lines == {1: Line(0.0, 3.0), 2: Line(0.0, 3.0)}
