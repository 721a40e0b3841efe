"""What a run adds up: carried in checkpoints, so that a resumed run's summary tells of the whole run."""

from __future__ import annotations

import contextlib
import resource
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from pipetransformer.run.tracking import Transition

__all__ = ["Totals", "peak_memory_bytes", "reset_peak_memory"]


@dataclass(slots=True)
class Totals:
    """Seconds by kind, figures by epoch, and every transition. ``epoch_train_s`` is that of the epoch under way."""

    wall_s: float = 0.0
    setup_s: float = 0.0
    train_s: float = 0.0
    eval_s: float = 0.0
    transition_s: float = 0.0
    cache_advance_s: float = 0.0
    floor_s: float = 0.0
    epoch_train_s: float = 0.0
    samples_per_s: list[float] = field(default_factory=list)
    transitions: list[Transition] = field(default_factory=list)
    hits: int = 0
    misses: int = 0
    cache_bytes: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    best_metrics: dict[str, float] = field(default_factory=dict)

    def add_train(self, seconds: float) -> None:
        self.train_s += seconds
        self.epoch_train_s += seconds

    def end_epoch(self, num_samples: int) -> None:
        self.samples_per_s.append(num_samples / self.epoch_train_s if self.epoch_train_s else 0.0)
        self.epoch_train_s = 0.0

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> Totals:
        values = dict(state)
        moves = [Transition(**{**t, "boundaries": tuple(t["boundaries"])}) for t in values.pop("transitions", [])]
        return cls(**values, transitions=moves)


def reset_peak_memory(device: torch.device) -> None:
    """Starts the peak anew, so that set-up (every rank holds the whole model, all layouts are tried) does not count."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with contextlib.suppress(OSError):  # Linux has it; elsewhere set-up counts
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory that this rank held: on its GPU, or resident (a shared store counts in full) on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("VmHWM:")).split()[1])
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
