"""Interrupted and resumed == undisturbed; same seed and same plans == same bits, dropout on; cache on == off."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from laws import (
    REPOSITORY,
    SHRINK_AND_GROW,
    STATIC,
    TWO_RANKS,
    Case,
    Weights,
    configuration,
    deviation,
    final_weights,
    reference,
    write_replay,
)
from ranks import RankPool

from pipetransformer.process.world import World
from pipetransformer.run.folder import with_resumption
from pipetransformer.trainer import Trainer


class _Stop(Exception):
    pass


def interrupted_run(
    world: World, case: Case, folder: str, extra: list[str], stop_after: int | None, resume: bool
) -> tuple[Weights | None, str | None]:
    """One launch of a job that ends by an exception after ``stop_after`` steps, or runs to its end."""
    replay = Path(folder) / f"replay_{world.rank}.jsonl"
    write_replay(replay, case.plans())
    overrides = [*case.overrides(""), *extra, f"run.replay={replay}", f"run.dir={folder}", "run.id=resumed"]
    config = configuration("vit", [*overrides, f"run.resume={str(resume).lower()}"])

    def probe(step: int, gradients: object) -> None:
        if step == stop_after:
            raise _Stop

    trainer = Trainer(config, world, probe=probe, timed=False)
    try:
        trainer.run()
    except _Stop:
        return None, None
    return final_weights(trainer), trainer.report.resumed_from


CASES = {
    "at an epoch's end, 2x1": (Case("vit", 2, STATIC[2], 2), ["checkpoint.every=1 epoch"], 12, "step-00000010"),
    "inside an epoch, after transitions": (
        *(Case("vit", 4, SHRINK_AND_GROW, 4, cached=True), ["checkpoint.every=3 steps"], 14),
        "step-00000012",
    ),
    "while the prefix waits": (
        Case("vit", 4, ((0, 0, 4), (4, 2, 2), (16, 1, 4)), 4, cached=True, prefixes=("replicated", "cached", "cached")),
        *(["checkpoint.every=3 steps"], 14, "step-00000012"),
    ),
    "behind a streamed prefix, then thawed": (
        Case("vit", 2, ((0, 3, 2), (14, 0, 2)), 2, cached=True, prefixes=("streamed", "replicated")),
        *(["checkpoint.every=3 steps"], 11, "step-00000010"),
    ),
    "with the prefix in its stages": (
        Case("vit", 2, ((0, 0, 2), (4, 4, 2)), 2, prefixes=("replicated", "in_place")),
        *(["checkpoint.every=3 steps"], 11, "step-00000010"),
    ),
    "with state shared out, and parked": (
        *(Case("vit", 4, SHRINK_AND_GROW, 4, cached=True, shard="optimizer"), ["checkpoint.every=3 steps"], 14),
        "step-00000012",
    ),
    "with all shared out": (
        *(Case("vit", 4, SHRINK_AND_GROW, 4, cached=True, shard="full"), ["checkpoint.every=3 steps"], 14),
        "step-00000012",
    ),
    "where blocks freeze at the checkpoint's own step": (
        Case(
            "vit", 2, ((0, 0, 2), (10, 3, 2), (16, 0, 2)), cached=True, prefixes=("replicated", "cached", "replicated")
        ),
        *(["checkpoint.every=1 epoch"], 11, "step-00000010"),
    ),
    "with the average of their weights": (
        Case("vit", 2, ((0, 0, 2), (4, 1, 1), (10, 3, 2), (16, 4, 1)), 2, averaged=True, shard="optimizer"),
        *(["checkpoint.every=1 epoch"], 11, "step-00000010"),
    ),
    "with that of weights cut otherwise": (
        Case("vit", 2, ((0, 0, 2), (4, 1, 1), (10, 0, 2), (16, 4, 1)), 2, cached=True, averaged=True, ema=0.7),
        *(["checkpoint.every=3 steps"], 13, "step-00000012"),
    ),
    "and weights would rest": (
        *(Case("vit", 2, ((0, 0, 2), (10, 3, 2), (16, 0, 2)), dtype="bfloat16"), ["checkpoint.every=1 epoch"], 11),
        "step-00000010",
    ),
    "with weights that rest": (
        Case("vit", 2, ((0, 4, 2), (12, 2, 2)), dtype="bfloat16", cached=True, prefixes=("cached", "streamed")),
        *(["checkpoint.every=1 epoch"], 11, "step-00000010"),
    ),
    "with adapters": (
        Case("vit", 2, ((0, 2, 2), (12, 3, 1)), lora=("blocks=4",)),
        *(["checkpoint.every=1 epoch"], 11, "step-00000010"),
    ),
    "with parked moments": (Case("vit", 2, TWO_RANKS, 2), ["checkpoint.every=7 steps"], 12, "step-00000010"),
}


@pytest.mark.parametrize("name", CASES)
def test_resumed_is_undisturbed(name: str, ranks: RankPool, tmp_path: Path) -> None:
    case, extra, stop_after, expected = CASES[name]
    weights, _ = reference(case, "")
    ranks.run(case.world_size, interrupted_run, case, str(tmp_path), extra, stop_after, False)
    answers = ranks.run(case.world_size, interrupted_run, case, str(tmp_path), extra, None, True)
    assert answers[0][1] == expected
    assert deviation(answers[0][0], {key: weights[key] for key in answers[0][0]}) < 1e-10


def test_halves_that_rest_may_be_blocks_after_a_resumption(ranks: RankPool, tmp_path: Path) -> None:
    """The number of units that no step has trained is another one then."""
    case = Case("vit", 2, ((0, 3, 1), (5, 2, 1), (12, 4, 1)), units="half", dtype="bfloat16")
    weights, _ = reference(case, "")
    every = "checkpoint.every=1 epoch"
    ranks.run(2, interrupted_run, case, str(tmp_path), [every, "pipe.units=half"], 11, False)
    blocks = replace(case, units="block")
    answers = ranks.run(2, interrupted_run, blocks, str(tmp_path), [every, "pipe.units=block"], None, True)
    assert answers[0][1] == "step-00000010" and deviation(answers[0][0], weights) < 1e-10


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("model.dtype=bfloat16", "model.dtype float32 and this one has bfloat16; give the same model"),
        ("freeze.averaged=true", "freeze.averaged False and this one has True; give freeze.averaged=false"),
        ("model.lora.r=4", r"model.lora None and this one has \{'r': 4"),
    ],
)
def test_other_weights_cannot_go_on(change: str, said: str, ranks: RankPool, tmp_path: Path) -> None:
    case = Case("vit", 2, STATIC[2])
    ranks.run(2, interrupted_run, case, str(tmp_path), ["checkpoint.every=1 epoch"], 7, False)
    with pytest.raises(AssertionError, match=said):
        ranks.run(2, interrupted_run, case, str(tmp_path), ["checkpoint.every=1 epoch", change], None, True)


@pytest.mark.parametrize(("first", "then"), [("none", "full"), ("full", "optimizer")])
def test_replicas_may_share_out_otherwise_after_a_resumption(
    first: str, then: str, ranks: RankPool, tmp_path: Path
) -> None:
    case = Case("vit", 4, ((0, 0, 2), (16, 2, 1)), 4, shard=first)
    weights, _ = reference(case, "")
    every = "checkpoint.every=3 steps"
    ranks.run(4, interrupted_run, case, str(tmp_path), [every, f"dp.shard={first}"], 11, False)
    answers = ranks.run(4, interrupted_run, case, str(tmp_path), [every, f"dp.shard={then}"], None, True)
    assert answers[0][1] == "step-00000010" and deviation(answers[0][0], weights) < 1e-10


def test_a_narrower_cache_is_filled_through_the_same_boundaries(ranks: RankPool, tmp_path: Path) -> None:
    """bfloat16 rounds at every boundary that an advance stops at: 0 -> 1 -> 3 is not 0 -> 3."""
    case = Case("vit", 2, ((0, 0, 1), (4, 1, 1), (8, 3, 1)), 1, cached=True)
    narrow = ["cache.dtype=bfloat16", "checkpoint.every=7 steps"]
    undisturbed = ranks.run(2, interrupted_run, case, str(folder_of(tmp_path, "a")), narrow, None, False)[0][0]
    folder = str(folder_of(tmp_path, "b"))
    ranks.run(2, interrupted_run, case, folder, narrow, 16, False)
    resumed = ranks.run(2, interrupted_run, case, folder, narrow, None, True)[0][0]
    assert deviation(resumed, undisturbed) < 1e-10
    exact = ranks.run(2, interrupted_run, case, str(folder_of(tmp_path, "c")), narrow[1:], None, False)[0][0]
    assert deviation(exact, undisturbed) > 1e-7, "bfloat16 rounded nothing"


def test_an_optimizer_without_state_resumes(ranks: RankPool, tmp_path: Path) -> None:
    """SGD without momentum keeps no tensors: there is nothing to park, to move or to save."""
    case, extra = Case("vit", 2, TWO_RANKS, 2, optimizer="sgd"), ["train.momentum=0", "checkpoint.every=7 steps"]
    undisturbed = ranks.run(2, interrupted_run, case, str(folder_of(tmp_path, "a")), extra, None, False)[0][0]
    folder = str(folder_of(tmp_path, "b"))
    ranks.run(2, interrupted_run, case, folder, extra, 12, False)
    resumed, resumed_from = ranks.run(2, interrupted_run, case, folder, extra, None, True)[0]
    assert resumed_from is not None
    assert deviation(resumed, undisturbed) < 1e-10


def folder_of(path: Path, name: str) -> Path:
    (path / name).mkdir()
    return path / name


def run_to_the_bit(world: World, case: Case, folder: str, replay: str | None, dropout: float) -> Weights | None:
    """A float32 run that decides live (``replay`` None) or repeats the events of one."""
    name = "live" if replay is None else "replayed"
    overrides = [
        *case.overrides(""),
        *(f"run.dir={folder}", f"run.id={name}", f"model.dropout={dropout}", "train.precision=float32"),
        *("freeze.policy=schedule", "freeze.every=5 steps", "freeze.alpha=0.4", "pipe.initial_length=2"),
        *([] if replay is None else [f"run.replay={replay}"]),
    ]
    trainer = Trainer(configuration("vit", overrides), world, timed=True)
    trainer.run()
    return final_weights(trainer)


def test_same_seed_and_same_plans_give_the_same_bits(ranks: RankPool, tmp_path: Path) -> None:
    case = Case("vit", 2, STATIC[2], 2)
    live = ranks.run(2, run_to_the_bit, case, str(tmp_path), None, 0.2)[0]
    events = tmp_path / "live" / "events.jsonl"
    plans = [json.loads(line) for line in events.read_text().splitlines() if '"plan"' in line]
    assert len({e["plan"]["frozen"] for e in plans if e["event"] == "plan"}) > 1, "the run never froze anything"
    replayed = ranks.run(2, run_to_the_bit, case, str(tmp_path), str(events), 0.2)[0]
    assert all(np.array_equal(live[name], replayed[name]) for name in live)
    other = ranks.run(2, run_to_the_bit, case, str(tmp_path / "none"), None, 0.0)[0]
    assert not np.array_equal(live["head.weight"], other["head.weight"]), "dropout changed nothing"


def test_cache_on_and_off_agree_to_the_bit_in_the_steps_shape(ranks: RankPool, tmp_path: Path) -> None:
    """All batches whole (128 = 4 x 32) and dp constant from the first freeze on."""
    moves = ((0, 0, 1), (4, 2, 1), (8, 4, 1))
    runs = []
    for cached in (True, False):
        case = Case("vit", 2, moves, 1, precision="float32", cached=cached)
        runs.append(ranks.run(2, whole_batches_run, case, str(tmp_path / str(cached)))[0])
    assert all(np.array_equal(runs[0][name], runs[1][name]) for name in runs[0])


def whole_batches_run(world: World, case: Case, folder: str) -> Weights | None:
    Path(folder).mkdir(exist_ok=True)
    replay = Path(folder) / f"replay_{world.rank}.jsonl"
    write_replay(replay, case.plans())
    overrides = [*case.overrides(""), f"run.replay={replay}", f"run.dir={folder}", "data.max_train_samples=128"]
    trainer = Trainer(configuration("vit", overrides), world, timed=False)
    trainer.run()
    return final_weights(trainer)


SPINNING = """
import resource, sys
import torch
from pipetransformer.launch.entry import main

