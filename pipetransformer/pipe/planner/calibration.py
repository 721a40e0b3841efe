"""Real seconds of a step from simulated ones: a line for each layout, through steps that were timed.

The simulator adds up kernels and messages. A real step has a constant beside (Python, launches of kernels, the
optimizer's bookkeeping), which is most of a step where nearly all blocks are frozen, and its kernels run faster or
slower than measured alone. Before training, each length is timed with nothing frozen and with as much frozen as it can
be; in training, every plan that runs adds a point, and tells how fast the machine is now. All layouts of a pipeline
length share its line; one whose own steps were timed has its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from pipetransformer.plan import Layout, ParallelPlan

_LIVE_WEIGHT = 3.0  # of a mean over training steps, beside a timing before training


@dataclass(frozen=True, slots=True)
class Line:
    """Real seconds of a step: ``constant`` + ``slope`` x simulated seconds."""

    constant: float = 0.0
    slope: float = 1.0

    def seconds(self, simulated: float) -> float:
        return self.constant + self.slope * simulated

    def ns(self, simulated_ns: int) -> int:
        """The same in whole nanoseconds, alike on every rank."""
        return round(1e9 * self.constant + self.slope * simulated_ns)

    def times(self, factor: float) -> Line:
        """The line of a machine that is slower by ``factor``."""
        return Line(self.constant * factor, self.slope * factor)


AS_SIMULATED = Line()


@dataclass(frozen=True, slots=True)
class Lines:
    """The line of every plan.

    Attributes:
        by_layout: lines of the layouts whose own steps were timed.
        by_length: for any other layout, the line of all steps that were timed at its pp.
        common: for any other length, the line of all steps that were timed.
    """

    by_layout: Mapping[Layout, Line] = field(default_factory=dict)
    by_length: Mapping[int, Line] = field(default_factory=dict)
    common: Line = AS_SIMULATED

    def of(self, plan: ParallelPlan) -> Line:
        """The line of a plan, by its layout."""
        return self.by_layout.get(plan.layout) or self.by_length.get(plan.pp, self.common)


NO_LINES = Lines()
"""Nothing was timed: real seconds are taken to be the simulated ones."""


@dataclass(frozen=True, slots=True)
class Point:
    """A timed step.

    Attributes:
        simulated: seconds by the simulator.
        real: seconds by the clock.
        weight: how much it counts beside others.
    """

    simulated: float
    real: float
    weight: float = 1.0


def fitted(points: Sequence[Point]) -> Line:
    """The line with the least squares of relative errors, with a constant and a slope that are not negative.

    Through one point, or points that ask for a constant below 0, the line without a constant; where longer steps are no
    slower, the constant alone.
    """
    # Each error is (constant + slope x - y) / y: a weighted problem in u = 1 / y and v = x / y against 1.
    uu = sum(p.weight / p.real**2 for p in points)
    uv = sum(p.weight * p.simulated / p.real**2 for p in points)
    vv = sum(p.weight * p.simulated**2 / p.real**2 for p in points)
    u = sum(p.weight / p.real for p in points)
    v = sum(p.weight * p.simulated / p.real for p in points)
    determinant = uu * vv - uv * uv
    if determinant > 1e-6 * uu * vv:
        constant, slope = (u * vv - v * uv) / determinant, (v * uu - u * uv) / determinant
        if slope <= 0:
            return Line(u / uu, 0.0)
        if constant >= 0:
            return Line(constant, slope)
    return Line(0.0, v / vv) if vv else AS_SIMULATED


@dataclass(frozen=True, slots=True)
class Observed:
    """Steps of a plan in training.

    Attributes:
        work: mean work of the steps, as a share of a full step at the modal length.
        seconds: mean seconds of the steps.
    """

    work: float
    seconds: float


def lines_of(
    timed: Mapping[ParallelPlan, float],
    observed: Mapping[ParallelPlan, Observed],
    *,
    simulated: Callable[[ParallelPlan], float],
) -> Lines:
    """The lines of all steps that were timed.

    Args:
        timed: seconds of a full step before training, by plan.
        observed: steps in training by plan, the latest plan last. It tells the speed of the machine now: all that was
            timed before training is taken to be slower or faster by the same factor.
        simulated: seconds of a full step by the simulator.
    """
    lines = _through([(plan, Point(simulated(plan), seconds)) for plan, seconds in timed.items()])
    if not observed:
        return lines
    latest, seen = list(observed.items())[-1]
    drift = seen.seconds / lines.of(latest).seconds(simulated(latest) * seen.work)
    before = [(plan, Point(simulated(plan), drift * seconds)) for plan, seconds in timed.items()]
    live = [(plan, Point(simulated(plan) * seen.work, seen.seconds, _LIVE_WEIGHT)) for plan, seen in observed.items()]
    return _through([*before, *live])


def _through(points: Sequence[tuple[ParallelPlan, Point]]) -> Lines:
    by_layout, by_length = defaultdict[Layout, list[Point]](list), defaultdict[int, list[Point]](list)
    for plan, point in points:
        by_layout[plan.layout].append(point)
        by_length[plan.pp].append(point)
    lengths = {pp: fitted(own) for pp, own in by_length.items()}
    layouts = {layout: _own_line(own, lengths[layout.pp]) for layout, own in by_layout.items()}
    return Lines(layouts, lengths, fitted([point for _, point in points]))


def _own_line(points: Sequence[Point], common: Line) -> Line:
    """The line of a layout: through its own points where these are far apart; else its pipeline length's, made slower
    or faster so that it goes through their middle."""
    works = [point.simulated for point in points]
    if max(works) >= 2 * min(works):
        return fitted(points)
    ratios = [point.weight * point.real / common.seconds(point.simulated) for point in points]
    return common.times(sum(ratios) / sum(point.weight for point in points))
