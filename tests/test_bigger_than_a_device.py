"""A model that no rank could train alone, on ranks that may not hold more than a limit, from the first second to the
saved model: it starts as a long pipeline, freezes, caches, ends as replicas, is interrupted and goes on.

A rank's tensors are counted storage by storage as torch makes and frees them, and the count may never pass the limit. A
twin without a limit, that replays its plans, ends with the same bits.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from laws import NUM_BLOCKS, REPOSITORY, Weights, configuration, final_weights
from ranks import RankPool
from test_memory import JOB

from pipetransformer.adapter import LiveBytes
from pipetransformer.launch.node import free_port
from pipetransformer.process.world import World
from pipetransformer.run import events
from pipetransformer.trainer import Trainer

WIDTH, NUM_WEIGHTS_BYTES = 96, 16  # bytes of a weight, its gradient and its moments
TOTAL_OVER_LIMIT = 2.5
SETTINGS = (
    *("train.optimizer=adamw", "train.lr=1e-3", "train.precision=float32", "train.batch_size=8", "train.epochs=4"),
    *("train.eval_every=1 epoch", "checkpoint.every=1 epoch", "log.wandb=disabled", "log.every=1000"),
    *("model.dropout=0.1", f"model.kwargs={{patch_size: 4, in_chans: 1, embed_dim: {WIDTH}, depth: 6, num_heads: 2}}"),
    *("data.max_train_samples=80", "data.max_eval_samples=24", "pipe.recompute=always", "cache.disk_budget=null"),
    *("freeze.policy=schedule", "freeze.alpha=0.5", "freeze.every=1 epoch", "freeze.guard=false"),
    *("pipe.measure=false", "pipe.initial_length=auto"),
)
LARGE = "{hidden_size: 1024, intermediate_size: 4096, num_attention_heads: 16, num_hidden_layers: 6}"
TINY = "{hidden_size: 16, intermediate_size: 16, num_attention_heads: 2, num_hidden_layers: 6}"


class Stop(Exception):
    pass


@dataclass
class Phases:
    """The most bytes of each phase, and what was predicted.

    Attributes:
        live: the counter.
        limit: bytes that a rank may hold.
        predicted: what the planner predicts of the present plan; during a transition, the larger of both plans'.
        coming: what it predicts of the plan that a transition leads to.
        peaks: by phase.
        over: (phase, peak, predicted) of each that passes the limit, or 1.1 of what was predicted.
        layouts: (frozen blocks, pp, place of the prefix) of each plan.
    """

    live: LiveBytes
    limit: float
    predicted: int = 0
    coming: int = 0
    peaks: dict[str, int] = field(default_factory=dict)
    over: list[tuple[str, int, int]] = field(default_factory=list)
    layouts: list[tuple[int, int, str]] = field(default_factory=list)

    def ended(self, phase: str) -> None:
        peak = self.live.peak
        self.peaks[phase] = max(self.peaks.get(phase, 0), peak)
        if peak > self.limit or (self.predicted and peak > 1.1 * self.predicted):
            self.over.append((phase, peak, self.predicted))
        self.live.peak = self.live.alive


def run(
    world: World, folder: str, limit: float | None, resume: bool, stops: bool, replay: str | None, shard: str = "none"
) -> tuple[Weights | None, Phases | None]:
    own = [*SETTINGS, f"dp.shard={shard}", f"run.dir={folder}", f"run.id={'twin' if replay else 'limited'}"]
    own += [f"run.replay={replay}"] if replay else []
    own += [f"pipe.memory_limit={int(limit)}"] if limit else []
    own += [f"run.resume={str(resume).lower()}"]
    with LiveBytes() if limit else nullcontext() as live:
        phases = None if live is None else Phases(live, limit or 0)

        def note(event: events.Event) -> None:
            if phases is None:
                return
            if isinstance(event, events.Adopted):
                phases.ended("steps, evaluation" if event.step else "set-up")
                plan = event.plan
                phases.layouts.append((plan.frozen, plan.pp, plan.prefix))
                if event.choice is not None:
                    told = event.choice.prediction.memory_bytes[plan.stage_of(world.rank)]
                    phases.coming = told
                    phases.predicted = max(phases.predicted, told) if event.step else told
            elif isinstance(event, (events.Moved, events.Advanced)):
                phases.ended(type(event).__name__)
                phases.predicted = phases.coming
            elif isinstance(event, events.Saved):
                phases.ended("checkpoint")
            elif isinstance(event, events.Evaluated):
                phases.ended("steps, evaluation")
            elif isinstance(event, events.TrainingEnds):
                phases.ended("saved model")
            if stops and isinstance(event, events.Saved) and event.step >= 20:
                raise Stop

        trainer = Trainer(configuration("vit", own), world, listeners=[note])
        try:
            trainer.run()
        except Stop:
            return None, _without_counter(phases)
    return final_weights(trainer), _without_counter(phases)


def _without_counter(phases: Phases | None) -> Phases | None:
    if phases is not None:
        phases.live = None  # type: ignore[assignment]
    return phases


def num_weights() -> int:
    import timm

    kwargs = dict(patch_size=4, in_chans=1, embed_dim=WIDTH, depth=NUM_BLOCKS, num_heads=2, img_size=8, num_classes=10)
    with torch.device("meta"):
        return sum(p.numel() for p in timm.create_model("vit_tiny_patch16_224", **kwargs).parameters())


@pytest.mark.parametrize("shard", [pytest.param("none", marks=pytest.mark.full), "full"])
def test_a_model_that_no_rank_could_train_alone(shard: str, ranks: RankPool, tmp_path: Path) -> None:
    limit = NUM_WEIGHTS_BYTES * num_weights() / TOTAL_OVER_LIMIT
    first: Callable[..., list[tuple[Weights | None, Phases]]] = ranks.run  # type: ignore[assignment]
    begun = first(4, run, str(tmp_path), limit, False, True, None, shard)
    ended = first(4, run, str(tmp_path), limit, True, False, None, shard)
    for _, phases in (*begun, *ended):
        assert not phases.over, (phases.over, phases.peaks, limit)
    layouts = begun[0][1].layouts + ended[0][1].layouts
    assert layouts[0][0] == 0 and (layouts[0][1] == 4 or shard == "full"), "nothing else fits"
    assert any(pp == 1 and prefix in ("cached", "streamed") for _, pp, prefix in layouts), layouts
    assert {"Moved", "Advanced", "checkpoint", "steps, evaluation"} <= {*begun[0][1].peaks, *ended[0][1].peaks}
    twin = first(4, run, str(tmp_path), None, False, False, str(tmp_path / "limited" / "events.jsonl"), shard)
    mine, theirs = ended[0][0], twin[0][0]
    assert mine is not None and theirs is not None
    assert all(np.array_equal(mine[name], theirs[name]) for name in theirs)


def test_no_single_rank_could_hold_it(ranks: RankPool, tmp_path: Path) -> None:
    limit = NUM_WEIGHTS_BYTES * num_weights() / TOTAL_OVER_LIMIT
    with pytest.raises(AssertionError, match="pipe.memory_limit: .* bytes hold no layout of this model"):
        ranks.run(1, run, str(tmp_path), limit, False, False, None)


@pytest.mark.full
def test_the_kernel_counts_no_more_either(tmp_path: Path) -> None:
    """A BERT of 77 million weights, 1,235 MB with gradients and moments, on four ranks that may hold 494 MB of it each.

    What counts is memory that no file backs, as often as it can be read, beside that of a rank with next to no model:
    pages of files, where frozen weights wait, are the kernel's to take back, and shared ones are the cache's.
    """
    limit = 494 * 10**6
    idle = anonymous_peaks(tmp_path, "idle", f"model.kwargs={TINY}")
    limited = anonymous_peaks(tmp_path, "limited", f"pipe.memory_limit={limit}", f"model.kwargs={LARGE}")
    summary = json.loads((tmp_path / "limited" / "summary.json").read_text())
    assert summary["transitions"] and summary["cache"]["hits"]
    grown = {rank: limited[rank] - min(idle.values()) for rank in limited}
    assert len(grown) == 4 and max(grown.values()) <= 1.1 * limit, grown


def anonymous_peaks(folder: Path, name: str, *overrides: str) -> dict[str, int]:
    """The most anonymous memory that was seen of each of four ranks of a run, by rank, in bytes."""
    settings = (*JOB, "pipe.recompute=always", "pipe.measure=false", "freeze.policy=schedule", "freeze.guard=false")
    settings += ("freeze.warmup=0 steps", "freeze.alpha=0.5", "data.max_train_samples=128", f"run.dir={folder}")
    command = [sys.executable, "-m", "pipetransformer.launch", "4", "1", "0", "127.0.0.1", str(free_port())]
    command += [str(REPOSITORY / "config" / "train_config_demo_text.yaml"), name, *settings, *overrides]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "32768"}  # what is freed goes back at once
    job = subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=subprocess.DEVNULL)
    peaks: dict[str, int] = {}
    while job.poll() is None:
        for process in psutil.Process(job.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error, OSError, StopIteration):
                rank = process.environ().get("RANK", "")
                lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
                held = 1024 * int(next(line for line in lines if line.startswith("RssAnon:")).split()[1])
                peaks[rank] = max(peaks.get(rank, 0), held)
        time.sleep(0.01)
    assert job.returncode == 0
    return {rank: peak for rank, peak in peaks.items() if rank}
