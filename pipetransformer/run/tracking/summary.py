"""``summary.json``: the results of a run, for scripts. Its keys, and their order, are the fields of ``Summary``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipetransformer.process.files import write_whole
from pipetransformer.run.tracking.events import to_plain


def write_json(path: Path, value: Any) -> None:
    """Writes or replaces ``path``, as the whole file or not at all.

    Raises:
        UserError: if the file cannot be written.
    """
    write_whole(path, json.dumps(to_plain(value), indent=2) + "\n")


def parts_of_time(summary: Mapping[str, Any]) -> list[tuple[str, float]]:
    """The seconds of a run by kind, which add up to all of them."""
    known = [
        ("steps", summary["train_s"] - summary["transition_s"] - summary["cache_advance_s"]),
        ("transitions", summary["transition_s"]),
        ("cache advance", summary["cache_advance_s"]),
        ("evaluation", summary["eval_s"]),
        ("set-up", summary["setup_s"]),
        ("checkpoints", summary["save_s"]),
    ]
    return [*known, ("other", max(0.0, summary["wall_s"] - sum(seconds for _, seconds in known)))]


@dataclass(frozen=True, slots=True)
class Transition:
    """One move to another plan.

    Attributes:
        step: number of steps done.
        epoch: the epoch of the next step, from 0.
        frozen: number of frozen blocks (n) of the new plan.
        pp: its pipeline length.
        dp: its number of pipeline replicas.
        microbatches: its micro-batches per pipeline and step (M).
        boundaries: its first units of all stages but the first.
        seconds: seconds of the move.
        bytes_moved: bytes that all ranks together received.
        reason: the cause, such as the freeze policy.
    """

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
    """The most bytes of the stores in each tier.

    Attributes:
        device: bytes in a device's memory.
        host: bytes in the memory of a node.
        disk: bytes on disk.
    """

    device: int = 0
    host: int = 0
    disk: int = 0


@dataclass(frozen=True, slots=True)
class CacheUse:
    """The use of the cache in training.

    Attributes:
        hits: number of samples read from the cache.
        misses: number of samples whose prefix was computed, though the plan had a cache.
        bytes: the most bytes of the stores.
    """

    hits: int = 0
    misses: int = 0
    bytes: CacheBytes = CacheBytes()


@dataclass(frozen=True, slots=True)
class Summary:
    """The results of a whole run. Names that end in ``_s`` are seconds, but for ``samples_per_s``.

    Attributes:
        run_id: id of the run.
        task: task of the configuration.
        model: name of the model.
        dataset: name of the dataset.
        world_size: number of ranks.
        epochs: number of epochs.
        steps: number of optimizer steps.
        global_batch_size: number of samples of a full global batch.
        seed: seed of the configuration.
        metrics: metrics of the last evaluation.
        best_metrics: metrics of the best evaluation.
        wall_s: the whole run.
        train_s: steps, transitions and advance passes, without set-up and evaluations.
        eval_s: evaluations, advance passes over their samples included.
        transition_s: transitions and decisions.
        cache_advance_s: advance passes over the samples that training needs.
        setup_s: set-up.
        save_s: checkpoints.
        samples_per_s: samples per second, one figure for each epoch.
        peak_memory_bytes: the most memory in use, one figure for each rank.
        transitions: all transitions, in order.
        cache: the use of the cache.
        compute_floor_s: the compute floor, the run at the speed of its own calibrated static step.
        static_step_s: seconds of a full step of mean length of the best static layout, timed before training; None
            where nothing was timed.
        t0_start_s: seconds of that step (t0) at the modal length, round by round, before training.
        t0_end_s: the same behind it; empty where nothing was timed.
        resumed_from: name of the checkpoint that the run continued from; None without one.
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
    save_s: float
    samples_per_s: Sequence[float]
    peak_memory_bytes: tuple[int, ...]
    transitions: Sequence[Transition]
    cache: CacheUse
    compute_floor_s: float
    static_step_s: float | None
    t0_start_s: Sequence[float]
    t0_end_s: Sequence[float]
    resumed_from: str | None

    def figures(self) -> dict[str, float]:
        """The single numbers of it, by their names on the dashboard."""
        seconds = {f"{name.replace(' ', '_').replace('-', '')}_s": value for name, value in parts_of_time(asdict(self))}
        held = {f"cache_bytes_{tier}": value for tier, value in asdict(self.cache.bytes).items()}
        peak = {"peak_memory_bytes": max(self.peak_memory_bytes, default=0)}
        whole = {"train_s": self.train_s, "wall_s": self.wall_s, "compute_floor_s": self.compute_floor_s}
        return {**whole, **seconds, **held, **peak}
