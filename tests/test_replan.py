"""A job whose stages take other times than were measured before training moves its cut, and trains on exactly."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from unittest import mock

import pytest
from laws import NUM_BLOCKS, STATIC, Case, Weights, configuration, deviation, final_weights, reference
from ranks import RankPool

from pipetransformer.engine.step import PhaseSeconds
from pipetransformer.pipe.measure.profile_file import Profile
from pipetransformer.pipe.measure.workload import Workload
from pipetransformer.pipe.planner.costs import JobCosts, Link, UnitCosts
from pipetransformer.process.world import World
from pipetransformer.trainer import Trainer

CASE = Case("vit", 2, STATIC[2])
DECIDES_BUT_NEVER_FREEZES = ("freeze.policy=schedule", "freeze.alpha=0.5", "freeze.max_frozen=0")
SETTINGS = (*DECIDES_BUT_NEVER_FREEZES, "freeze.every=10 steps", "pipe.initial_length=2", "pipe.microbatches=2")


def even_costs(*_: object, workload: Workload, **__: object) -> Profile:
    """What is said to have been measured before training: eight units of a millisecond, whatever the rows."""
    columns = [(10**6,) * (NUM_BLOCKS + 2)] * (len(fields(UnitCosts)) - 2)
    by_rows = {rows: UnitCosts(rows, workload.modal_length, *columns) for rows in workload.rows}
    job = JobCosts(by_rows, columns[0], 3.0, 0.0, send=Link(0, 0.0), reduction=Link(0, 0.0), num_ranks=2)
    return Profile({}, job, {workload.modal_length: by_rows[workload.share]}, 1e9)


def run_with_slow_rank(world: World, folder: str, slow: float) -> Weights | None:
    """A live run whose second stage is said to take ``slow`` times as long as the first."""
    overrides = [*CASE.overrides(""), *SETTINGS, f"run.dir={folder}", "run.id=slow"]
    with mock.patch("pipetransformer.pipe.controller.measure_profile", even_costs):
        trainer = Trainer(configuration("vit", overrides), world)
        autopipe, spent = trainer.autopipe, trainer.autopipe.spent

        def told(_: PhaseSeconds) -> None:
            seconds = slow if world.rank == 1 else 1.0
            spent(PhaseSeconds(forward=seconds, backward=seconds))
            # The few steps of so small a model gain less than a transition takes.
            # So short a run times too few rounds to know that they agree.
            autopipe.layouts = replace(autopipe.layouts, fastest_move=0.0, rounds=(1.0, 1.0, 1.0))

        autopipe.spent = told  # type: ignore[method-assign]
        trainer.run()
    return final_weights(trainer)


@pytest.mark.parametrize(("slow", "moves"), [(3.0, [(10, "measured", [5])]), (1.0, [])])
def test_a_slow_stage_hands_over_units_in_a_running_job(
    slow: float, moves: list[tuple[int, str, list[int]]], ranks: RankPool, tmp_path: Path
) -> None:
    kept, _ = ranks.run(2, run_with_slow_rank, str(tmp_path), slow)
    lines = (tmp_path / "slow" / "events.jsonl").read_text().splitlines()
    start, *later = (event for event in map(json.loads, lines) if event["event"] == "plan")
    assert start["plan"]["boundaries"] == [4]
    assert [(event["step"], event["reason"], event["plan"]["boundaries"]) for event in later] == moves
    weights, _ = reference(CASE, "")
    assert kept is not None and deviation(kept, weights) < 1e-10
