"""The sums of a run: carried in checkpoints, so that a resumed run's summary tells of the whole run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from pipetransformer.run.tracking import Transition

__all__ = ["Totals"]


@dataclass(slots=True)
class Totals:
    """Seconds by kind, figures by epoch, and every transition.

    Attributes:
        epoch_train_s: training seconds of the epoch under way.
        best_metrics: of the best evaluation so far.
    """

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

    def add_evaluation(self, metrics: dict[str, float], *, seconds: float, by: str) -> None:
        """Args: by: the metric that ranks evaluations."""
        if self.is_best(metrics, by=by):
            self.best_metrics = dict(metrics)
        self.metrics = metrics
        self.eval_s += seconds

    def is_best(self, metrics: Mapping[str, float], *, by: str) -> bool:
        """Whether ``metrics`` are better than all before."""
        return by not in self.best_metrics or metrics[by] > self.best_metrics[by]

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Totals:
        values = dict(state)
        moves = [Transition(**{**t, "boundaries": tuple(t["boundaries"])}) for t in values.pop("transitions", [])]
        return cls(**values, transitions=moves)
