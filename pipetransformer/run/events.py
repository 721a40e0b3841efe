"""The events of a run, as the trainer tells them to its listeners.

Every rank tells the same events in the same order; a listener may therefore be collective, as the report is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipetransformer.cache import Advance
from pipetransformer.engine import Move, PhaseSeconds, StepInput
from pipetransformer.freeze import FreezeDecision
from pipetransformer.pipe.measure.profile import Measurements
from pipetransformer.pipe.measure.static_layouts import StaticLayouts
from pipetransformer.plan import ParallelPlan

__all__ = [
    "Adopted",
    "Advanced",
    "CacheDeclined",
    "Closed",
    "Decided",
    "DecisionEnds",
    "DecisionStarts",
    "Evaluated",
    "Event",
    "Finished",
    "Held",
    "Listener",
    "Measured",
    "MeasuringStarts",
    "Moved",
    "NeverFreezes",
    "Opened",
    "Paused",
    "Resumed",
    "Saved",
    "Stepped",
    "Trained",
    "TrainingStarts",
]


class Event:
    """Something that has happened, or begins."""

    __slots__ = ()


Listener = Callable[[Event], None]


@dataclass(frozen=True, slots=True)
class MeasuringStarts(Event):
    """Set-up's longest part begins."""


@dataclass(frozen=True, slots=True)
class Opened(Event):
    """The job is sure to start: the run's folder may be made."""


@dataclass(frozen=True, slots=True)
class Measured(Event):
    """Costs and static layouts, as they were measured before training."""

    layouts: StaticLayouts
    costs: Measurements


@dataclass(frozen=True, slots=True)
class Resumed(Event):
    """The run goes on from a checkpoint.

    Attributes:
        totals: the run's totals at the checkpoint.
    """

    step: int
    checkpoint: str
    totals: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TrainingStarts(Event):
    """Set-up is over."""

    plan: ParallelPlan


@dataclass(frozen=True, slots=True)
class NeverFreezes(Event):
    """The policy's decisions are too few in this run to freeze anything."""


@dataclass(frozen=True, slots=True)
class DecisionStarts(Event):
    """A decision may be due."""


@dataclass(frozen=True, slots=True)
class Decided(Event):
    """AutoFreeze was asked."""

    decision: FreezeDecision


@dataclass(frozen=True, slots=True)
class Held(Event):
    """Fewer blocks freeze than AutoFreeze wants."""

    step: int
    frozen: int
    wanted: int
    reason: str


@dataclass(frozen=True, slots=True)
class Adopted(Event):
    """A plan is taken: ``run.replay`` reads this.

    Attributes:
        evidence: the figures that speak for it, by name.
    """

    step: int
    plan: ParallelPlan
    reason: str
    evidence: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Moved(Event):
    """A transition during training has been made."""

    step: int
    epoch: int
    old: ParallelPlan
    plan: ParallelPlan
    move: Move
    reason: str


@dataclass(frozen=True, slots=True)
class Advanced(Event):
    """An advance pass is done.

    Attributes:
        boundary: in blocks.
        num_bytes: of the node's stores.
        is_refill: before training goes on from a checkpoint; a part of set-up.
    """

    step: int
    boundary: int
    advance: Advance
    num_bytes: int
    is_refill: bool


@dataclass(frozen=True, slots=True)
class CacheDeclined(Event):
    """There is no cache."""

    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class DecisionEnds(Event):
    """The job is where the decision wanted it."""


@dataclass(frozen=True, slots=True)
class Stepped(Event):
    """One optimizer step is done.

    Attributes:
        step: steps done.
        read_bytes: read from the cache for the global batch.
    """

    step: int
    epoch: int
    plan: ParallelPlan
    batch: StepInput
    read_bytes: int


@dataclass(frozen=True, slots=True)
class Paused(Event):
    """Some steps are to be told of, all under one plan.

    Attributes:
        loss_sum: of this rank's samples since the last pause.
        num_correct: likewise, as far as answers are right or wrong.
        num_samples: likewise.
        phases: this rank's seconds by phase since the last pause.
        seconds: wall-clock time since then.
    """

    step: int
    plan: ParallelPlan
    loss_sum: float
    num_correct: float
    num_samples: float
    phases: PhaseSeconds
    seconds: float


@dataclass(frozen=True, slots=True)
class Trained(Event):
    """Training stops for a decision, an evaluation, a checkpoint or the end of an epoch.

    Attributes:
        seconds: since it started or went on.
        epoch_samples: samples of the epoch that ends here; None inside an epoch.
    """

    seconds: float
    epoch_samples: int | None


@dataclass(frozen=True, slots=True)
class Evaluated(Event):
    """An evaluation is done.

    Attributes:
        predictions: answers by question; None where the task has none.
    """

    step: int
    epoch: int
    metrics: dict[str, float]
    seconds: float
    predictions: dict[str, str] | None


@dataclass(frozen=True, slots=True)
class Saved(Event):
    """A checkpoint is complete."""

    step: int
    path: Path


@dataclass(frozen=True, slots=True)
class Finished(Event):
    """The last step is done, and the model saved."""

    steps: int


@dataclass(frozen=True, slots=True)
class Closed(Event):
    """The job ends, well (0) or not."""

    exit_code: int
