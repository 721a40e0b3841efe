"""Measured costs are kept, and read again by a job that they belong to and by no other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from laws import REPOSITORY, STATIC, Case, configuration
from test_models import MODELS, wrapped

from pipetransformer.config import DataConfig, load_config
from pipetransformer.data import channels_of, describe, known_classes
from pipetransformer.data.glue import GLUE
from pipetransformer.pipe.measure import profile as measure
from pipetransformer.pipe.measure import units
from pipetransformer.pipe.measure.profile import costs_key, measure_profile
from pipetransformer.pipe.measure.profile_file import Profile
from pipetransformer.pipe.measure.units import Microbatch, profile_units
from pipetransformer.pipe.measure.workload import Workload
from pipetransformer.process.world import World
from pipetransformer.simulation.analytic import costs_of
from pipetransformer.simulation.schema import load_simulation

ALONE = World(0, 1, 0, 1, torch.device("cpu"))


@pytest.fixture
def measures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., bool]:
    """Whether a job measures anew: of these settings, so many samples a micro-batch and so many weights of the head."""
    monkeypatch.setenv("PIPETRANSFORMER_CACHE", str(tmp_path))
    job = costs_of(load_simulation(REPOSITORY / "config" / "simulation_1024.yaml"))
    measured: list[Mapping[str, object]] = []

    (of_any,) = job.by_rows.values()

    def fake(*_: object, key: Mapping[str, object], workload: Workload, **__: object) -> Profile:
        measured.append(key)
        mine = replace(job, by_rows=dict.fromkeys(workload.rows, of_any))
        return Profile(key, mine, dict.fromkeys(workload.lengths, of_any), 1e9)

    monkeypatch.setattr(measure, "_measure", fake)
    monkeypatch.setattr(measure, "_holds", lambda *_, **__: True)

    def measures_anew(*overrides: str, rows: int = 8, length: int = 16, head: int = 3) -> bool:
        before, nothing = len(measured), Any
        chain = SimpleNamespace(num_units=1, named_parameters=lambda units: {"head": torch.ones(head)})
        config = configuration("vit", [*Case("vit", 1, STATIC[1], precision="float32").overrides(""), *overrides])
        workload = Workload({length: 1}, length, (length,), rows, (rows,), {})  # type: ignore[arg-type]
        found = measure_profile(chain, nothing, workload=workload, config=config, world=ALONE)  # type: ignore[arg-type]
        assert set(found.job.by_rows) == {rows}
        return len(measured) > before

    assert measures_anew()
    return measures_anew


@pytest.mark.parametrize("override", ["train.lr=0.5", "train.epochs=9", "run.id=other", "pipe.memory_limit=1 GB"])
def test_costs_are_read_again(override: str, measures: Callable[..., bool]) -> None:
    assert not measures(override)


@pytest.mark.parametrize(
    "override",
    [
        "model.name=deit_tiny_patch16_224",
        "model.kwargs={depth: 3}",
        "model.dropout=0.1",
        "data.image_size=16",
        "train.precision=bfloat16",
        "train.optimizer=sgd",
        "pipe.recompute=always",
        "pipe.schedule=zero_bubble",
        "pipe.units=half",
    ],
)
def test_costs_of_another_job_are_not_read(override: str, measures: Callable[..., bool]) -> None:
    assert measures(override)
    assert not measures(override)
    assert not measures()


def test_costs_of_another_shape_are_not_read(measures: Callable[..., bool]) -> None:
    assert measures(rows=4)
    assert measures(length=32)


def test_costs_of_other_classes_are_not_read(measures: Callable[..., bool]) -> None:
    """Ten classes or a hundred, and those of one's own files, which only the model's head tells."""
    assert measures("data={name: cifar10}")
    assert measures("data={name: cifar100}")
    assert measures("data={name: image_folder, path: mine}")
    assert measures("data={name: image_folder, path: mine}", head=5)
    assert not measures("data={name: image_folder, path: mine}", head=5)


def test_every_dataset_has_its_classes_and_channels() -> None:
    """By its name, as ``describe`` reads them."""
    for name in ("digits", "demo_text", "demo_qa", "squad", *GLUE):
        data = DataConfig(name=name)  # type: ignore[arg-type]
        told = describe(data)
        assert (known_classes(data), channels_of(data)) == (len(told.label_names), told.channels), name


def test_a_question_answering_job_does_not_read_a_classifier_s_costs() -> None:
    texts, questions = (
        costs_key(load_config(REPOSITORY / "config" / f"train_config_demo_{name}.yaml")) for name in ("text", "qa")
    )
    assert texts["task"] != questions["task"] and texts["classes"] != questions["classes"]


@pytest.mark.parametrize("library", ["torch", "timm", "transformers"])
def test_costs_of_another_version_are_not_read(
    library: str, measures: Callable[..., bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    version = measure.version
    monkeypatch.setattr(measure, "version", lambda name: "0.0" if name == library else version(name))
    assert measures()


def test_costs_of_another_device_are_not_read(measures: Callable[..., bool], monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as other:
        other.setattr(measure, "device_name", lambda device: "another processor")
        assert measures()
    with monkeypatch.context() as other:
        other.setattr(torch, "get_num_threads", lambda: 64)
        assert measures()
    assert not measures()


def measured_in_parts(monkeypatch: pytest.MonkeyPatch, folder: Path, **missing: dict[int, object]) -> bool:
    """Whether a profile that lacks these is kept."""
    monkeypatch.setenv("PIPETRANSFORMER_CACHE", str(folder))
    job = costs_of(load_simulation(REPOSITORY / "config" / "simulation_1024.yaml"))
    (costs,) = job.by_rows.values()
    found = Profile({}, replace(job, by_rows={8: costs}), {16: costs, 24: costs}, 1e9)
    found = replace(found, **{k: v for k, v in missing.items() if k == "measured"})  # type: ignore[arg-type]
    monkeypatch.setattr(measure, "_measure", lambda *_, **__: found)
    chain = SimpleNamespace(num_units=1, named_parameters=lambda units: {"head": torch.ones(3)})
    config = configuration("vit", Case("vit", 1, STATIC[1], precision="float32").overrides(""))
    rows = (8, 4) if "by_rows" in missing else (8,)
    workload = Workload({16: 1}, 16, (16, 24), 8, rows, {})  # type: ignore[arg-type]
    measure_profile(chain, Any, workload=workload, config=config, world=ALONE, num_steps=1)  # type: ignore[arg-type]
    return any((folder / "profiles").glob("*.json"))


def test_a_profile_with_shapes_left_out_is_not_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The next job may have time for all of them."""
    monkeypatch.setattr(measure, "_holds", lambda *_, **__: True)
    job = costs_of(load_simulation(REPOSITORY / "config" / "simulation_1024.yaml"))
    (costs,) = job.by_rows.values()
    assert measured_in_parts(monkeypatch, tmp_path / "whole")
    assert not measured_in_parts(monkeypatch, tmp_path / "length", measured={16: costs})
    assert not measured_in_parts(monkeypatch, tmp_path / "rows", by_rows={})


