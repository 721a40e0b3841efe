"""DDP beside Pipe+DDP: the search of the largest batch, methods that train alike, and the benchmark at its smallest."""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from time import sleep

import numpy as np
import pytest
import torch.distributed as dist
from laws import REPOSITORY
from ranks import RankPool

sys.path.insert(0, str(REPOSITORY))

import benchmarks.ddp_vs_pipe.__main__ as ddp_vs_pipe
from benchmarks.ddp_vs_pipe.fresh_ranks import FreshRanks, OutOfMemory
from benchmarks.ddp_vs_pipe.largest import largest_batch
from benchmarks.ddp_vs_pipe.trials import Probe, RankJob, Trial, probe_frozen, time_steps
from pipetransformer.config import load_config
from pipetransformer.errors import UserError
from pipetransformer.launch.entry import run_guarded
from pipetransformer.plan import ParallelPlan
from pipetransformer.process.world import World

NUM_BLOCKS = 2
TINY = Trial(
    load_config(
        ddp_vs_pipe.CONFIG,
        ["model.kwargs={patch_size: 4, embed_dim: 16, depth: 2, num_heads: 2}", "data.max_train_samples=64"],
    ),
    ParallelPlan(0, 1, 2, (), 1, "1f1b", None, NUM_BLOCKS),
    ddp_bucket_mb=None,
    batch=8,
    steps=1,
)
TRIALS = {
    "DDP": replace(TINY, ddp_bucket_mb=1),
    "our plan": TINY,
    "pipeline": replace(TINY, plan=ParallelPlan(0, 2, 1, (2,), 4, "1f1b", None, NUM_BLOCKS)),
}


# ---- the largest batch -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [1, 4, 24])
def test_the_largest_batch_is_found_whatever_it_is(step: int) -> None:
    most = 40 * step
    for limit in range(0, most + 2 * step):
        tried: list[int] = []

        def fits(batch: int, limit: int = limit, tried: list[int] = tried) -> bool:
            tried.append(batch)
            return batch <= limit

        best, too_large = largest_batch(fits, step=step, most=most)
        assert best == min(limit, most) // step * step
        assert too_large == (None if limit >= most else best + step), "the next step is known not to fit"
        assert len(tried) == len(set(tried)), "no batch is tried twice"
        assert max(tried) <= max(step, min(2 * best, most)), "no try is more than double of what fits"


def test_no_batch_above_the_most_is_tried() -> None:
    tried: list[int] = []
    assert largest_batch(lambda batch: not tried.append(batch), step=8, most=30) == (24, None)  # type: ignore[func-returns-value]
    assert tried == [8, 16, 24]


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
    assert expected.keys() == found["DDP"][0].keys() == {**stages[0], **stages[1]}.keys()
    largest = max(float(np.abs(gradient).max()) for gradient in expected.values())
    for name, gradient in expected.items():
        for other in (found["DDP"][0][name], found["DDP"][1][name], {**stages[0], **stages[1]}[name]):
            # Sums of 8 samples in another order; a wrong scale would be off by a half.
            assert np.abs(other - gradient).max() < 1e-5 * largest, name


@pytest.mark.parametrize("name", TRIALS)
def test_a_measurement_has_seconds_and_memory(ranks: RankPool, name: str) -> None:
    first, second = ranks.run(2, time_steps, TRIALS[name])
    assert first.seconds == second.seconds > 0, "the slowest rank's"
    assert min(first.peak_bytes, second.peak_bytes) > 0


@pytest.mark.parametrize("cached", [None, NUM_BLOCKS], ids=["computed", "cached"])
def test_all_frozen_reduces_the_gradient_of_the_head_alone(ranks: RankPool, cached: int | None) -> None:
    frozen = replace(TINY.plan, frozen=NUM_BLOCKS, cached=cached)
    probes: list[Probe] = ranks.run(2, probe_frozen, replace(TINY, plan=frozen))
    assert {probe.reduced_bytes for probe in probes} == {4 * (2 * 16 + 16 * 10 + 10)}, "a norm of 16 and 10 classes"
    for probe in probes:
        assert probe.data + probe.forward + probe.backward > 0 and probe.backward < probe.seconds


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


@pytest.mark.full
@pytest.mark.parametrize(
    ("way", "error", "told"),
    [
        ("out of memory", OutOfMemory, None),
        ("killed", OutOfMemory, None),
        ("mistake", UserError, "^data.path: nothing is there; give another$"),
        ("bug", RuntimeError, "(?s)rank 1: ZeroDivisionError: of this rank\n.*in one_fails"),
        ("sleep", RuntimeError, "(?s)rank .: no answer within 20 s\n.*in one_fails"),
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


@pytest.mark.full
def test_a_tiny_run_tells_both_tables(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    tiny = ["--ranks-per-node", "2", "--nodes", "1", "--chunks", "2", "--repeats", "1", "--largest-batch", "16"]
    tiny += ["--scale", "small", "--memory-per-rank", "27 MB", "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["ddp_vs_pipe.py", *tiny])
    assert run_guarded(ddp_vs_pipe.main) == 0, capsys.readouterr().err
    tables = {
        name: json.loads((tmp_path / f"{name}.json").read_text()) for name in ("ddp-vs-pipe-1x2", "ddp-vs-pipe-frozen")
    }
    rows = tables["ddp-vs-pipe-1x2"]["rows"]
    assert {row["method"] for row in rows} == {"DDP (torch)", "our plan, pp 1", "Pipe+DDP"}
    for row in rows:
        if row["block"] == "largest batch":
            is_out = row["memory"] == "out of memory"
            assert (row["MB a rank"] > 27) == is_out, "rows that do not fit are kept, with the figure"
            assert (row["images/s"] is None) == is_out
    assert any(row["memory"] == "out of memory" for row in rows)
    assert any(row["block"] == "equal batch" and row["images/s"] for row in rows)
    frozen = tables["ddp-vs-pipe-frozen"]["rows"]
    both = ("computed", "cached")
    assert [(row["batch"], row["prefix"]) for row in frozen] == [(n, prefix) for n in (16, 80) for prefix in both]
    for row in frozen:
        assert row["images/s"] == pytest.approx(row["syncs/s"] * row["global batch"])
    for name, table in tables.items():
        assert (tmp_path / f"{name}.png").stat().st_size
        assert "environment" in table
        assert "simulated" in " ".join(table["notes"])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--repeats", "0"], "argument --repeats: 0 is not allowed"),
        (["--ranks-per-node", "1"], "--ranks-per-node: a pipeline of 1 is not allowed; give 2 to 10"),
        (["--ranks-per-node", "4", "--chunks", "2"], "--chunks: 2 do not fill a pipeline of 4"),
        (["--memory-per-rank", "much"], 'much is not allowed; give a size such as "150 MB"'),
        (["--largest-batch", "3"], "--largest-batch: 3 is less than one step of 16"),
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
