"""Figures that benchmarks make of what they measured: a pipeline's ceiling, ranges of memory, one profile's ratios."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.memory.__main__ import paired, ranges
from benchmarks.pipeline.__main__ import ceiling
from benchmarks.predictor.__main__ import Rounds, one_profile
from pipetransformer.pipe.measure.profile_file import Profile
from pipetransformer.pipe.planner.step_simulator import StageCosts, simulate
from pipetransformer.plan import ParallelPlan
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


def test_one_profile_is_the_first_and_then_the_kept(tmp_path: Path) -> None:
    first = Profile({"hour": 1}, COSTS, dict(COSTS.by_rows), 1e9)
    later = replace(first, key={"hour": 2})
    assert one_profile(later, None) is later
    assert one_profile(first, tmp_path / "kept.json") == first
    assert one_profile(later, tmp_path / "kept.json") == first


def test_rounds_tell_the_ratio_of_one_profile_apart() -> None:
    plan = ParallelPlan(0, 2, 8, (7,), 4, "gpipe", None, 12)
    slower = replace(COSTS, by_rows={r: replace(u, forward_ns=u.backward_ns) for r, u in COSTS.by_rows.items()})
    rounds = Rounds(plan)
    rounds.add((COSTS, COSTS), slower, step=1.0, stages=[1.0, 1.0], global_batch_size=640)
    assert rounds.once_ratios[0] > rounds.step_ratios[0] == pytest.approx(rounds.predicted[0])
