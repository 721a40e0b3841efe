"""Runs that decide for themselves: measured plans, gradient norms, resume in between, and nothing that grows."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import psutil
import pytest
from laws import STATIC, Case, Weights, configuration, deviation, elastic_run, final_weights, reference, write_replay
from ranks import RankPool
from tiny import tiny_bert, tiny_sst2

from pipetransformer.cache import advance
from pipetransformer.models import held as weights_held
from pipetransformer.pipe.measure import profile
from pipetransformer.pipe.measure.units import profile_units
from pipetransformer.process.world import World
from pipetransformer.run import events
from pipetransformer.trainer import Trainer

PAPER = ["freeze.policy=paper", "freeze.every=4 steps", "freeze.alpha=0.4", "pipe.initial_length=2"]


PERCENTILE = ["freeze.policy=percentile", "freeze.percentile=60", "freeze.every=2 steps", "freeze.patience=1"]


class _Stop(Exception):
    pass


def live_run(
    world: World, folder: str, extra: list[str], stop_after: int | None, resume: bool
) -> tuple[Weights | None, list[tuple[int, int, list[float]]]]:
    """One launch that decides live: (weights on rank 0, what AutoFreeze decided: step, n, norms)."""
    decisions: list[tuple[int, int, list[float]]] = []

    def probe(step: int, gradients: object) -> None:
        if step == stop_after and trainer.report.folder.path.exists():
            raise _Stop

    case = Case("vit", world.size, STATIC[1])
    overrides = [*case.overrides(""), *extra, f"run.dir={folder}", "run.id=live", f"run.resume={str(resume).lower()}"]

    def note(event: events.Event) -> None:
        if isinstance(event, events.Decided):
            decision = event.decision
            decisions.append((decision.step, decision.frozen, [round(n, 9) for n in decision.norms or ()]))

    trainer = Trainer(configuration("vit", overrides), world, probe=probe, listeners=[note])
    try:
        trainer.run()
    except _Stop:
        return None, decisions
    return final_weights(trainer), decisions


@pytest.mark.parametrize("policy", [pytest.param(PAPER, marks=pytest.mark.full), PERCENTILE])
def test_norms_survive_calibration_and_resume(policy: list[str], ranks: RankPool, tmp_path: Path) -> None:
    """A run that is cut inside an interval decides on the same norms as one that is not."""
    whole = ranks.run(2, live_run, str(tmp_path / "whole"), policy, None, False)
    saving = [*policy, "checkpoint.every=3 steps"]
    before = ranks.run(2, live_run, str(tmp_path / "cut"), saving, 7, False)
    after = ranks.run(2, live_run, str(tmp_path / "cut"), saving, None, True)
    assert whole[0][1] == whole[1][1], "ranks decided differently"
    assert any(frozen > 0 for _, frozen, _ in whole[0][1]), "the run never froze anything"
    joined = {decision[0]: decision for decision in (*before[0][1], *after[0][1])}
    assert list(joined) == [step for step, _, _ in whole[0][1]]
    for step, frozen, norms in whole[0][1]:
        assert joined[step][1] == frozen
        assert joined[step][2] == pytest.approx(norms, rel=1e-6)
    assert deviation(after[0][0], whole[0][0]) < 1e-10


def measures_tables(world: World, folder: str) -> list[bool]:
    """Whether the tables of embeddings give rows alone while units are measured, a step is taken, and after the run."""
    gives_rows: list[bool] = []

    def look(*_: object) -> None:
        gives_rows.append(trainer.job.chain.model.get_submodule("bert.embeddings.word_embeddings").sparse)  # type: ignore

    def measured(*arguments: Any, **named: Any) -> Any:
        look()
        return profile_units(*arguments, **named)

    case = Case("bert", world.size, STATIC[1])
    overrides = [*case.overrides(folder), "freeze.policy=none", f"run.dir={folder}", "run.id=live", "train.epochs=1"]
    with mock.patch.object(weights_held, "_LARGE_TABLE", 0), mock.patch.object(profile, "profile_units", measured):
        trainer = Trainer(configuration("bert", overrides), world, probe=look)
        trainer.run()
    look()
    return gives_rows


def test_large_tables_are_measured_as_they_train(ranks: RankPool, tmp_path: Path) -> None:
    tiny_bert(tmp_path / "bert", layers=6)
    tiny_sst2(tmp_path / "sst2", 150, num_eval_samples=40)
    for first, *steps, last in ranks.run(2, measures_tables, str(tmp_path)):
        assert first and all(steps) and not last


@pytest.mark.parametrize("policy", [["freeze.policy=none"], PERCENTILE])
def test_a_stem_freezes_under_every_policy(policy: list[str], ranks: RankPool, tmp_path: Path) -> None:
    """The plain loop with the stem and the same blocks frozen ends with the same weights."""
    (weights, decisions), *_ = ranks.run(2, live_run, str(tmp_path), [*policy, "freeze.stem=true"], None, False)
    moves = {0: 0} | {step: frozen for step, frozen, _ in decisions}
    assert (max(moves.values()) > 0) == (policy is PERCENTILE)
    case = Case("vit", 2, tuple((step, frozen, 1) for step, frozen in moves.items()), stem=True)
    expected, _ = reference(case, "")
    assert weights is not None and deviation(weights, expected) < 1e-10


def test_a_block_that_was_never_stepped_can_unfreeze(ranks: RankPool, tmp_path: Path) -> None:
    """SGD with momentum beside blocks that have a momentum already."""
    case = Case("vit", 2, ((0, 3, 2), (6, 0, 1)), 2, optimizer="sgd", clip=None)
    weights, _ = reference(case, "")
    assert deviation(ranks.run(2, elastic_run, case, "", str(tmp_path))[0][0], weights) < 1e-10


@dataclass(frozen=True)
class Held:
    """What a rank holds. ``memory``: bytes that are its own, by the kernel's count."""

    threads: int
    descriptors: int
    processes: int
    memory: int


