"""The events of a run, as the trainer tells them to its listeners.

Every rank tells the same events in the same order, so that a listener may be collective, as the report is; but Saved
and NotSaved come when a rank hears of the write. The report writes most of them to ``events.jsonl``, as:
    Measured  calibration      Decided  freeze_decision    Moved          transition       Evaluated  evaluation
    Resumed   resume           Held     held               Advanced       advance          Saved      checkpoint
    TrainingStarts  run        Adopted  plan               CacheDeclined  cache_declined   Finished   end
    Logged    steps            Watched  guard              NotSaved       not_saved        EndsEarly  ends_early
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipetransformer.cache import Advance
from pipetransformer.engine import Move, StepInput
from pipetransformer.freeze import FreezeDecision, Freezing, Verdict
from pipetransformer.pipe.measure.profile_file import Profile
from pipetransformer.pipe.measure.static_layouts import StaticLayouts
from pipetransformer.pipe.planner.answers import Choice
from pipetransformer.plan import ParallelPlan
from pipetransformer.run.step_figures import StepFigures


class Event:
    """A fact of a run: something has happened, or begins."""

    __slots__ = ()


Listener = Callable[[Event], None]
"""A function that is called with every event."""


@dataclass(frozen=True, slots=True)
class Announced(Event):
    """Something to be told before the run has a folder.

    Attributes:
        lines: it, in words.
    """

    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Opened(Event):
    """Nothing can refuse the job any more: the run's folder may be made."""


@dataclass(frozen=True, slots=True)
class Measured(Event):
    """The measurements before training are done.

    Attributes:
        layouts: the timed static layouts.
        profile: the measured costs.
    """

    layouts: StaticLayouts
    profile: Profile


@dataclass(frozen=True, slots=True)
class Resumed(Event):
    """The run continues from a checkpoint.

    Attributes:
        step: number of steps done.
        checkpoint: name of the checkpoint's folder.
        totals: totals of the run at the checkpoint, as ``Report.state_dict`` gives them.
        damaged: later checkpoints that were passed over, each with the reason.
    """

    step: int
    checkpoint: str
    totals: Mapping[str, Any]
    damaged: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class TrainingStarts(Event):
    """Set-up is done.

    Attributes:
        plan: the plan to start with.
        freezing: what the freeze policy will do in this run.
    """

    plan: ParallelPlan
    freezing: Freezing


@dataclass(frozen=True, slots=True)
class Decided(Event):
    """AutoFreeze has decided.

    Attributes:
        decision: the number of blocks that it wants frozen, with its reasons.
    """

    decision: FreezeDecision


@dataclass(frozen=True, slots=True)
class Probed(Event):
    """Linear heads were fitted at every boundary, before training.

    Attributes:
        scores: share of the labels' variance that each explains, behind the stem first [blocks + 1]; None for
            questions.
        free: the number of blocks to start with.
        seconds: wall-clock seconds of it all.
    """

    scores: tuple[float, ...] | None
    free: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Watched(Event):
    """The guard has looked at the samples set aside.

    Attributes:
        verdict: its answer, with its evidence.
        seconds: wall-clock seconds of the pass.
    """

    verdict: Verdict
    seconds: float


@dataclass(frozen=True, slots=True)
class Held(Event):
    """Fewer blocks freeze, or thaw, than AutoFreeze wants.

    Attributes:
        step: number of steps done.
        frozen: number of frozen blocks from now on.
        wanted: number of frozen blocks that AutoFreeze wants.
        reason: the obstacle, in words.
    """

    step: int
    frozen: int
    wanted: int
    reason: str


@dataclass(frozen=True, slots=True)
class Adopted(Event):
    """A plan is adopted. ``run.replay`` reads this event.

    Attributes:
        step: number of steps done.
        plan: the plan.
        reason: the cause, such as the freeze policy.
        choice: the figures behind the plan; None where AutoPipe has not chosen it.
    """

    step: int
    plan: ParallelPlan
    reason: str
    choice: Choice | None = None


