"""Weights that are frozen from the first step on rest in bfloat16: law 1, what a rank holds, and what a proof reads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from laws import (
    Case,
    configuration,
    deviation,
    elastic_run,
    gradient_deviation,
    make_plan,
    model_overrides,
    reference,
)
from ranks import RankPool
from safetensors.torch import load_file
from test_planner import random_job
from tiny import tiny_bert, tiny_sst2
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from pipetransformer.data import alone
from pipetransformer.engine import Engine
from pipetransformer.pipe.controller import AutoPipe
from pipetransformer.pipe.planner import memory
from pipetransformer.pipe.planner.search import predict
from pipetransformer.pipe.planner.transition_cost import transition_bytes
from pipetransformer.plan import ParallelPlan
from pipetransformer.process.world import World
from pipetransformer.run.job import Job, build_job
from pipetransformer.trainer import Trainer

ON_TWO = ((0, 4, 2), (5, 2, 1), (9, 5, 2), (14, 1, 2))  # (step, frozen blocks, pp): blocks thaw that never trained
ON_FOUR = ((0, 3, 4), (4, 4, 2), (8, 2, 1), (12, 4, 2), (16, 3, 4))
CASES = {
    "on two ranks": Case("bert", 2, ON_TWO),
    "cached": Case("bert", 4, ON_FOUR, 4, cached=True),
    "cached, on no device": Case("bert", 4, ON_FOUR, 4, cached=True, prefixes=("cached", "streamed") * 2 + ("cached",)),
    "in place": Case("bert", 4, ON_FOUR, 4, prefixes=("in_place",) * 5),
    "all shared out": Case("bert", 4, ON_FOUR, 4, shard="full"),
    "halves": Case("bert", 2, ON_TWO, units="half"),
    "pictures": Case("vit", 2, ON_TWO),
    "with adapters": Case("bert16", 2, ((0, 2, 2), (6, 4, 1)), lora=("blocks=4",)),
}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("texts")
    tiny_bert(folder / "bert", layers=6)
    tiny_sst2(folder / "sst2", 150, num_eval_samples=40)
    narrow = AutoModelForSequenceClassification.from_pretrained(folder / "bert").bfloat16()
    narrow.save_pretrained(folder / "bert16")
    AutoTokenizer.from_pretrained(folder / "bert").save_pretrained(folder / "bert16")
    return str(folder)


@pytest.mark.parametrize("name", CASES)
def test_elastic_is_plain(name: str, ranks: RankPool, texts: str, tmp_path: Path) -> None:
    case = replace(CASES[name], dtype="bfloat16")
    weights, gradients = reference(case, texts)
    answers = ranks.run(case.world_size, elastic_run, case, texts, str(tmp_path))
    assert gradient_deviation([g for _, g in answers], gradients) < 1e-10
    assert deviation(answers[0][0], {key: weights[key] for key in answers[0][0]}) < 1e-10


def test_the_weights_are_those_that_bfloat16_can_tell(texts: str) -> None:
    job = job_of("bert", texts, "model.dtype=bfloat16", "train.precision=float32")
    plain = dict(job_of("bert", texts, "train.precision=float32").whole_model().named_parameters())
    for name, parameter in job.whole_model().named_parameters():
        is_head = job.chain.unit_of(name) == job.chain.num_units - 1
        expected = plain[name] if is_head else plain[name].bfloat16().float()
        assert parameter.dtype == torch.float32 and torch.equal(parameter, expected), name


def job_of(model: str, data: str, *overrides: str) -> Job:
    alone_here = World(0, 1, 0, 1, torch.device("cpu"))
    return build_job(configuration(model, [*model_overrides(model, data), *overrides]), alone_here, lead=alone)


def test_what_never_trained_rests_and_what_did_does_not(ranks: RankPool, texts: str) -> None:
    assert ranks.run(1, types_by_plan, texts)[0] == [
        ["bfloat16"] * 5 + ["float32"] * 3,  # four frozen from the start, and the stem
        ["bfloat16"] * 3 + ["float32"] * 5,  # two of them thaw
        ["bfloat16"] * 3 + ["float32"] * 5,  # and freeze again, trained
    ]


def types_by_plan(world: World, data: str) -> list[list[str]]:
    """Types of the units' weights under plans with 4, 2 and 4 frozen blocks, a step taken under each."""
    overrides = ["model.dtype=bfloat16", "train.precision=float32"]
    config = configuration("bert", [*model_overrides("bert", data), *overrides])
    job = build_job(config, world, lead=alone)
    engine, found = Engine(job.chain, job.datasets, job.config, world), []
    for step, frozen in enumerate((4, 2, 4)):
        engine.enter(make_plan(frozen, 1, world_size=1, num_microbatches=1, schedule="1f1b"))
        for batch in engine.feed("train").batches(job.train_batches(0)[step : step + 1], epoch=0):
            engine.step(batch, step=step, lr=1e-3)
        of_unit = [{p.dtype for p in job.chain.named_parameters([unit]).values()} for unit in range(8)]
        found.append([str(dtype).removeprefix("torch.") for (dtype,) in of_unit])
    engine.close()
    return found