def holdings(world: World, folder: str, num_transitions: int) -> list[Held]:
    """What this rank holds after every transition of a run with many."""
    found: list[Held] = []
    entered: list[int] = []
    process = psutil.Process()

    def count(event: events.Event) -> None:
        if isinstance(event, events.DecisionEnds) and entered:
            entered.clear()
            descriptors, children = len(os.listdir("/proc/self/fd")), len(process.children())
            memory = process.memory_full_info().uss
            found.append(Held(threading.active_count(), descriptors, children, memory))
        elif isinstance(event, events.Moved):
            entered.append(event.step)

    moves = tuple((step, 2 if step else 0, (4, 2, 1, 2)[step % 4]) for step in range(num_transitions + 1))
    case = Case("vit", world.size, moves, 4, cached=True)
    replay = Path(folder) / f"replay_{world.rank}.jsonl"
    write_replay(replay, case.plans())
    length = f"train.epochs={num_transitions // 5 + 1}"
    overrides = [*case.overrides(""), length, f"run.replay={replay}", f"run.dir={folder}", "run.id=many"]
    Trainer(configuration("vit", overrides), world, timed=False, listeners=[count]).run()
    return found


def test_nothing_grows_with_the_number_of_transitions(ranks: RankPool, tmp_path: Path) -> None:
    for held in ranks.run(4, holdings, str(tmp_path), 30):
        assert len(held) == 30
        # After the first cycles of four layouts: no more threads, descriptors and processes, no more memory than noise.
        early, late = held[4:16], held[18:]
        for what, noise in (("threads", 0), ("descriptors", 0), ("processes", 0), ("memory", 2**21)):
            most = max(getattr(one, what) for one in early) + noise
            assert max(getattr(one, what) for one in late) <= most, (what, held)


def advanced_twice(world: World, folder: str) -> tuple[float, float]:
    """(largest difference, largest value) of a boundary stored in batches of 7 and of 50 rows."""
    overrides = [*Case("vit", 1, STATIC[1], precision="float32").overrides(""), f"run.dir={folder}", "run.id=a"]
    trainer = Trainer(configuration("vit", overrides), world, timed=False)
    trainer.job.whole_model()
    trainer.job.chain.freeze(3)
    assert not trainer.autocache.reserve()
    store = trainer.autocache.store("train")
    assert store is not None
    ids = np.arange(len(trainer.job.datasets["train"]))
    read = []
    for rows in (7, 50):
        advance(
            store,
            trainer.job.datasets["train"],
            trainer.job.chain,
            source=None,
            target=3,
            worker=0,
            num_workers=1,
            rows=rows,
        )
        read.append(store.read(ids, positions=int(store.layout.positions[0])).clone())
    trainer.autocache.close()
    return float((read[0] - read[1]).abs().max()), float(read[0].abs().max())


def test_the_cache_depends_on_its_batch_by_rounding_only(ranks: RankPool, tmp_path: Path) -> None:
    difference, largest = ranks.run(1, advanced_twice, str(tmp_path))[0]
    assert difference <= 1e-5 * largest


def memory_limit(world: World, folder: str) -> int | None:
    """The planner's limit where the ranks' devices differ by two bytes."""
    overrides = [*Case("vit", 2, STATIC[2]).overrides(""), f"run.dir={folder}", "run.id=a"]
    with mock.patch("pipetransformer.pipe.controller.device_memory", lambda device: 10**9 - 2 * world.rank):
        trainer = Trainer(configuration("vit", overrides), world, timed=False)
    return trainer.autopipe._planner.first.memory_limit


def test_all_ranks_plan_for_the_smallest_device(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(2, memory_limit, str(tmp_path)) == [10**9 - 2] * 2


def start_and_end(world: World, folder: str, precision: str) -> tuple[Weights, Weights] | None:
    """Weights before and after 20 steps of SGD, which moves as its gradients are."""
    overrides = [*Case("vit", 2, STATIC[2], optimizer="sgd", clip=None).overrides(""), "pipe.initial_length=2"]
    overrides += [f"train.precision={precision}", f"run.dir={folder}", f"run.id={precision}"]
    trainer = Trainer(configuration("vit", overrides), world)
    before = {name: value.numpy().copy() for name, value in trainer.job.whole_model().state_dict().items()}
    trainer.run()
    after = final_weights(trainer)
    return None if after is None else (before, after)


def test_bfloat16_moves_float32_weights_as_float32_does(ranks: RankPool, tmp_path: Path) -> None:
    """The 8 bits of a product are off by up to 0.4 %; gradients of another scale or sample by far more."""
    narrow, wide = (ranks.run(2, start_and_end, str(tmp_path), way)[0] for way in ("bfloat16", "float32"))
    assert {value.dtype for value in narrow[1].values()} == {np.dtype(np.float32)}
    moves = [np.concatenate([(end[name] - start[name]).ravel() for name in start]) for start, end in (narrow, wide)]
    difference, move = np.linalg.norm(moves[0] - moves[1]), np.linalg.norm(moves[1])
    assert np.isfinite(moves).all() and move > 0
    assert 1e-4 * move < difference < 0.02 * move, difference / move