@dataclass(frozen=True, slots=True)
class Moved(Event):
    """A transition during training is done.

    Attributes:
        step: number of steps done.
        epoch: the epoch of the next step, from 0.
        old: the plan before.
        plan: the new plan.
        move: the cost of the transition.
        reason: the cause, such as the freeze policy.
    """

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
        step: number of steps done.
        boundary: the new boundary of the cache, in blocks.
        advance: the work of the pass.
        num_bytes: bytes of the node's stores.
        tier: place of the stores, ``host`` or ``disk``.
        is_refill: whether the pass only fills the cache again after a resumption, as a part of set-up.
    """

    step: int
    boundary: int
    advance: Advance
    num_bytes: int
    tier: str
    is_refill: bool


@dataclass(frozen=True, slots=True)
class CacheDeclined(Event):
    """The prefix is not cached, or no more of it than was.

    Attributes:
        step: number of steps done.
        reason: the obstacle, in words.
        boundary: the boundary that stays cached, in blocks; None for no cache.
    """

    step: int
    reason: str
    boundary: int | None = None


@dataclass(frozen=True, slots=True)
class DecisionEnds(Event):
    """A decision that may have been due is done, with its transition and advance pass: in so many seconds."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Stepped(Event):
    """One optimizer step is done.

    Attributes:
        step: number of steps done, this one included.
        epoch: the epoch of the step, from 0.
        plan: the plan of the step.
        batch: this rank's part of the global batch. Its tensors may be reused for later batches: do not keep them.
        read_bytes: bytes read from the cache for the global batch.
    """

    step: int
    epoch: int
    plan: ParallelPlan
    batch: StepInput
    read_bytes: int


@dataclass(frozen=True, slots=True)
class Skipped(Event):
    """The update of a step was skipped: a loss or a gradient was not finite.

    Attributes:
        step: number of steps done, this one included.
    """

    step: int


@dataclass(frozen=True, slots=True)
class Logged(Event):
    """Some steps are done, all under one plan, and their figures are to be recorded.

    Attributes:
        step: number of steps done.
        plan: the plan of the steps.
        figures: the figures of the steps since the last such event.
    """

    step: int
    plan: ParallelPlan
    figures: StepFigures


@dataclass(frozen=True, slots=True)
class Trained(Event):
    """Training pauses for a decision, an evaluation, a checkpoint or the end of an epoch.

    Attributes:
        seconds: wall-clock seconds of training since the last such event.
        epoch_samples: number of samples of the epoch that ends here; None inside an epoch.
    """

    seconds: float
    epoch_samples: int | None


@dataclass(frozen=True, slots=True)
class Evaluated(Event):
    """An evaluation is done.

    Attributes:
        step: number of steps done.
        epoch: the epoch of the last step, from 0.
        metrics: the metrics by name.
        seconds: wall-clock seconds of the evaluation.
        predictions: answers by question; None where the task has none.
    """

    step: int
    epoch: int
    metrics: dict[str, float]
    seconds: float
    predictions: dict[str, str] | None


@dataclass(frozen=True, slots=True)
class Saved(Event):
    """A checkpoint is complete.

    Attributes:
        step: number of steps done.
        path: the folder of the checkpoint.
        seconds, write_seconds: those that training has waited for it, and those of the write.
    """

    step: int
    path: str
    seconds: float
    write_seconds: float


@dataclass(frozen=True, slots=True)
class NotSaved(Event):
    """Something could not be written, as to a full disk; training goes on.

    Attributes:
        step: number of steps done.
        what: a checkpoint, or a model.
        reason: the obstacle, in words.
        good: the last good checkpoint; None for none.
    """

    step: int
    what: str
    reason: str
    good: str | None


@dataclass(frozen=True, slots=True)
class EndsEarly(Event):
    """The job ends, because a rank was told to.

    Attributes:
        step: number of steps done.
        outcome: what was saved, in words.
    """

    step: int
    outcome: str


@dataclass(frozen=True, slots=True)
class TrainingEnds(Event):
    """The last step is done, and the model is saved.

    Attributes:
        cached_bytes: the most bytes of the cache that this rank's device held beside the node's stores.
    """

    cached_bytes: int


@dataclass(frozen=True, slots=True)
class TimedAgain(Event):
    """The best static layout was timed again, behind the training.

    Attributes:
        seconds: seconds of a full step at the modal length, round by round.
    """

    seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Finished(Event):
    """All is done.

    Attributes:
        steps: number of steps done.
    """

    steps: int


@dataclass(frozen=True, slots=True)
class Closed(Event):
    """The job ends.

    Attributes:
        exit_code: 0 for success, else 1.
    """

    exit_code: int