def pauses():
    rows = torch.randn(512, 512)
    for _ in range(20):
        torch.nn.functional.gelu(rows)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
    for _ in range(300):
        torch.nn.functional.gelu(rows)
    return resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - before

torch.set_num_threads(2)
before = pauses()
exit_code = main("text_classification", sys.argv[1:])
print("pauses", before, pauses())
sys.exit(exit_code)
"""


@pytest.mark.full
def test_a_checkpoint_does_not_slow_down_a_process_that_computes_alone(tmp_path: Path) -> None:
    """Its threads go on spinning between operations instead of sleeping: steps once took 1.7 times as long."""
    places = (f"run.dir={tmp_path}", "run.id=x", "log.wandb=disabled")
    short = ("train.epochs=1", "data.max_train_samples=256", "data.max_eval_samples=64", "train.batch_size=64")
    command = [sys.executable, "-c", SPINNING, str(REPOSITORY / "config/train_config_demo_text.yaml"), *places, *short]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    ended = subprocess.run(command, check=True, cwd=REPOSITORY, capture_output=True, text=True, env=environment)
    before, after = map(int, ended.stdout.splitlines()[-1].removeprefix("pauses ").split())
    if before > 150:
        pytest.skip(f"threads sleep between operations here in any case ({before} pauses)")
    assert after < before + 150


def resumption(world: World, folder: str) -> tuple[object, object]:
    run = with_resumption(configuration("vit", (f"run.dir={folder}", "run.id=x", "run.resume=auto"))).run
    return run.resume, run.overwrite


def test_auto_continues_what_has_a_checkpoint_and_starts_what_has_none(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(2, resumption, str(tmp_path)) == [(False, False)] * 2
    (tmp_path / "x" / "checkpoints" / "step-00000004.part").mkdir(parents=True)
    assert ranks.run(2, resumption, str(tmp_path)) == [(False, True)] * 2, "what a start has left is overwritten"
    (tmp_path / "x" / "summary.json").touch()
    assert ranks.run(2, resumption, str(tmp_path)) == [(True, False)] * 2, "what has ended is over, not deleted"
    (tmp_path / "x" / "checkpoints" / "step-00000004").mkdir()
    assert ranks.run(2, resumption, str(tmp_path)) == [(True, False)] * 2
