"""``summary.json``: what a run came to. The contract for scripts: its keys and their order are the fields."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipetransformer.errors import writing
from pipetransformer.run.tracking.events import to_plain

__all__ = ["CacheBytes", "CacheUse", "Summary", "Transition", "write_json"]


def write_json(path: Path, value: Any) -> None:
    """Replace ``path`` at once: a reader sees the old file or the whole new one. Raises UserError."""
    part = path.with_name(path.name + ".part")
    with writing(path):
        with part.open("w", encoding="ascii") as file:
            file.write(json.dumps(to_plain(value), indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)


@dataclass(frozen=True, slots=True)
class Transition:
    """One move to another plan, told by the plan that it moved to."""

    step: int
    epoch: int
    frozen: int
    pp: int
    dp: int
    microbatches: int
    boundaries: tuple[int, ...]
    seconds: float
    bytes_moved: int
    reason: str


@dataclass(frozen=True, slots=True)
class CacheBytes:
    """The most that the store held in each tier."""

    device: int = 0
    host: int = 0
    disk: int = 0


@dataclass(frozen=True, slots=True)
class CacheUse:
    """Samples read from the cache, and samples whose prefix was computed though a cache was there."""

    hits: int = 0
    misses: int = 0
    bytes: CacheBytes = CacheBytes()


@dataclass(frozen=True, slots=True)
class Summary:
    """A whole run.

    ``train_s`` contains steps, transitions and cache advance, not set-up and evaluation. ``samples_per_s`` is one
    figure an epoch, ``peak_memory_bytes`` one a rank. ``compute_floor_s`` is the least that the run's own freeze
    schedule allows. ``resumed_from`` names the checkpoint, or is None.
    """

    run_id: str
    task: str
    model: str
    dataset: str
    world_size: int
    epochs: int
    steps: int
    global_batch_size: int
    seed: int
    metrics: Mapping[str, float]
    best_metrics: Mapping[str, float]
    wall_s: float
    train_s: float
    eval_s: float
    transition_s: float
    cache_advance_s: float
    setup_s: float
    samples_per_s: tuple[float, ...]
    peak_memory_bytes: tuple[int, ...]
    transitions: tuple[Transition, ...]
    cache: CacheUse
    compute_floor_s: float
    resumed_from: str | None

    def write(self, path: Path) -> None:
        """Replace ``path`` at once: a reader sees the old file or the whole new one, also after a crash."""
        write_json(path, self)
