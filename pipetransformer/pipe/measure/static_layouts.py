"""The step time of every static layout, measured before training.

The best static layout is the baseline of an elastic run, and its step time is t0 of the compute floor. The timed steps
are real steps with learning rate 0, so that no bit of the weights changes. Their optimizer state is deleted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING

import torch.distributed as dist

from pipetransformer.data import Batch
from pipetransformer.pipe.measure.workload import Workload
from pipetransformer.pipe.planner.costs import line
from pipetransformer.pipe.planner.search import Prediction
from pipetransformer.plan import ParallelPlan
from pipetransformer.process.collectives import slowest
from pipetransformer.process.device import synchronize

if TYPE_CHECKING:
    from pipetransformer.engine import Engine


_LONGEST_TIMING = 0.8  # seconds that one timing may take, warm-up included; two steps may take longer


@dataclass(frozen=True, slots=True)
class StaticLayouts:
    """The best unfrozen layout of every pipeline length, with its times.

    Attributes:
        plans: the layouts by pp.
        seconds: seconds of a full step by pp and padded length.
        mean_seconds: mean of these seconds by pp, weighted by the number of samples of each length.
        best_pp: pp of the fastest layout.
        corrections: measured step time divided by predicted step time, by pp, at the modal length.
        timed_samples: number of samples of a timed step.
        fastest_move: seconds of the fastest move to one of these layouts.
    """

    plans: dict[int, ParallelPlan]
    seconds: dict[int, dict[int, float]]
    mean_seconds: dict[int, float]
    best_pp: int
    corrections: dict[int, float]
    timed_samples: int
    fastest_move: float

    @property
    def floor_seconds(self) -> dict[int, float]:
        """t0 of the compute floor by padded length, in seconds."""
        return self.seconds[self.best_pp]


def time_static_layouts(predictions: Sequence[Prediction], *, engine: Engine, workload: Workload) -> StaticLayouts:
    """Collective. Times real steps of every layout, with learning rate 0. Their optimizer state is deleted.

    Args:
        predictions: the best unfrozen plan of each pipeline length.
        workload: the padded lengths to be timed.
    """
    counts, modal = workload.counts, workload.modal_length
    plans: dict[int, ParallelPlan] = {}
    seconds: dict[int, dict[int, float]] = {}
    corrections: dict[int, float] = {}
    fastest_move = inf
    for prediction in predictions:
        plan = prediction.plan
        fastest_move = min(fastest_move, engine.enter(plan).seconds)
        timed = {length: _time_steps(engine, workload.examples[length]) for length in workload.lengths}
        times = {length: line(length, timed) for length in counts}
        engine.forget_steps()
        plans[plan.pp], seconds[plan.pp] = plan, times
        corrections[plan.pp] = times[modal] / prediction.step_seconds
    num_samples = sum(counts.values())
    means = {pp: sum(times[n] * counts[n] for n in times) / num_samples for pp, times in seconds.items()}
    best_pp = min(means, key=lambda pp: (means[pp], pp))
    return StaticLayouts(plans, seconds, means, best_pp, corrections, len(workload.examples[modal].ids), fastest_move)


def _time_steps(engine: Engine, batch: Batch) -> float:
    """Collective. Median seconds of a step on ``batch`` after a warm-up, on the slowest rank.

    Long steps are repeated less: noise is a smaller part of them, and set-up must not take longer than a short job.
    """
    repeats, times = 5, list[float]()
    batches = engine.feed("train").batches([batch] * (repeats + 1), epoch=0)
    engine.chain.train()
    dist.barrier()
    while len(times) <= repeats:
        start = perf_counter()
        engine.step(next(batches), step=len(times), lr=0.0)
        synchronize(engine.chain.device)
        times.append(perf_counter() - start)
        if len(times) == 1:
            repeats = min(repeats, max(1, int(_LONGEST_TIMING / slowest(times[0])) - 1))
    batches.close()
    return slowest(median(times[1:]))
