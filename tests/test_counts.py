"""What a real run tells of itself, against figures counted by hand.

One job of two ranks, 20 steps on 150 pictures, freezes, thaws, caches, evaluates and saves, with unit costs that are
said to be measured. What it leaves is compared with counts of samples, bytes, units and steps.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from laws import (
    NUM_BLOCKS,
    TWO_RANKS,
    Case,
    Weights,
    configuration,
    deviation,
    final_weights,
    plain_loss,
    plain_run,
    write_replay,
)
from laws import make_plan as plan_of
from ranks import RankPool
from safetensors.numpy import load_file
from test_resume import interrupted_run

from pipetransformer.data import alone
from pipetransformer.pipe.measure.profile_file import Profile
from pipetransformer.pipe.measure.workload import Workload
from pipetransformer.pipe.planner.costs import JobCosts, Link, UnitCosts
from pipetransformer.plan import ParallelPlan
from pipetransformer.process.world import World
from pipetransformer.run import events
from pipetransformer.run.guards import Guards
from pipetransformer.run.job import Job, build_job
from pipetransformer.run.tracking import Tracker
from pipetransformer.trainer import Trainer

NUM_STEPS, NUM_TRAIN, NUM_EVAL, NUM_UNITS = 20, 150, 40, NUM_BLOCKS + 2


def plan(frozen: int, pp: int, *, cached: int | None = None, num_microbatches: int = 2) -> ParallelPlan:
    return plan_of(frozen, pp, world_size=2, num_microbatches=num_microbatches, schedule="1f1b", cached=cached)


PLANS = {
    0: plan(0, 2),
    1: plan(0, 2, num_microbatches=4),  # also a pause: the first step's figures are its own
    3: plan(2, 1, cached=2),
    7: plan(4, 1, cached=2),  # blocks 2 and 3 are computed in each step
    10: plan(1, 2, cached=1, num_microbatches=4),  # three blocks thaw
    14: plan(4, 1),
    17: plan(4, 1, cached=4),
}
CASE = Case("vit", 2, ((0, 0, 2),))
SETTINGS = (
    *("train.eval_every=5 steps", "checkpoint.every=3 steps", "checkpoint.keep=2", "log.every=2"),
    *("run.id=counted", "run.overwrite=true"),
)
ACCURACIES = (0.5, 0.9, 0.7, 0.6)
TOKEN_BYTES = 16 * 8  # width 16, float64
NUM_TOKENS = 17  # a picture of 8 x 8 in patches of 2 x 2, and the class token
MS = 10**6
MEMCPY = 1e9  # bytes a second


def said_costs(*_: object, workload: Workload, **__: object) -> Profile:
    """Unit u takes u + 1 ms forward for its rows, twice that backward, half of it when frozen."""
    forward = tuple((unit + 1) * MS for unit in range(NUM_UNITS))
    by_name = {field.name: (0,) * NUM_UNITS for field in fields(UnitCosts)}
    by_name |= {"forward_ns": forward, "backward_ns": tuple(2 * ns for ns in forward)}
    by_name |= {"prefix_ns": tuple(ns // 2 for ns in forward)}
    by_rows = {
        rows: UnitCosts(**{**by_name, "rows": rows, "length": workload.modal_length})  # type: ignore[arg-type]
        for rows in workload.rows
    }
    job = JobCosts(by_rows, (MS,) * NUM_UNITS, 3.0, 0.0, send=Link(0, 0.0), reduction=Link(0, 0.0), num_ranks=2)
    return Profile({}, job, {workload.modal_length: by_rows[workload.share]}, MEMCPY)


@dataclass
class Run:
    """What one rank has seen of the run.

    Attributes:
        steps: (step, number of samples of its global batch), by the batches of the job.
        t0, timed_samples, cost_rows: of the compute floor: seconds of the timed step, its samples, rows of the costs.
        unit_bytes, unit_parameters: parameters of every unit, in bytes and in number.
        train, decisions: seconds of training by epoch, and of all decisions.
        evaluated: weights at the second evaluation, on rank 0.
        metrics: what went to the dashboard, by step.
        measured: the metrics of the last evaluation, before others took the accuracy's place.
    """

    steps: list[int]
    t0: float
    timed_samples: int
    cost_rows: int
    unit_bytes: list[int]
    unit_parameters: list[int]
    train: list[float]
    decisions: float
    evaluated: Weights | None
    final: Weights | None
    metrics: list[tuple[int, Mapping[str, float]]]
    measured: Mapping[str, float]


def counted_run(world: World, folder: str) -> Run:
    replay = Path(folder) / f"replay_{world.rank}.jsonl"
    write_replay(replay, PLANS)
    config = configuration("vit", [*CASE.overrides(""), *SETTINGS, f"run.dir={folder}", f"run.replay={replay}"])
    found = Run([], 0.0, 0, 0, [], [], [0.0] * 4, 0.0, None, None, [], {})
    accuracies, real_evaluate, make_tracker = iter(ACCURACIES), Guards.evaluate, Tracker.__init__

    def evaluate(self: Guards, *, last_step: int) -> dict[str, float]:
        found.measured = real_evaluate(self, last_step=last_step)
        return {**found.measured, "accuracy": next(accuracies)}

    def note_metrics(self: Tracker, *arguments: Any, **named: Any) -> None:
        make_tracker(self, *arguments, **named)
        self.metrics = lambda metrics, *, step: found.metrics.append((step, dict(metrics)))

    def listen(event: events.Event) -> None:
        if isinstance(event, events.Trained):
            found.train[(trainer.step or 0) // 5] += event.seconds
        elif isinstance(event, events.DecisionEnds):
            found.decisions += event.seconds
            found.train[trainer.step // 5] += event.seconds
        elif isinstance(event, events.Advanced):
            found.train[trainer.step // 5] -= event.advance.evaluation_s
        elif isinstance(event, events.Evaluated) and event.step == 10:
            found.evaluated = copied(final_weights(trainer))

    with (
        mock.patch("pipetransformer.pipe.controller.measure_profile", said_costs),
        mock.patch.object(Guards, "evaluate", evaluate),
        mock.patch.object(Tracker, "__init__", note_metrics),
    ):
        trainer = Trainer(config, world, listeners=[listen])
        trainer.run()
    job, layouts = trainer.job, trainer.autopipe.layouts
    found.final = final_weights(trainer)
    found.steps = [len(batch.ids) for epoch in range(4) for batch in job.train_batches(epoch)]
    (found.t0,), found.timed_samples = layouts.floor_seconds.values(), layouts.timed_samples
    (costs,) = trainer.autopipe.profile.measured.values()
    found.cost_rows = costs.rows
    units = [job.chain.named_parameters([unit]) for unit in range(NUM_UNITS)]
    found.unit_bytes = [sum(8 * parameter.numel() for parameter in unit.values()) for unit in units]
    found.unit_parameters = [len(unit) for unit in units]
    return found


def copied(weights: Weights | None) -> Weights | None:
    """They are views of parameters, which train on."""
    return None if weights is None else {name: value.copy() for name, value in weights.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("counted")


@pytest.fixture(scope="module")
def run(ranks: RankPool, folder: Path) -> Run:
    return ranks.run(2, counted_run, str(folder))[0]


@pytest.fixture(scope="module")
def summary(run: Run, folder: Path) -> dict[str, Any]:
    return json.loads((folder / "counted" / "summary.json").read_text())


@pytest.fixture(scope="module")
def told(run: Run, folder: Path) -> list[dict[str, Any]]:
    """The event log."""
    return [json.loads(line) for line in (folder / "counted" / "events.jsonl").read_text().splitlines()]


def under(step: int) -> ParallelPlan:
    """The plan of the step that follows ``step`` steps."""
    return PLANS[max(start for start in PLANS if start <= step)]


def test_samples_and_steps(run: Run, summary: dict[str, Any]) -> None:
    assert summary["steps"] == NUM_STEPS and summary["epochs"] == 4 and summary["world_size"] == 2
    assert sorted(run.steps) == [22] * 4 + [32] * 16 and summary["global_batch_size"] == 32
    assert summary["setup_s"] + summary["train_s"] + summary["eval_s"] + summary["save_s"] <= summary["wall_s"]
    assert summary["save_s"] > 0, "there were checkpoints"
    assert len(summary["peak_memory_bytes"]) == 2 and min(summary["peak_memory_bytes"]) > sum(run.unit_bytes)


def test_hits_are_the_real_samples_of_cached_steps(run: Run, summary: dict[str, Any]) -> None:
    """22 samples of a short batch are filled up with copies, for two replicas of two micro-batches."""
    cached = [count for step, count in enumerate(run.steps) if under(step).cached is not None]
    assert 0 < len(cached) < NUM_STEPS and 22 in cached
    assert summary["cache"]["hits"] == sum(cached)
    assert summary["cache"]["misses"] == 0
    # Beside a picture's slot, there is room for the one row that the last block may leave.
    split_bytes = [samples * ((NUM_TOKENS + 1) * TOKEN_BYTES + 1) for samples in (NUM_TRAIN, NUM_EVAL)]
    assert summary["cache"]["bytes"] == {"device": 0, "host": sum(split_bytes), "disk": 0}


def test_seconds_add_up(run: Run, summary: dict[str, Any], told: list[dict[str, Any]]) -> None:
    stepping = sum(event["seconds"] for event in told if event["event"] == "steps")
    moving = sum(event["seconds"] for event in told if event["event"] == "transition")
    advancing = sum(event["seconds"] for event in told if event["event"] == "advance")
    filling = sum(event["evaluation_s"] for event in told if event["event"] == "advance")
    assert summary["cache_advance_s"] == pytest.approx(advancing) and filling > 0
    assert summary["transition_s"] == pytest.approx(run.decisions - advancing - filling)
    assert summary["transition_s"] >= moving
    assert summary["train_s"] == pytest.approx(sum(run.train))
    assert summary["train_s"] >= stepping + summary["transition_s"] + summary["cache_advance_s"]
    evaluating = sum(event["seconds"] for event in told if event["event"] == "evaluation")
    assert summary["eval_s"] == pytest.approx(evaluating + filling), "what is stored to evaluate on is evaluation"
    assert summary["samples_per_s"] == pytest.approx([NUM_TRAIN / seconds for seconds in run.train])


def test_the_compute_floor(run: Run, summary: dict[str, Any]) -> None:
    """Unit u is (u + 1) / 36 of forward and backward; a frozen one takes (u + 1) / 2 ms for the rows of the costs."""
    assert run.timed_samples == 32

    def prefix(first: int, stop: int, samples: int) -> float:
        return sum((unit + 1) / 2 * 1e-3 for unit in range(first, stop)) * samples / run.cost_rows / 2

    expected = 0.0
    for step, samples in enumerate(run.steps):
        frozen, cached = under(step).frozen, under(step).cached
        first_active = frozen + 1 if frozen else 0
        share = sum(unit + 1 for unit in range(first_active, NUM_UNITS)) / sum(range(1, NUM_UNITS + 1))
        expected += run.t0 * samples / 32 * share
        expected += prefix(0 if cached is None else cached + 1, first_active, samples)
        expected += 0.0 if cached is None else samples * NUM_TOKENS * TOKEN_BYTES / MEMCPY / 2
    # To block 2, after the thaw again from the pictures to 1, and from there to 4: training alone, as its seconds.
    for first, stop in ((0, 3), (0, 2), (2, 5)):
        expected += prefix(first, stop, NUM_TRAIN)
    assert summary["compute_floor_s"] == pytest.approx(expected)


def test_transitions(run: Run, summary: dict[str, Any]) -> None:
    """AdamW keeps two numbers for each of a parameter's, and one of 4 bytes for all of it."""

    def state(units: range) -> int:
        return sum(2 * run.unit_bytes[unit] + 4 * run.unit_parameters[unit] for unit in units)

    moved = {
        1: 0,
        3: sum(run.unit_bytes) + state(range(3, 8)),  # each rank gets the other stage; moments of what still trains
        7: 0,
        10: 0,  # weights are everywhere, and the moments of blocks 1 to 3 are where they were parked
        14: sum(run.unit_bytes[2:8]) + state(range(5, 8)),
        17: 0,
    }
    assert [(one["step"], one["bytes_moved"]) for one in summary["transitions"]] == list(moved.items())
    for one in summary["transitions"]:
        entered = PLANS[one["step"]]
        assert (one["frozen"], one["pp"], one["dp"]) == (entered.frozen, entered.pp, entered.dp)
        assert (one["microbatches"], tuple(one["boundaries"])) == (entered.num_microbatches, entered.boundaries)
        assert (one["epoch"], one["reason"]) == (one["step"] // 5, "replayed") and one["seconds"] > 0


def test_the_cache_advances(told: list[dict[str, Any]]) -> None:
    names = ("step", "boundary", "samples", "evaluation_samples")
    advances = [tuple(event[name] for name in names) for event in told if event["event"] == "advance"]
    assert advances == [(step, boundary, NUM_TRAIN, NUM_EVAL) for step, boundary in ((3, 2), (10, 1), (17, 4))]


def test_the_best_weights_are_those_of_the_best_evaluation(run: Run, summary: dict[str, Any], folder: Path) -> None:
    assert summary["best_metrics"]["accuracy"] == 0.9 and summary["metrics"]["accuracy"] == 0.6
    assert run.evaluated is not None and run.final is not None
    best, last = (load_file(folder / "counted" / "model" / name / "model.safetensors") for name in ("best", "final"))
    assert all(np.array_equal(best[name], run.evaluated[name]) for name in best)
    assert all(np.array_equal(last[name], run.final[name]) for name in last)
    assert not np.array_equal(best["head.weight"], last["head.weight"])


def test_two_checkpoints_are_kept(folder: Path, told: list[dict[str, Any]]) -> None:
    saved = [event["step"] for event in told if event["event"] == "checkpoint"]
    assert saved == [3, 5, 6, 9, 10, 12, 15, 18, 20]
    kept = sorted(path.name for path in (folder / "counted" / "checkpoints").iterdir())
    assert kept == ["step-00000018", "step-00000020"]


def test_figures_of_steps_and_the_dashboard(run: Run, told: list[dict[str, Any]]) -> None:
    """Steps are logged by twos, and where training pauses."""
    dashboard = {step: metrics for step, metrics in run.metrics if "Train/Loss" in metrics}
    moved = {event["step"]: event["seconds"] for event in told if event["event"] == "transition"}
    before = 0
    for event in (event for event in told if event["event"] == "steps"):
        step, seconds, phases = event["step"], event["seconds"], event["phase_seconds_by_rank"]
        ran, taken = under(before), sum(run.steps[before:step])
        assert event["num_steps"] == step - before
        assert event["samples_per_s"] * seconds == pytest.approx(taken)
        assert event["hits"] == (taken if ran.cached is not None else 0) and event["misses"] == 0
        assert 0 <= event["accuracy"] <= 1
        assert 0 < sum(column[0] for column in phases.values()) <= seconds, "the clock is that of rank 0"
        metrics = dashboard.pop(step)
        assert metrics["comm_frequency"] == pytest.approx((step - before) / seconds if ran.dp > 1 else 0.0)
        assert metrics["sample_throughput"] == pytest.approx(taken / seconds)
        assert metrics["backwards_time_per_batch"] == pytest.approx(max(phases["backward"]) / (step - before))
        assert metrics["forward_time_per_batch"] == pytest.approx(
            (max(phases["forward"]) + max(phases["prefix"])) / (step - before)
        )
        assert (metrics["pp"], metrics["dp"], metrics["frozen_blocks"]) == (ran.pp, ran.dp, ran.frozen)
        assert metrics["microbatches"] == ran.num_microbatches
        assert metrics["transition_seconds"] == moved.get(before, 0.0)
        assert metrics.get("cache_hit_rate") == (None if ran.cached is None else 1.0)
        assert (metrics["Train/Loss"], metrics["Train/Acc"]) == (event["loss"], event["accuracy"])
        before = step
    assert before == NUM_STEPS and not dashboard
    logged = {event["step"] for event in told if event["event"] == "steps"}
    assert logged == set(range(1, NUM_STEPS + 1)) - {11, 13, 19}, "those are neither even nor a pause"
    tested = {step: metrics["Test/Acc"] for step, metrics in run.metrics if "Test/Acc" in metrics}
    assert tested == dict(zip((5, 10, 15, 20), ACCURACIES))


def plain_job() -> Job:
    return build_job(configuration("vit", CASE.overrides("")), World(0, 1, 0, 1, torch.device("cpu")), lead=alone)


def test_the_first_loss_is_the_plain_model_s(told: list[dict[str, Any]]) -> None:
    job = plain_job()
    data, batch = job.datasets["train"], job.train_batches(0)[0]
    inputs = data.inputs(batch.ids, length=batch.length, epoch=0)
    loss = plain_loss(job.whole_model().train(), inputs, data.labels[batch.ids], 0.1, torch.float64)
    first = next(event for event in told if event["event"] == "steps")
    assert first["num_steps"] == 1
    assert first["loss"] == pytest.approx(float(loss.detach()), rel=1e-9)


def test_the_last_evaluation_is_the_plain_model_s(run: Run) -> None:
    """All 40 samples at once, which two ranks share out in batches."""
    job = plain_job()
    model, data = job.whole_model().eval(), job.datasets["eval"]
    assert run.final is not None
    model.load_state_dict({name: torch.from_numpy(value) for name, value in run.final.items()})
    with torch.no_grad():
        logits = model(data.inputs(np.arange(NUM_EVAL), length=int(data.lengths[0]), epoch=0)["pixel_values"].double())
    loss = torch.nn.functional.cross_entropy(logits, data.labels, label_smoothing=0.1)
    accuracy = (logits.argmax(dim=1) == data.labels).double().mean()
    assert run.measured["accuracy"] == pytest.approx(float(accuracy))
    assert run.measured["loss"] == pytest.approx(float(loss), rel=1e-9)


def test_every_event_of_the_run_is_told_once(told: list[dict[str, Any]]) -> None:
    counts = Counter(event["event"] for event in told)
    assert {name: counts[name] for name in counts if name != "steps"} == {
        **{"calibration": 1, "run": 1, "plan": len(PLANS), "transition": len(PLANS) - 1, "advance": 3},
        **{"evaluation": 4, "checkpoint": 9, "end": 1},
    }
    plans = {e["step"]: ParallelPlan.from_dict(e["plan"]) for e in told if e["event"] == "plan"}
    assert plans == PLANS


def augmented_run(ranks: RankPool, folder: Path, views: str, *own: str) -> tuple[float, dict[str, Any], list[str]]:
    """An interrupted run: deviation from the plain loop, the summary's cache, reasons for none."""
    case, extra = Case("vit", 2, TWO_RANKS, 2, cached=True), ["data.augment=basic", f"cache.views={views}", *own]
    kept, _ = ranks.run(2, interrupted_run, case, str(folder), extra, None, False)[0]
    frozen_at = tuple((step, frozen) for step, frozen, _ in TWO_RANKS)
    weights, _ = plain_run("vit", frozen_at, (*case.overrides(""), *extra))
    lines = (folder / "resumed" / "events.jsonl").read_text().splitlines()
    declined = [event["reason"] for event in map(json.loads, lines) if event["event"] == "cache_declined"]
    return deviation(kept, weights), json.loads((folder / "resumed" / "summary.json").read_text())["cache"], declined


def test_pictures_that_each_epoch_augments_anew_are_never_cached(ranks: RankPool, tmp_path: Path) -> None:
    off, cache, declined = augmented_run(ranks, tmp_path, "null")
    assert off < 1e-10
    assert declined == ["training inputs are augmented anew at each epoch; cache.views would cycle a few of them"]
    assert cache == {"hits": 0, "misses": 0, "bytes": {"device": 0, "host": 0, "disk": 0}}


@pytest.mark.parametrize("on_device", [0, 2_000, 10**7])
def test_views_are_cached_each_for_itself(ranks: RankPool, tmp_path: Path, on_device: int) -> None:
    """Three views over four epochs: the last epoch sees the first one's pictures. A device holds none, some or all."""
    off, cache, declined = augmented_run(ranks, tmp_path, "3", f"cache.device_budget={on_device or 'null'}")
    assert off < 1e-10 and not declined
    assert cache["hits"] > 0 and cache["misses"] == 0
    assert cache["bytes"]["device"] <= min(on_device, cache["bytes"]["host"])
    assert (cache["bytes"]["device"] > 0) == (on_device > 0)
