"""Real seconds of a step from simulated ones: a line for each pipeline length, through steps that were timed.

The simulator adds up kernels and messages. A real step has a constant beside (Python, launches of kernels, the
optimizer's bookkeeping), which is most of a step where nearly all blocks are frozen, and its kernels run faster or
slower than measured alone. Before training, each length is timed with nothing frozen and with as much frozen as it can
be; in training, every plan that runs adds a point, and tells how fast the machine is now.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from pipetransformer.plan import ParallelPlan

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
    lengths: Iterable[int],
    simulated: Callable[[ParallelPlan], float],
) -> dict[int, Line]:
    """The line of each of the pipeline ``lengths``: one that no step tells of has that of all steps together.

    Args:
        timed: seconds of a full step before training, by plan.
        observed: steps in training by plan, the latest plan last. It tells the speed of the machine now: all that was
            timed before training is taken to be slower or faster by the same factor.
        simulated: seconds of a full step by the simulator.
    """
    points_of = {
        pp: [Point(simulated(plan), seconds) for plan, seconds in timed.items() if plan.pp == pp] for pp in lengths
    }
    every = [point for points in points_of.values() for point in points]
    before = {pp: fitted(points or every) for pp, points in points_of.items()}
    if not observed:
        return before
    latest, seen = list(observed.items())[-1]
    drift = seen.seconds / before[latest.pp].seconds(simulated(latest) * seen.work)
    lines = {pp: line.times(drift) for pp, line in before.items()}
    for pp in {plan.pp for plan in observed}:
        points = [Point(simulated(p), drift * seconds) for p, seconds in timed.items() if p.pp == pp]
        points += [
            Point(simulated(p) * seen.work, seen.seconds, _LIVE_WEIGHT) for p, seen in observed.items() if p.pp == pp
        ]
        lines[pp] = fitted(points)
    return lines
