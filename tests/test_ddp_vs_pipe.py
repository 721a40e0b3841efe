"""DDP beside Pipe+DDP: the search of the largest batch, methods that train alike, and the benchmark at its smallest."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import sleep
from unittest import mock

import numpy as np
import pytest
import torch.distributed as dist
from laws import REPOSITORY
from ranks import RankPool

sys.path.insert(0, str(REPOSITORY))

import benchmarks.ddp_vs_pipe.__main__ as ddp_vs_pipe
from benchmarks.ddp_vs_pipe.fresh_ranks import FreshRanks, OutOfMemory
from benchmarks.ddp_vs_pipe.largest import largest_batch
from benchmarks.ddp_vs_pipe.report import DDP, Line, speed_table
from benchmarks.ddp_vs_pipe.scales import CONFIG, Shape
from benchmarks.ddp_vs_pipe.speed import chunks_of, step_of
from benchmarks.ddp_vs_pipe.state import even_plan
from benchmarks.ddp_vs_pipe.trials import (
    Probe,
    RankJob,
    State,
    Steps,
    Trial,
    hold_state,
    probe_frozen,
    time_in_turn,
    time_steps,
)
from pipetransformer.config import load_config
from pipetransformer.errors import UserError
from pipetransformer.launch.entry import run_guarded
from pipetransformer.plan import ParallelPlan
from pipetransformer.process.world import World

NUM_BLOCKS = 2
TINY = Trial(
    load_config(
        CONFIG,
        ["model.kwargs={patch_size: 4, embed_dim: 16, depth: 2, num_heads: 2}", "data.max_train_samples=64"],
    ),
    ParallelPlan(0, 1, 2, (), 1, "1f1b", None, NUM_BLOCKS),
    ddp_bucket_mb=None,
    batch=8,
    steps=1,
)
CUT = replace(TINY, plan=replace(TINY.plan, num_microbatches=4))
TRIALS = {
    "DDP": replace(TINY, ddp_bucket_mb=1),
    "DDP, M 4": replace(CUT, ddp_bucket_mb=1),
    "our plan": TINY,
    "our plan, M 4": CUT,
    "pipeline": replace(TINY, plan=ParallelPlan(0, 2, 1, (2,), 4, "1f1b", None, NUM_BLOCKS)),
}


# ---- the largest batch -----------------------------------------------------------------------------------------------


# Bytes of a batch: straight, with something that is there without a batch, bent, in stairs, and where a device tells
# nothing but that it ran out.
MEMORY: dict[str, Callable[[int], int | None]] = {
    "straight": lambda batch: 10 * batch,
    "with weights": lambda batch: 500 + 3 * batch,
    "bent": lambda batch: batch * batch,
    "stairs": lambda batch: 100 * (batch // 50),
    "a device": lambda batch: 10 * batch if batch <= 300 else None,
}


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("step", [1, 4, 24])
def test_the_largest_batch_is_found_whatever_it_is(step: int, memory: str) -> None:
    bytes_of, most = MEMORY[memory], 40 * step
    for fitting in range(0, most + 2 * step, max(1, step // 4)):
        limit, tried = 9999 if memory == "a device" else bytes_of(fitting), list[int]()
        assert limit is not None

        def peak(batch: int, tried: list[int] = tried) -> int | None:
            tried.append(batch)
            return bytes_of(batch)

        taken = {batch: bytes_of(batch) for batch in range(step, most + 1, step)}
        fits = [batch for batch, found in taken.items() if found is not None and found <= limit]
        best, too_large = largest_batch(peak, limit=limit, step=step, most=most)
        assert best == max(fits, default=0)
        assert too_large == (None if best == most else best + step), "the next step is known not to fit"
        assert len(tried) == len(set(tried)) <= 12, "no batch is tried twice"
        assert max(tried) <= max(step, min(4 * best, most)), "no try is more than four times what fits"


def test_the_line_of_memory_needs_few_tries() -> None:
    tried: list[int] = []

    def peak(batch: int) -> int:
        tried.append(batch)
        return 12_000_000 + 150_000 * batch

    assert largest_batch(peak, limit=80_000_000, step=8, most=4096) == (448, 456)
    assert len(tried) <= 6


def test_no_batch_above_the_most_is_tried() -> None:
    tried: list[int] = []
    assert largest_batch(lambda batch: tried.append(batch) or 1, limit=1, step=8, most=30) == (24, None)  # type: ignore[func-returns-value]
    assert max(tried) == 24


def test_every_replica_has_whole_micro_batches() -> None:
    """The original's M at its own lengths; plain data parallelism cuts each rank's share into as many."""
    for length, m in ((3, 4), (4, 8)):
        shape = Shape(length, nodes=2)
        assert chunks_of(shape, None) == (m,)
        for replicas in (shape.nodes, shape.world_size):
            assert step_of(shape, m) % (replicas * m) == 0 == step_of(shape, m) % shape.world_size


# ---- one measurement -------------------------------------------------------------------------------------------------


def gradients(world: World, trial: Trial) -> dict[str, np.ndarray]:
    """Of what this rank trains, after one step."""
    own = RankJob(world, trial)
    step = own.plan_step() if trial.ddp_bucket_mb is None else own.ddp_step(bucket_mb=trial.ddp_bucket_mb)
    step(next(own.feed().batches([own.batch], epoch=0)))
    return {name: p.grad.numpy() for name, p in own.job.chain.model.named_parameters() if p.grad is not None}


def test_all_methods_have_the_same_gradients(ranks: RankPool) -> None:
    """So that what is compared is the same training: the mean over the global batch, in float32."""
    found = {name: ranks.run(2, gradients, trial) for name, trial in TRIALS.items()}
    stages = found["pipeline"]
    assert not set(stages[0]) & set(stages[1]), "each rank of the pipeline trains its own stage"
    expected = found["our plan"][0]
    assert expected.keys() == {**stages[0], **stages[1]}.keys()
    assert all(rank.keys() == expected.keys() for name, own in found.items() if name != "pipeline" for rank in own)
    largest = max(float(np.abs(gradient).max()) for gradient in expected.values())
    for name, gradient in expected.items():
        replicas = [of_rank[name] for method, own in found.items() if method != "pipeline" for of_rank in own]
        for other in (*replicas, {**stages[0], **stages[1]}[name]):
            # Sums of 8 samples in another order; a wrong scale would be off by a half.
            assert np.abs(other - gradient).max() < 1e-5 * largest, name


PEAK_BYTES = 10**12


def time_at_a_peak(world: World, trial: Trial) -> Steps:
    """Note: of so small a step, a process that has served other tests takes no page more."""
    with mock.patch("benchmarks.ddp_vs_pipe.trials.peak_memory_bytes", lambda device: PEAK_BYTES):
        return time_steps(world, trial)


@pytest.mark.parametrize("name", TRIALS)
def test_a_measurement_has_seconds_and_memory(ranks: RankPool, name: str) -> None:
    first, second = ranks.run(2, time_at_a_peak, TRIALS[name])
    assert first.seconds == second.seconds > 0, "the slowest rank's"
    for own in (first, second):
        assert 0 < own.peak_bytes < PEAK_BYTES, "less what was there before"


@pytest.mark.parametrize("cached", [None, NUM_BLOCKS], ids=["computed", "cached"])
def test_all_frozen_reduces_the_gradient_of_the_head_alone(ranks: RankPool, cached: int | None) -> None:
    frozen = replace(TINY.plan, frozen=NUM_BLOCKS, cached=cached)
    probes: list[Probe] = ranks.run(2, probe_frozen, replace(TINY, plan=frozen))
    assert {probe.sent_bytes for probe in probes} == {4 * (2 * 16 + 16 * 10 + 10)}, "a norm of 16 and 10 classes"
    for probe in probes:
        assert probe.data + probe.forward + probe.backward > 0 and probe.backward < probe.seconds


@pytest.mark.full
def test_rows_take_turns_in_one_job(ranks: RankPool) -> None:
    first, second = ranks.run(2, time_in_turn, tuple(TRIALS.values()))
    assert len(first) == len(TRIALS) and first == second and min(first) > 0


def test_a_pipeline_halves_what_a_rank_trains_and_sums_nothing_alone(ranks: RankPool) -> None:
    whole: list[State] = ranks.run(2, hold_state, TINY)
    stages: list[State] = ranks.run(2, hold_state, TRIALS["pipeline"])
    assert sum(state.num_parameters for state in stages) == whole[0].num_parameters == whole[1].num_parameters
    assert [state.sent_bytes for state in whole] == [4 * state.num_parameters for state in whole]
    assert [state.sent_bytes for state in stages] == [0, 0]


@pytest.mark.parametrize(("pp", "cuts"), [(1, ()), (2, (5,)), (4, (3, 5, 7))])
def test_even_plans_have_as_many_blocks_on_every_rank(pp: int, cuts: tuple[int, ...]) -> None:
    assert even_plan(pp, num_microbatches=4, num_blocks=8).boundaries == cuts


def one_fails(world: World, way: str) -> None:
    """Rank 1, while the other one waits for it."""
    if world.rank == 1:
        if way == "out of memory":
            raise MemoryError
        if way == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if way == "mistake":
            raise UserError("data.path: nothing is there; give another")
        if way == "bug":
            raise ZeroDivisionError("of this rank")
        sleep(60)
    dist.barrier()


def doubled(world: World, trial: Trial) -> tuple[int, Trial]:
    return world.rank, replace(trial, batch=2 * trial.batch)


@pytest.mark.parametrize(
    ("way", "error", "told"),
    [
        pytest.param(*("out of memory", OutOfMemory, None), marks=pytest.mark.full),
        pytest.param(*("killed", OutOfMemory, None), marks=pytest.mark.full),
        ("mistake", UserError, "^data.path: nothing is there; give another$"),
        pytest.param(
            *("bug", RuntimeError, "(?s)rank 1: ZeroDivisionError: of this rank\n.*in one_fails"),
            marks=pytest.mark.full,
        ),
        pytest.param(
            *("sleep", RuntimeError, "(?s)rank .: no answer within 20 s\n.*in one_fails"), marks=pytest.mark.full
        ),
    ],
)
def test_a_rank_that_fails_ends_its_waiting_peers_and_the_next_ranks_are_new(
    way: str, error: type[Exception], told: str | None
) -> None:
    before = dict(os.environ)
    with FreshRanks.ready(timeout_seconds=20) as fresh:
        with pytest.raises(error, match=told):
            fresh.run(one_fails, way, num_ranks=2)
        twice = replace(TINY, batch=2 * TINY.batch)
        assert fresh.run(doubled, TINY, num_ranks=2) == [(0, twice), (1, twice)], "what they are given and answer"
    assert dict(os.environ) == before


# ---- the benchmark ---------------------------------------------------------------------------------------------------


def test_each_row_of_the_original_stands_beside_one_of_ours(tmp_path: Path) -> None:
    """And beside no method that the original does not have, such as DDP with micro-batches."""
    published = []
    for length, m in ((3, 4), (4, 8)):
        shape = Shape(length, nodes=2)
        methods = [(DDP, None, None), (DDP, m, None), ("ours", None, None), ("ours", m, None), ("Pipe+DDP", m, 0.2)]
        lines = [
            Line("largest", name, chunks, bubble, 2, 48 * number, fits, 10**6, (3.0, 4.0) if fits else ())
            for number, (name, chunks, bubble) in enumerate(methods, start=1)
            for fits in (False, True)
        ]
        path = speed_table(lines, shape=shape, device="cpu", scale="small", folder=tmp_path, notes=[])
        table = json.loads(path.read_text())
        for row, line in zip(table["rows"], lines, strict=True):
            assert (row["published"] is not None) == ((line.method, line.chunks) in ((DDP, None), ("Pipe+DDP", m)))
            published.append(row["published"])
        assert f"Largest global batches at M {m}: {DDP} 96; ours 192; Pipe+DDP 240." in table["notes"]
    assert [row for row in published if row] == [
        "3 GPUs: 128 OOM", "3 GPUs: 64, 14G, 260/s, 85 min", "3 GPUs: 256 OOM", "3 GPUs: 240, 15G, 294/s, 77 min",
        "4 GPUs: 64 OOM", "4 GPUs: 60, 16G, 416/s, 58 min", "4 GPUs: 330 OOM", "4 GPUs: 320, 15.5G, 326/s, 61 min",
    ]  # fmt: skip


@pytest.mark.full
def test_a_tiny_run_tells_all_tables(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    tiny = ["--ranks-per-node", "2", "--nodes", "1", "--chunks", "2", "--repeats", "1", "--largest-batch", "16"]
    tiny += ["--scale", "small", "--memory-per-rank", "27 MB", "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["ddp_vs_pipe.py", *tiny])
    assert run_guarded(ddp_vs_pipe.main) == 0, capsys.readouterr().err
    names = ("ddp-vs-pipe-1x2", "ddp-vs-pipe-frozen", "ddp-vs-pipe-state")
    tables = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in names}
    rows = tables["ddp-vs-pipe-1x2"]["rows"]
    cut = [("DDP (torch)", None), ("DDP (torch)", 2), ("our plan, pp 1", None), ("our plan, pp 1", 2), ("Pipe+DDP", 2)]
    assert [(row["method"], row["chunks"]) for row in rows if row["block"] == "equal batch"] == cut
    for row in rows:
        is_out = row["memory"] == "out of memory"
        assert (row["MB a rank"] > 27) == is_out, "rows that do not fit are kept, with the figure"
        assert (row["images/s"] is None) == is_out
    assert any(row["memory"] == "out of memory" for row in rows)
    assert any(row["block"] == "equal batch" and row["images/s"] for row in rows)
    frozen = tables["ddp-vs-pipe-frozen"]["rows"]
    expected = [(n, prefix) for n in (16, 80) for prefix in ("computed", "cached")]
    assert [(row["batch"], row["prefix"]) for row in frozen] == [*expected, (64, "published"), (320, "published")]
    for row in frozen[: len(expected)]:
        assert row["images/s"] == pytest.approx(row["syncs/s"] * row["global batch"])
        assert row["sent bytes"] == 4 * (2 * 64 + 64 * 10 + 10)
    whole, *_, four = tables["ddp-vs-pipe-state"]["rows"]
    assert (whole["pp"], four["pp"]) == (1, 4) and four["parameters"] < whole["parameters"] / 3
    assert four["state MB"] < four["MB a rank"] < whole["MB a rank"] / 2
    for name, table in tables.items():
        assert (tmp_path / f"{name}.png").stat().st_size
        assert "environment" in table
    assert all("simulated" in " ".join(tables[name]["notes"]) for name in names[:2])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--repeats", "0"], "argument --repeats: 0 is not allowed"),
        (["--ranks-per-node", "1"], "--ranks-per-node: a pipeline of 1 is not allowed; give 2 to 10"),
        (["--ranks-per-node", "4", "--chunks", "2"], "--chunks: 2 do not fill a pipeline of 4"),
        (["--memory-per-rank", "much"], 'much is not allowed; give a size such as "150 MB"'),
        (["--largest-batch", "3"], "--largest-batch: 3 is less than one step of 24"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_argument_is_one_line(
    arguments: list[str], told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["ddp_vs_pipe.py", "--scale", "small", *arguments])
    assert run_guarded(ddp_vs_pipe.main) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line
