"""Figures that benchmarks make of what they measured: a pipeline's ceiling, ranges of memory, one profile's ratios."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.memory.__main__ import paired, ranges
from benchmarks.pipeline.__main__ import ceiling
from benchmarks.predictor.__main__ import Rounds, earlier_profile, summary
from benchmarks.predictor.live import PlanTimes
from pipetransformer.pipe.measure.profile_file import Profile
from pipetransformer.pipe.planner.step_simulator import StageCosts, simulate
from pipetransformer.plan import ParallelPlan
from pipetransformer.run import events
from pipetransformer.simulation.analytic import costs_of
from pipetransformer.simulation.schema import load_simulation

REPOSITORY = Path(__file__).resolve().parent.parent
COSTS = costs_of(load_simulation(REPOSITORY / "config" / "simulation_paper_cifar100.yaml"))


@pytest.mark.parametrize("m", [2, 4, 8])
def test_the_ceiling_is_the_simulators_step_where_lonely_ranks_are_faster(m: int) -> None:
    """Halves of 10 and 20 a micro-batch while both compute, and twice as fast alone."""
    step = simulate(
        "1f1b", [StageCosts(10, 20)] * 2, num_ranks=2, num_microbatches=m, contention=(0.5, 1.0)
    )  # fmt: skip
    assert ceiling(both=30.0 * m, apart=2 * 15.0 * m, m=m) == pytest.approx(step.compute)
    assert ceiling(30.0 * m, 60.0 * m, m) == 30.0 * (m + 1), "where none slows the other: M / (M + 1)"


def cell(**fields: object) -> Mapping[str, object]:
    known = {"model": "vit", "optimizer": "sgd", "checkpoint": "never", "rank": 0, "pp": 2, "n": 0, "M": 4}
    return {**known, "predicted / real": 1.0, **fields}


def test_ranges_are_of_all_cells() -> None:
    rows = [
        cell(schedule=schedule, n=n, **{"real MB": megabytes, "predicted / real": ratio})
        for n, megabytes_of in ((0, (100.0, 56.0)), (3, (50.0, 30.0)))
        for schedule, megabytes, ratio in zip(("gpipe", "1f1b"), megabytes_of, (0.9 + n / 10, 1.0))
    ]
    assert paired(rows, "schedule", "1f1b", "gpipe") == [0.56, 0.6]
    rows += [
        cell(schedule="gpipe", M=8, checkpoint=mode, rank=rank, **{"real MB": megabytes})
        for rank, both in ((0, (80.0, 20.0)), (1, (80.0, 28.0)))
        for mode, megabytes in zip(("never", "always"), both)
    ]
    by_schedule, stage_0, recomputed = ranges(rows)  # type: ignore[arg-type]
    assert "gpipe 0.900 .. 1.200" in by_schedule and "1f1b 1.000 .. 1.000" in by_schedule
    assert "0.560 .. 0.600" in stage_0 and "0.250 .. 0.350" in recomputed


def test_one_profile_is_of_an_earlier_run(tmp_path: Path) -> None:
    first = Profile({"hour": 1}, COSTS, dict(COSTS.by_rows), 1e9)
    later, kept = replace(first, key={"hour": 2}), tmp_path / "kept.json"
    assert earlier_profile(first, kept) is None, "what it measured itself is of no other hour"
    os.utime(kept, (kept.stat().st_mtime - 7200,) * 2)
    found = earlier_profile(later, kept)
    assert found is not None and found.profile == first and found.age_hours == pytest.approx(2, abs=0.1)


def test_ranges_of_predictions_are_over_all_rows() -> None:
    rows: list[dict[str, Any]] = [
        {"step_ratios": [0.9, 1.0, 1.3], "stage_ratios": [[1.0, 1.1, 1.2], [0.8, 0.9, 1.0]]},
        {"step_ratios": [1.1, 1.05, 1.0], "stage_ratios": [[1.0, 1.0, 1.0]] * 2},
    ]
    rows = [{**row, "step_ratios_of_one_profile": None} for row in rows]
    steps, stages = summary(rows)
    assert "steps: medians 1.000 .. 1.050, single rounds 0.900 .. 1.300" in steps
    assert "stages: medians 0.900 .. 1.100, single rounds 0.800 .. 1.200" in stages
    rows[1]["step_ratios_of_one_profile"] = [1.4, 1.5, 1.6]
    assert "by the costs of one profile: medians 1.500 .. 1.500, single rounds 1.400 .. 1.600" in summary(rows)[-1]


def test_rounds_tell_the_ratio_of_one_profile_apart() -> None:
    plan = ParallelPlan(0, 2, 8, (7,), 4, "gpipe", None, 12)
    slower = replace(COSTS, by_rows={r: replace(u, forward_ns=u.backward_ns) for r, u in COSTS.by_rows.items()})
    rounds = Rounds(plan)
    rounds.add((COSTS, COSTS), slower, step=1.0, stages=[1.0, 1.0], global_batch_size=640)
    assert rounds.once_ratios[0] > rounds.step_ratios[0] == pytest.approx(rounds.predicted[0])


def test_a_live_plan_s_steps_stand_beside_what_was_predicted_for_them() -> None:
    """Waits between plans count for none, a long evaluation for nothing, few steps are left out."""
    first = ParallelPlan(0, 1, 2, (), 1, "1f1b", None, 4)
    second, short = replace(first, frozen=1), replace(first, frozen=3)
    taken = ((first, 1.0, [2.0] * 12), (second, 3.0, [2.0] * 11 + [99.0]), (short, 1.0, [1.0] * 3))
    now = 0.0
    times = PlanTimes(lambda: now)
    for plan, predicted, steps in taken:
        now += 1000.0
        choice: Any = SimpleNamespace(prediction=SimpleNamespace(step_seconds=predicted))
        times.hear(events.Adopted(0, plan, "", choice))
        for seconds in steps:
            now += seconds
            times.hear(events.Stepped(0, 0, plan, Any, 0))  # type: ignore[arg-type]
    assert times.ratios() == {first: 0.5, second: 1.5}
