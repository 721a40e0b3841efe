"""The time that a run has left: measured seconds of the steps so far, and the plans to come as AutoPipe predicts them.

Where the policy looks at nothing but the step, the freezes to come are known, and the answer is one number. Elsewhere
it is a range: from the most blocks that may freeze at the next decision to none any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial, singledispatchmethod
from time import perf_counter

from pipetransformer.cache import AutoCache
from pipetransformer.config.calendar import Calendar
from pipetransformer.freeze import AutoFreeze
from pipetransformer.pipe.controller import AutoPipe
from pipetransformer.pipe.planner.answers import Ahead
from pipetransformer.plan import ParallelPlan
from pipetransformer.run import events

_FEWEST_STEPS = 3  # before measured seconds count
_NOISE = 0.05  # of a range's ends


@dataclass(frozen=True, slots=True)
class Left:
    """Seconds from the start of training, and those to its end: at least and at most; alike where all is known."""

    elapsed: float
    least: float
    most: float


class TimeLeft:
    """Tells how long a run will take. It hears the run's events; nothing here is collective.

    Args:
        evaluated: number of samples of an evaluation, for each one of an epoch.
    """

    def __init__(
        self,
        calendar: Calendar,
        autofreeze: AutoFreeze,
        autopipe: AutoPipe,
        autocache: AutoCache,
        *,
        evaluated: float,
    ) -> None:
        self._evaluated = evaluated
        self._calendar, self._autofreeze, self._autopipe, self._autocache = calendar, autofreeze, autopipe, autocache
        self._paths: tuple[tuple[Ahead, ...], ...] = ()  # predictions of the rest of the run, the present plan first
        self._step, self._began = 0, perf_counter()
        self._plan: ParallelPlan | None = None  # that is not looked behind yet
        self._num_steps, self._seconds, self._ratio = 0, 0.0, 1.0
        self._evaluation: tuple[float, float] | None = None  # seconds of the last one, and those of a pass at it
        self._watch = 0.0  # seconds of a pass of the guard

    def __call__(self, step: int) -> Left | None:
        """The time left behind ``step`` steps; None where nothing was predicted."""
        if not self._paths:
            return None
        ratio = self._ratio
        if self._num_steps >= _FEWEST_STEPS and (predicted := self._paths[0][0].step_seconds):
            ratio = self._seconds / self._num_steps / predicted
        found = sorted(self._of_path(path, step=step, ratio=ratio) for path in self._paths)
        noise = _NOISE if len(found) > 1 else 0.0
        return Left(perf_counter() - self._began, found[0] * (1 - noise), found[-1] * (1 + noise))

    def _of_path(self, path: Sequence[Ahead], *, step: int, ratio: float) -> float:
        calendar, seconds = self._calendar, 0.0
        stops = [*(each.step for each in path[1:]), calendar.total_steps]
        for ahead, stop in zip(path, stops):
            first = max(step, ahead.step)
            seconds += ratio * ahead.step_seconds * max(0, stop - first)
            seconds += ratio * ahead.spent_seconds if ahead.step >= step and ahead is not path[0] else 0.0
            evaluations = calendar.evaluations_from(min(first, stop)) - calendar.evaluations_from(stop)
            seconds += evaluations * self._of_evaluation(ahead, ratio=ratio)
        return seconds + self._autofreeze.passes_from(step) * self._watch + self._autopipe.seconds_behind_training

    def _of_evaluation(self, ahead: Ahead, *, ratio: float) -> float:
        if self._evaluation is None:
            return ratio * ahead.pass_seconds * self._evaluated
        seconds, of_pass = self._evaluation
        return seconds * (ahead.pass_seconds / of_pass if of_pass else 1.0)

    @singledispatchmethod
    def hear(self, event: events.Event) -> None:
        """Takes note of an event that tells seconds or plans."""

    @hear.register
    def _resumed(self, event: events.Resumed) -> None:
        self._step = event.step

    @hear.register
    def _training_starts(self, event: events.TrainingStarts) -> None:
        self._began = perf_counter()
        self._look_ahead(event.plan)

    @hear.register
    def _moved(self, event: events.Moved) -> None:
        self._step, self._plan = event.step, event.plan

    @hear.register
    def _decision_ends(self, event: events.DecisionEnds) -> None:
        if self._plan is not None:
            self._look_ahead(self._plan)

    @hear.register
    def _watched(self, event: events.Watched) -> None:
        self._watch = event.seconds

    @hear.register
    def _logged(self, event: events.Logged) -> None:
        self._num_steps += event.figures.num_steps
        self._seconds += event.figures.seconds

    @hear.register
    def _has_evaluated(self, event: events.Evaluated) -> None:
        if self._paths:
            self._evaluation = event.seconds, self._paths[0][0].pass_seconds

    def _look_ahead(self, plan: ParallelPlan) -> None:
        """Predicts the rest of the run from ``plan`` on."""
        if self._num_steps >= _FEWEST_STEPS and self._paths and (before := self._paths[0][0].step_seconds):
            self._ratio = self._seconds / self._num_steps / before
        self._num_steps, self._seconds, self._plan, step = 0, 0.0, None, self._step
        self._paths = ()
        with suppress(Exception):  # no clock may end a job
            known = self._autofreeze.changes_from(step, frozen=plan.frozen)
            paths = [self._path(plan, changes, step=step) for changes in known]
            self._paths = tuple(path for path in paths if path)

    def _path(self, plan: ParallelPlan, changes: Sequence[tuple[int, int]], *, step: int) -> tuple[Ahead, ...]:
        found, held = list[Ahead](), plan.cached
        for at, frozen in ((step, plan.frozen), *changes):
            offers = partial(
                self._autocache.offers,
                evaluations=self._calendar.evaluations_from(at),
                guard_passes=self._autofreeze.passes_from(at),
            )
            ahead = self._autopipe.ahead(frozen, step=at, current=plan, offers=offers)
            if ahead is None:
                continue
            if ahead.cached not in (None, held):
                source = None if held is not None and held > ahead.cached else held  # a thaw clears the cache
                advance = self._autopipe.seconds_of(self._autocache.advance_work(ahead.cached, held=source))
                ahead = replace(ahead, spent_seconds=ahead.spent_seconds + advance)
            held = ahead.cached
            found.append(ahead)
        return tuple(found)