@pytest.mark.parametrize(
    ("quiet", "times", "kept"), [((True,), 1, True), ((False, True), 2, True), ((False, False), 2, False)]
)
def test_a_profile_that_was_taken_under_load_is_retaken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quiet: tuple[bool, ...], times: int, kept: bool
) -> None:
    """Once; if the load stays, the profile is used and not kept."""
    answers = iter(quiet)
    taken: list[bool] = []
    monkeypatch.setattr(measure, "_holds", lambda *_, **__: taken.append(next(answers)) or taken[-1])
    assert measured_in_parts(monkeypatch, tmp_path) == kept
    assert len(taken) == times


@pytest.mark.parametrize(("now", "holds"), [(1.0, True), (1.25, True), (1.4, False), (0.7, False)])
def test_a_kept_profile_holds_as_long_as_a_forward_takes_as_long(
    monkeypatch: pytest.MonkeyPatch, now: float, holds: bool
) -> None:
    """Other work on the machine may have been measured with it, then or now."""
    job = costs_of(load_simulation(REPOSITORY / "config" / "simulation_1024.yaml"))
    (costs,) = job.by_rows.values()
    kept = Profile({}, job, {16: costs}, 1e9)
    seconds = costs.prefix_seconds(0, len(job.parameter_bytes), num_samples=8)
    monkeypatch.setattr(measure, "microbatch_of", lambda *_, **__: None)
    monkeypatch.setattr(measure, "prefix_seconds", lambda *_: now * seconds)
    monkeypatch.setattr(measure, "total", lambda mine: mine)
    chain: Any = SimpleNamespace(num_units=len(job.parameter_bytes))
    workload: Any = SimpleNamespace(modal_length=16, examples={16: None}, share=8)
    assert measure._holds(kept, chain, Any, workload=workload, world=ALONE) == holds  # type: ignore[arg-type]


@given(num_units=st.integers(3, 100), size=st.integers(1, 120))
def test_ranks_share_the_units(num_units: int, size: int) -> None:
    chain: Any = SimpleNamespace(num_units=num_units)
    shares = [measure.share_of_units(chain, World(rank, size, 0, 1, torch.device("cpu"))) for rank in range(size)]
    assert [unit for share in shares for unit in share] == [*range(num_units)]
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize(
    ("budget", "shapes", "rounds"),
    [(0.0, 2, 1), (1.9, 2, 1), (2.1, 2, 2), (3.1, 2, 2), (3.6, 3, 2), (float("inf"), 3, 2)],
)
def test_units_are_timed_as_far_as_the_budget_goes(
    monkeypatch: pytest.MonkeyPatch, budget: float, shapes: int, rounds: int
) -> None:
    """All ranks say that whatever they did took a second: so a shape of 4, 2 and 1 rows is said to take 2, 1 and a
    half, and a second round of all another second; a third would take too long in any case. The first two shapes are
    timed whatever they take, and a round of each before counts for nothing."""
    chain, inputs = wrapped(MODELS["vit"])
    chain.train()
    batches = [Microbatch(inputs["pixel_values"][:1].repeat(rows, 1, 1, 1), {}, 16) for rows in (4, 2, 1)]
    timed: list[int] = []
    time_one = units._Shape.time

    def time(shape: units._Shape) -> None:
        time_one(shape)
        if shape.size not in timed:  # the first time, memory is touched that no one has touched before
            shape._times["backward"][0][-1] += 10**12
        timed.append(shape.size)

    monkeypatch.setattr(units._Shape, "time", time)
    monkeypatch.setattr(units, "_LONG_SECONDS", 0.3)
    found = profile_units(
        chain, batches, units=range(chain.num_units), budget_seconds=budget, agree=lambda seconds: 1.0
    )
    assert [costs.rows for costs in found] == [4, 2, 1][:shapes]
    assert len(timed) == shapes * (1 + rounds)
    assert all(max(costs.backward_ns) < 10**11 for costs in found)
