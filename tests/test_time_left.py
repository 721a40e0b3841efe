"""The time that a run says it has left, beside the time that it takes; and the timeline of its real steps."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from time import perf_counter
from unittest import mock

import pytest
import torch
from laws import SHRINK_AND_GROW, Case, elastic_run
from ranks import RankPool

from pipetransformer.adapter import Span, StageTimes
from pipetransformer.config import load_config
from pipetransformer.config.calendar import Calendar
from pipetransformer.config.quantities import Interval
from pipetransformer.pipe.planner.answers import Ahead
from pipetransformer.plan import ParallelPlan
from pipetransformer.process.world import World
from pipetransformer.run import events
from pipetransformer.run.page import TIMELINE
from pipetransformer.run.time_left import Left, TimeLeft
from pipetransformer.run.timeline import Timeline
from pipetransformer.trainer import Trainer

PLAN = ParallelPlan(0, 1, 1, (), 1, "1f1b", None, 6)


# ---- of parts that are given -----------------------------------------------------------------------------------------


def clock(*changes: tuple[tuple[int, int], ...], seconds: dict[int, float]) -> TimeLeft:
    """Of 100 steps, evaluated after every 25; steps of so many seconds by the number of frozen blocks."""
    calendar = Calendar(50, 2, Interval(25, "step"), None)

    def ahead(frozen: int, *, step: int, **_: object) -> Ahead:
        return Ahead(step, seconds[frozen], 2.0, 8.0 if frozen else 16.0)

    autofreeze, autopipe = mock.Mock(), mock.Mock(ahead=ahead, seconds_behind_training=1.0)
    autofreeze.changes_from.return_value = changes or ((),)
    autofreeze.passes_from.return_value = 0
    return TimeLeft(calendar, autofreeze, autopipe, mock.Mock(), evaluated=0.5)


def left(found: Left | None) -> tuple[float, float]:
    assert found is not None
    return found.least, found.most


def test_it_counts_steps_changes_and_evaluations() -> None:
    of_run = clock(((40, 3),), seconds={0: 1.0, 3: 0.5})
    assert of_run(0) is None, "nothing is known before training"
    of_run.hear(events.TrainingStarts(PLAN, mock.Mock()))
    told = 40 * 1.0 + 60 * 0.5 + 2.0 + 1 * 8.0 + 3 * 4.0 + 1.0
    assert left(of_run(0)) == (told, told)
    assert left(of_run(30)) == (pytest.approx(told - 30 - 8.0),) * 2
    assert left(of_run(60)) == (pytest.approx(40 * 0.5 + 2 * 4.0 + 1.0),) * 2
    assert left(of_run(100)) == (1.0, 1.0)


def test_measured_steps_and_evaluations_take_the_place_of_predictions() -> None:
    of_run = clock(((40, 3),), seconds={0: 1.0, 3: 0.5})
    of_run.hear(events.TrainingStarts(PLAN, mock.Mock()))
    of_run.hear(events.Logged(10, PLAN, mock.Mock(num_steps=10, seconds=20.0)))  # twice as long as predicted
    of_run.hear(events.Evaluated(25, 0, {}, 3.0, None))
    told = 10 * 2.0 + 60 * 1.0 + 2 * 2.0 + 3 * 3.0 / 2 + 1.0
    assert left(of_run(30)) == (pytest.approx(told),) * 2
    of_run.hear(events.Moved(40, 0, PLAN, PLAN, mock.Mock(), "schedule"))
    of_run._autofreeze.changes_from.return_value = ((),)  # type: ignore[attr-defined]
    of_run.hear(events.DecisionEnds(0.1))
    assert left(of_run(50))[0] == pytest.approx(50 * 2.0 + 3 * 3.0 + 1.0 - 3.0), "what was learnt stays"


def test_where_freezing_is_not_known_it_is_a_range() -> None:
    of_run = clock(((20, 5),), (), seconds={0: 1.0, 5: 0.25})
    of_run.hear(events.TrainingStarts(PLAN, mock.Mock()))
    most, least = 100.0 + 4 * 8.0 + 1.0, 20 + 80 * 0.25 + 2.0 + 4 * 4.0 + 1.0
    assert left(of_run(0)) == (pytest.approx(0.95 * least), pytest.approx(1.05 * most))


def test_no_clock_and_no_picture_ends_a_job(tmp_path: Path) -> None:
    of_run = clock((), seconds={})
    of_run.hear(events.TrainingStarts(PLAN, mock.Mock()))  # the prediction fails
    assert of_run(0) is None
    drawn = Timeline(tmp_path / "gone", rank=0, local_size=1)
    with mock.patch("pipetransformer.run.timeline.values_of_ranks", lambda mine: [mine]):
        drawn.add(PLAN, StageTimes(spans=[Span("forward", 0.0, 1.0, 0, 0)]), step=3)
    assert not (tmp_path / "gone").exists()


def test_nodes_have_clocks_of_their_own(tmp_path: Path) -> None:
    plan = replace(PLAN, dp=2)
    times = [StageTimes(spans=[Span("forward", start, start + 0.5, 0, 0)]) for start in (5.0, 90_000.0)]
    with mock.patch("pipetransformer.run.timeline.values_of_ranks", lambda mine: [of.spans or [] for of in saved]):
        saved = [StageTimes(spans=list(of.spans or [])) for of in times]
        Timeline(tmp_path, rank=0, local_size=1).add(plan, times[0], step=3)
    told = json.loads((tmp_path / TIMELINE).read_text())["traceEvents"]
    assert [event["ts"] for event in told if event["ph"] == "X"] == [0.0, 0.0]


# ---- of real runs ----------------------------------------------------------------------------------------------------

TIMED = (
    *("data.image_size=32", "train.batch_size=32", "log.wandb=disabled", "log.report=false"),
    *("run.id=x", "run.overwrite=true", "train.precision=float32", "log.every=5"),
)


def timed_run(world: World, overrides: tuple[str, ...], folder: str) -> list[tuple[float, float, float]]:
    """(time left at the speed of the machine so far, least, most) at a tenth, a half and nine tenths of the steps.

    No run can foretell the speed of a shared machine. The same product of matrices after every step tells it.
    """
    config, found = load_config("digits", [*TIMED, f"run.dir={folder}", *overrides]), list[tuple[int, float, Left]]()
    factor, speeds, ended = torch.ones(512, 512), list[float](), 0.0

    def listen(event: events.Event) -> None:
        nonlocal ended
        total = trainer.calendar.total_steps
        if isinstance(event, events.Stepped):
            start = perf_counter()
            factor @ factor
            speeds.append(perf_counter() - start)
            if event.step in (total // 10, total // 2, 9 * total // 10):
                found.append((event.step, perf_counter(), trainer.time_left(event.step) or Left(0.0, 0.0, 0.0)))
        if isinstance(event, events.Finished):
            ended = perf_counter()

    trainer = Trainer(config, world, listeners=(listen,))
    trainer.run()
    slower = [fmean(speeds[step:]) / fmean(speeds[:step]) for step, *_ in found]
    return [((ended - at) / by, told.least, told.most) for by, (_, at, told) in zip(slower, found)]


@pytest.mark.full
@pytest.mark.parametrize(
    "policy",
    [
        ("freeze.policy=schedule", "freeze.max_frozen=4", "freeze.guard=false", "train.epochs=24"),
        (
            "freeze.policy=static",
            "freeze.max_frozen=4",
            "freeze.warmup=2 epochs",
            "freeze.guard=false",
            "train.epochs=16",
        ),
        ("freeze.policy=none", "train.epochs=6"),
    ],
)
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_time_left_is_within_a_fifth(
    policy: tuple[str, ...], world_size: int, ranks: RankPool, tmp_path: Path
) -> None:
    (told, *_) = ranks.run(world_size, timed_run, policy, str(tmp_path), timeout=600)
    assert len(told) == 3
    for true, least, most in told:
        assert least == most and abs(most - true) <= 0.2 * true, told


@pytest.mark.full
def test_under_guarded_it_is_a_range_with_the_truth_in_it(ranks: RankPool, tmp_path: Path) -> None:
    (told, *_) = ranks.run(2, timed_run, ("freeze.policy=guarded", "train.epochs=12"), str(tmp_path), timeout=600)
    for true, least, most in told:
        assert least <= true <= most, told


def test_the_timeline_has_a_real_step_of_each_plan(ranks: RankPool, tmp_path: Path) -> None:
    """Each rank's micro-batches, forward and backward, none beside another, in Perfetto's format."""
    case = Case("vit", 4, SHRINK_AND_GROW, num_microbatches=4)
    ranks.run(4, elastic_run, case, str(tmp_path), str(tmp_path))
    told = json.loads((tmp_path / "elastic" / TIMELINE).read_text())["traceEvents"]
    names = [event["args"]["name"] for event in told if event["name"] == "process_name"]
    assert [name.split(":")[0] for name in names] == ["step 3", "step 7", "step 9", "step 14", "step 19"]
    assert "pp 4 x dp 1" in names[0] and "4 of 6 frozen, pp 1 x dp 4" in names[2]
    first = [event for event in told if event["ph"] == "X" and event["pid"] == 1]
    assert {event["tid"] for event in first} == {0, 1, 2, 3}
    for rank in range(4):
        work = sorted((e["ts"], e["dur"], e["cat"]) for e in first if e["tid"] == rank and e["args"])
        assert [cat for *_, cat in work].count("forward") == [cat for *_, cat in work].count("backward") == 4
        assert all(start + length <= later + 1 for (start, length, _), (later, *_) in zip(work, work[1:]))
    last_stage = next(e for e in first if e["tid"] == 3 and e["name"] == "forward 0")
    first_stage = next(e for e in first if e["tid"] == 0 and e["name"] == "forward 0")
    assert last_stage["ts"] >= first_stage["ts"] + first_stage["dur"], "a micro-batch passes the stages in turn"
