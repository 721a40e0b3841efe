"""What is asked of the planner, and its answers: plain records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pipetransformer.pipe.planner.calibration import AS_SIMULATED, Line
from pipetransformer.pipe.planner.costs import JobCosts
from pipetransformer.pipe.planner.search import Prediction
from pipetransformer.plan import ParallelPlan


@dataclass(frozen=True, slots=True)
class Choice:
    """A plan and its reasons.

    Attributes:
        prediction: the plan with its predicted figures.
        transition_seconds: predicted seconds of the transition from the plan before.
        weighed: (pp, schedule, M, cached, predicted seconds of a step) of each candidate.
    """

    prediction: Prediction
    transition_seconds: float
    weighed: tuple[tuple[int, str, int, int | None, float], ...]

    @property
    def plan(self) -> ParallelPlan:
        """The chosen plan."""
        return self.prediction.plan


@dataclass(frozen=True, slots=True)
class Ahead:
    """A part of the rest of a run, as it is predicted.

    Attributes:
        step: the step that it begins at.
        step_seconds: seconds of a mean step.
        spent_seconds: seconds of the transition to it.
        pass_seconds: seconds of a forward of as many samples as an epoch has, from the cache's boundary on.
        cached: the cache's boundary, in blocks; None for no cache.
    """

    step: int
    step_seconds: float
    spent_seconds: float
    pass_seconds: float
    cached: int | None = None


@dataclass(frozen=True, slots=True)
class Outlook:
    """The rest of a run, as a choice counts it.

    Attributes:
        costs: measured costs of the job.
        remaining_steps: number of steps to come, as so many of those that are predicted: of full batches of the most
            common length.
        lines: real seconds of a step from simulated ones, by pp; the same where there is none.
        fixed_seconds: seconds of any transition, beside the moves of weights.
        margin: the gain, as a share, below which another pp, schedule or M may be noise.
    """

    costs: JobCosts
    remaining_steps: float
    lines: Mapping[int, Line] = field(default_factory=dict)
    fixed_seconds: float = 0.0
    margin: float = 0.0

    @property
    def slope(self) -> float:
        """Real seconds of forwards outside of steps over measured ones: those of steps without stages, which is what
        such forwards are; otherwise a cache would seem to save more than its advance pass costs, which computes the
        same. 1 where no line tells.
        """
        return self.lines.get(1, AS_SIMULATED).slope or 1.0


@dataclass(frozen=True, slots=True)
class Settled:
    """The planner's answer to a wanted number of frozen blocks.

    Attributes:
        choice: the plan to take; None if the present one stays.
        frozen: number of frozen blocks from now on.
        reason: the reason for fewer frozen blocks than wanted; empty if there are not fewer.
    """

    choice: Choice | None
    frozen: int
    reason: str = ""
