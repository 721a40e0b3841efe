"""The tasks of the table, and its rows: a row is a name and the settings that make it, a task all that rows share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.support.measure import CONFIGS

__all__ = ["BASELINE", "DEFAULT", "PEER", "ROWS", "TUNED", "Row", "Task", "texts"]

BASELINE, TUNED, DEFAULT, PEER = "no freeze", "no freeze, tuned", "default", "the peer"


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table.

    Attributes:
        name: its name.
        overrides: settings beside those of the task.
        seeds: number of runs, with the seeds 0, 1, ...
    """

    name: str
    overrides: tuple[str, ...]
    seeds: int


_OFF = ("pipe.enabled=false", "dp.enabled=false", "cache.enabled=false")
_NONE = ("freeze.policy=none", "cache.enabled=false")
ROWS = (
    Row(BASELINE, _NONE, 8),
    Row(TUNED, _NONE, 3),
    Row(PEER, _NONE, 8),
    Row(DEFAULT, (), 8),
    Row("freeze only", _OFF, 3),
    Row("+ AutoPipe", _OFF[1:], 3),
    Row("+ AutoDP", _OFF[2:], 3),
    *(Row(f"policy {name}", (f"freeze.policy={name}",), 3) for name in ("schedule", "paper", "percentile")),
    Row("policy static, half", ("freeze.policy=static", "freeze.max_frozen=HALF"), 3),
)


@dataclass(frozen=True, slots=True)
class Task:
    """A model on some data.

    Attributes:
        name: its name.
        config: the configuration file.
        overrides: the recipe, for every row, the peer's too.
        tuned: what is changed for the row that is tuned for least time to target, on other seeds and data.
        metric: the metric that is judged, 0 to 1.
        margin: how far below the baseline's mean final metric the target lies.
        num_blocks: number of blocks of the model.
    """

    name: str
    config: Path
    overrides: tuple[str, ...]
    tuned: tuple[str, ...]
    num_blocks: int
    metric: str = "accuracy"
    margin: float = 0.003

    def settings(self, row: Row, *, seed: int) -> tuple[str, ...]:
        """All settings of a cell."""
        own = tuple(each.replace("HALF", str(self.num_blocks // 2)) for each in row.overrides)
        return (*self.overrides, *(self.tuned if row.name == TUNED else ()), *own, f"train.seed={seed}")


_TEXTS = (
    *("train.epochs=3", "train.batch_size=32", "train.eval_every=30 steps", "train.warmup_ratio=0.1"),
    *("train.head_lr_scale=10", "log.wandb=disabled", "checkpoint.every=null", "log.every=1000", "data.max_length=128"),
)
# Learning rate of the recipe; what is tuned.
_TEXT_MODELS: Mapping[int, tuple[str, tuple[str, ...]]] = {
    6: ("5e-5", ("train.lr=2e-4", "train.epochs=1")),
    12: ("5e-5", ("train.lr=1e-4", "train.epochs=2")),
}


def texts(data: Path, model: Path, *, num_blocks: int) -> Task:
    """SST-2 by ``data`` (``support/sst2.py``), with the model in a folder."""
    lr, tuned = _TEXT_MODELS[num_blocks]
    own = (f"data.path={data}", f"model.name={model.resolve()}", f"train.lr={lr}")
    return Task(f"sst2-{model.name}", CONFIGS / "train_config_sst2_all_in_one.yaml", (*_TEXTS, *own), tuned, num_blocks)