def test_what_rests_is_saved_in_the_type_of_the_others(ranks: RankPool, texts: str, tmp_path: Path) -> None:
    """A library would load all in the type that the configuration tells, that of the first weight."""
    ranks.run(2, saved_run, texts, str(tmp_path))
    folder = tmp_path / "rests" / "model" / "final"
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float32"
    assert {tensor.dtype for tensor in load_file(folder / "model.safetensors").values()} == {torch.float32}
    assert AutoModelForSequenceClassification.from_pretrained(folder).dtype == torch.float32


def saved_run(world: World, data: str, folder: str) -> None:
    settings = ["model.dtype=bfloat16", "freeze.policy=static", "freeze.max_frozen=4", "freeze.guard=false"]
    settings += ["train.precision=float32", "train.epochs=1", f"run.dir={folder}", "run.id=rests", "pipe.measure=false"]
    trainer = Trainer(configuration("bert", [*model_overrides("bert", data), *settings]), world)
    trainer.run()


def test_plans_know_what_has_trained_so_far() -> None:
    autopipe: Any = AutoPipe.__new__(AutoPipe)
    job = replace(random_job(Random(1), 8), resting_bytes=(1,) * 8)
    autopipe.profile, autopipe._chain = SimpleNamespace(job=job), SimpleNamespace(untouched=7)
    autopipe.layouts = SimpleNamespace(fastest_move=0.0, spread=None)
    autopipe._calendar, autopipe._full_steps = SimpleNamespace(total_steps=9, batches_per_epoch=1), lambda *_: 1.0
    autopipe.workload = SimpleNamespace(counts={1: 1})
    autopipe.lines = dict
    plan = make_plan(2, 1, world_size=1, num_microbatches=1, schedule="1f1b")
    assert autopipe._outlook(0, plan).costs.kept_bytes[:7] == (1,) * 7
    assert autopipe._outlook(4, plan).costs.kept_bytes == (1, 1, 1, *job.parameter_bytes[3:])


def test_a_forward_widens_one_unit() -> None:
    job = replace(random_job(Random(1), 8), parked_from=None)
    halved, unit = replace(job, resting_bytes=tuple(n // 2 for n in job.parameter_bytes)), job.unit_costs(4)
    stem = ParallelPlan(0, 1, 1, (), 1, "1f1b", None, 6, stem_frozen=True)
    more = memory.prefix_bytes(stem, unit, halved) - memory.prefix_bytes(stem, unit, job)
    assert more == job.parameter_bytes[0]
    streamed = ParallelPlan(1, 1, 1, (), 1, "1f1b", 1, 6, prefix="streamed")
    whole, small = (memory.advance_bytes(streamed, unit, costs, rows=4) for costs in (job, halved))
    weights = job.parameter_bytes[:2]
    assert whole - sum(weights) < small <= whole - sum(weights) // 2 + max(weights) + 1


def test_half_the_memory_is_planned_for_what_rests() -> None:
    job = replace(random_job(Random(1), 6), optimizer_factor=3.0, num_ranks=4, parked_from=None)
    halved = replace(job, resting_bytes=tuple(n // 2 for n in job.parameter_bytes))
    plan = ParallelPlan(2, 1, 4, (), 1, "1f1b", 2, 4)
    whole, small = (predict(plan, costs=costs, global_batch_size=32).memory_bytes[0] for costs in (job, halved))
    assert whole - small <= sum(job.parameter_bytes[:3]) - sum(halved.kept_bytes[:3]) and small < whole
    assert halved.frozen_bytes(3) == sum(n // 2 for n in job.parameter_bytes[:3])
    assert halved.trained_from(1).frozen_bytes(3) == job.parameter_bytes[0] // 2 + sum(job.parameter_bytes[1:3])
    moved = ParallelPlan(2, 2, 2, (5,), 2, "1f1b", None, 4, prefix="in_place")
    for costs in (job, halved):
        assert transition_bytes(moved, plan, costs=costs) >= max(costs.kept_bytes[:3])


def test_proofs_and_choices_read_no_weight(ranks: RankPool, texts: str) -> None:
    assert ranks.run(1, bytes_read_before_training, texts)[0] == 0


def bytes_read_before_training(world: World, data: str) -> int:
    overrides = ["train.precision=auto", "train.wide_attention=auto", "freeze.policy=none"]
    config = configuration("bert", [*model_overrides("bert", data), *overrides])
    return build_job(config, world, lead=alone).values.bytes_read
