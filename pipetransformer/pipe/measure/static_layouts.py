"""The step time of every static layout, measured before training.

The best static layout is the honest baseline of an elastic run: its step time is t0 of the compute floor. The timed
steps are real ones with learning rate 0, so that weights stay as they are to the bit; optimizer state is thrown away.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import torch.distributed as dist

from pipetransformer.data import Batch
from pipetransformer.engine.feed import Feed
from pipetransformer.engine.layout import Layout
from pipetransformer.engine.step import Stepper
from pipetransformer.pipe.measure.profile import Measurements
from pipetransformer.pipe.measure.workload import full_batches, samples_by_length
from pipetransformer.pipe.planner.costs import JobCosts, line
from pipetransformer.pipe.planner.search import Prediction
from pipetransformer.plan import ParallelPlan
from pipetransformer.process.collectives import slowest
from pipetransformer.process.device import synchronize

__all__ = ["Calibration", "calibrate"]

_LONGEST_TIMING = 0.8  # seconds that one timing may take, warm-up included, unless two steps take longer


@dataclass(frozen=True, slots=True)
class Calibration:
    """What the planner and the compute floor know.

    Attributes:
        measurements: unit, link and update costs.
        static_plans: the layouts that were timed, by pp; static_seconds: their full step by pp and padded length.
        mean_seconds: of these steps by pp, each padded length weighted by how often it comes. best_pp: the fastest.
        corrections: measured over predicted step time by pp, at the modal length.
        timed_samples: samples of a timed step.
    """

    measurements: Measurements
    static_plans: dict[int, ParallelPlan]
    static_seconds: dict[int, dict[int, float]]
    mean_seconds: dict[int, float]
    best_pp: int
    corrections: dict[int, float]
    timed_samples: int

    @property
    def floor_seconds(self) -> dict[int, float]:
        """t0 by padded length."""
        return self.static_seconds[self.best_pp]


def calibrate(
    plans_for: Callable[[JobCosts], Sequence[Prediction]],
    *,
    enter_plan: Callable[[ParallelPlan], tuple[Layout, Feed]],
    stepper: Stepper,
    measurements: Measurements,
    batches: Sequence[Batch],
) -> Calibration:
    """Collective. Times real steps of every static layout, learning rate 0; optimizer state is thrown away.

    Args:
        plans_for: the best unfrozen plan of each pipeline length. enter_plan: moves the job to a plan.
    """
    counts = samples_by_length(batches)
    example = full_batches(batches)
    modal = measurements.modal_length
    plans: dict[int, ParallelPlan] = {}
    seconds: dict[int, dict[int, float]] = {}
    corrections: dict[int, float] = {}
    for prediction in plans_for(measurements.job):
        plan = prediction.plan
        layout, feed = enter_plan(plan)
        times = {
            length: _time_steps(layout, feed, example[length], stepper=stepper)
            for length in measurements.measured_lengths
        }
        times = {length: line(length, times) for length in counts}
        layout.forget_state()
        plans[plan.pp], seconds[plan.pp] = plan, times
        corrections[plan.pp] = times[modal] / prediction.step_seconds
    num_samples = sum(counts.values())
    means = {pp: sum(times[n] * counts[n] for n in times) / num_samples for pp, times in seconds.items()}
    best_pp = min(means, key=lambda pp: (means[pp], pp))
    stepper.clear()
    return Calibration(measurements, plans, seconds, means, best_pp, corrections, timed_samples=len(example[modal].ids))


def _time_steps(layout: Layout, feed: Feed, batch: Batch, *, stepper: Stepper) -> float:
    """Median seconds of a step on ``batch`` after a warm-up, of the slowest rank.

    Long steps are repeated less: noise is a smaller part of them, and set-up should not outlast a short job.
    """
    device = next(iter(layout.parameters.values())).device
    repeats, times = 5, list[float]()
    batches = feed.batches([batch] * (repeats + 1), epoch=0)
    dist.barrier()
    while len(times) <= repeats:
        start = perf_counter()
        stepper.run(layout, feed, next(batches), step=len(times), lr=0.0)
        synchronize(device)
        times.append(perf_counter() - start)
        if len(times) == 1:
            repeats = min(repeats, max(1, int(_LONGEST_TIMING / slowest(times[0])) - 1))
    batches.close()
    return slowest(median(times[1:]))
