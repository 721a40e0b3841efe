"""``train.precision: auto``: what the device has and a timing confirms, alike on all ranks, and kept by a run."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from laws import STATIC, Case, configuration
from ranks import RankPool

from pipetransformer.process.collectives import led_by
from pipetransformer.process.world import World
from pipetransformer.run import precision
from pipetransformer.run.job import build_job
from pipetransformer.run.precision import with_past_choices
from pipetransformer.trainer import Trainer

AUTO = "train.precision=auto"
TINY = Case("vit", 1, STATIC[1])


def chosen(
    world: World, has: tuple[bool, ...], ratios: tuple[float, ...], overrides: tuple[str, ...] = ()
) -> tuple[str, str, bool]:
    """The precision that this rank's job has, the reason, and whether its chain computes in it."""
    config = configuration("vit", [*TINY.overrides(""), AUTO, *overrides])
    with (
        mock.patch.object(precision, "has_bfloat16", lambda device: has[world.rank]),
        mock.patch.object(precision, "_ratio", lambda *_, **__: max(ratios)),
    ):
        job = build_job(config, world, lead=partial(led_by, 0))
    assert job.config.train.precision == job.precision.name
    return job.precision.name, job.precision.reason, job.chain.autocasts


@pytest.mark.parametrize(
    ("has", "ratio", "name"),
    [
        ((True, True), 0.5, "bfloat16"),
        ((True, True), 0.95, "float32"),  # less gain is not worth other numbers
        ((True, False), 0.5, "float32"),
    ],
)
def test_all_ranks_take_what_the_slowest_device_has(
    ranks: RankPool, has: tuple[bool, ...], ratio: float, name: str
) -> None:
    (first, second) = ranks.run(2, chosen, has, (ratio, ratio))
    assert first == second and first[0] == name and first[2] == (name == "bfloat16")
    assert ("instructions" in first[1]) == (False in has)


def timed(world: World) -> tuple[float, bool, bool]:
    config = configuration("vit", [*TINY.overrides(""), "train.precision=float32"])
    job = build_job(config, world, lead=partial(led_by, 0))
    kept = {name: value.clone() for name, value in job.whole_model().state_dict().items()}
    state = torch.get_rng_state()
    ratio = precision._ratio(job.chain, job.datasets["train"], rows=8)
    same = all(torch.equal(value, kept[name]) for name, value in job.chain.model.state_dict().items())
    clean = all(parameter.grad is None for parameter in job.chain.model.parameters())
    return ratio, same and clean, torch.equal(torch.get_rng_state(), state)


def test_the_timing_leaves_no_trace(ranks: RankPool) -> None:
    (ratio, untouched, same_draws), _ = ranks.run(2, timed)
    assert ratio > 0 and untouched and same_draws


def past(world: World, folder: str, overrides: list[str]) -> tuple[str, object, object]:
    found: Any = with_past_choices(configuration("vit", [AUTO, f"run.dir={folder}", *overrides]))
    return found.train.precision, found.train.wide_attention, found.cache.views


def past_stem(world: World, *overrides: str) -> bool:
    found: Any = with_past_choices(configuration("vit", [*overrides]))
    return found.freeze.stem


@pytest.mark.parametrize("recorded", [True, False])
def test_a_replayed_run_keeps_its_stem(ranks: RankPool, tmp_path: Path, recorded: bool) -> None:
    plan = {"step": 0, "event": "plan", "plan": {"frozen": 0, "stem_frozen": recorded}}
    (tmp_path / "events.jsonl").write_text(f"{json.dumps({'event': 'run'})}\n{json.dumps(plan)}\n")
    given = f"freeze.stem={str(not recorded).lower()}"
    assert ranks.run(1, past_stem, f"run.replay={tmp_path}/events.jsonl", given) == [recorded]
    assert ranks.run(1, past_stem, given) == [not recorded]


def test_a_resumed_or_replayed_run_keeps_its_own(ranks: RankPool, tmp_path: Path) -> None:
    run = tmp_path / "before"
    run.mkdir()
    settings = ["train.precision=bfloat16", "train.wide_attention=65", "cache.views=5"]
    (run / "config.yaml").write_text(configuration("vit", settings).to_yaml())
    new = {"event": "run", "precision": "bfloat16", "wide_attention": 65, "views": 5}
    recorded = {"new.jsonl": new, "old.jsonl": {"event": "run"}}
    for name, event in recorded.items():
        (run / name).write_text(json.dumps(event) + "\n")

    def told(*overrides: str) -> tuple[str, object, object]:
        return ranks.run(1, past, str(tmp_path), list(overrides))[0]

    assert told("run.id=before", "run.resume=true") == ("bfloat16", 65, 5)
    kept, later = run / "config.yaml", ("views", "wide_attention")
    lines = kept.read_text().splitlines(keepends=True)
    kept.write_text("".join(line for line in lines if not any(key in line for key in later)))
    assert told("run.id=before", "run.resume=true") == ("bfloat16", 0, None), "of before there were these keys"
    assert told("run.id=after", "run.resume=true") == ("auto", "auto", "auto"), "there is nothing to resume"
    assert told(f"run.replay={run}/new.jsonl") == ("bfloat16", 65, 5)
    assert told(f"run.replay={run}/old.jsonl") == ("float32", 0, None), "a recording of before there was a choice"
    assert told("run.id=before", "run.resume=true", "train.precision=float64") == ("float64", 0, None)
    assert told(f"run.replay={run}/new.jsonl", "cache.views=2") == ("bfloat16", 65, 2)


def summary_of(world: World, folder: str, overrides: list[str]) -> dict[str, Any]:
    own = [*TINY.overrides(""), f"run.dir={folder}", "run.id=x", "run.overwrite=true", *overrides]
    Trainer(configuration("vit", own), world).run()
    found: dict[str, Any] = json.loads((Path(folder) / "x" / "summary.json").read_text())
    return found


def test_without_measuring_instructions_decide(ranks: RankPool) -> None:
    name, reason, autocasts = ranks.run(1, chosen, (True,), (1.0,), ("pipe.measure=false",))[0]
    assert (name, autocasts) == ("bfloat16", True) and "nothing is timed" in reason


@pytest.mark.parametrize("measures", [True, False])
def test_a_job_that_measures_nothing_trains_all_the_same(ranks: RankPool, tmp_path: Path, measures: bool) -> None:
    found = ranks.run(1, summary_of, str(tmp_path), [f"pipe.measure={str(measures).lower()}"])[0]
    assert found["steps"] > 0 and len(found["t0_start_s"]) == len(found["t0_end_s"])
    assert (len(found["t0_start_s"]) > 0) == measures and (found["compute_floor_s"] > 0) == measures
