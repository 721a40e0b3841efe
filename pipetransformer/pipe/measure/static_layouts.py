"""The step time of every static layout, measured before training.

The best static layout is the honest baseline of an elastic run: its step time is t0 of the compute floor. The timed
steps are real ones with learning rate 0, so that weights stay as they are to the bit; optimizer state is thrown away.
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
from pipetransformer.pipe.measure.profile import Measurements
from pipetransformer.pipe.measure.workload import full_batches, samples_by_length
from pipetransformer.pipe.planner.costs import line
from pipetransformer.pipe.planner.search import Prediction
from pipetransformer.plan import ParallelPlan
from pipetransformer.process.collectives import slowest
from pipetransformer.process.device import synchronize

if TYPE_CHECKING:
    from pipetransformer.engine import Engine

__all__ = ["StaticLayouts", "time_static_layouts"]

_LONGEST_TIMING = 0.8  # seconds that one timing may take, warm-up included, unless two steps take longer


@dataclass(frozen=True, slots=True)
class StaticLayouts:
    """The best unfrozen layout of every pipeline length, timed.

    Attributes:
        plans: the layouts by pp.
        seconds: their full step by pp and padded length.
        mean_seconds: of these steps by pp, each padded length weighted by how often it comes.
        best_pp: the pp of the fastest.
        corrections: measured over predicted step time by pp, at the modal length.
        timed_samples: samples of a timed step.
        fastest_move: seconds of the fastest move between them.
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
        """t0 by padded length."""
        return self.seconds[self.best_pp]


def time_static_layouts(
    predictions: Sequence[Prediction], *, engine: Engine, costs: Measurements, batches: Sequence[Batch]
) -> StaticLayouts:
    """Collective. Times real steps of every layout, learning rate 0; optimizer state is thrown away.

    Args:
        predictions: the best unfrozen plan of each pipeline length.
        batches: an epoch's.
    """
    counts, example, modal = samples_by_length(batches), full_batches(batches), costs.modal_length
    plans: dict[int, ParallelPlan] = {}
    seconds: dict[int, dict[int, float]] = {}
    corrections: dict[int, float] = {}
    fastest_move = inf
    for prediction in predictions:
        plan = prediction.plan
        fastest_move = min(fastest_move, engine.enter(plan).seconds)
        timed = {length: _time_steps(engine, example[length]) for length in costs.measured_lengths}
        times = {length: line(length, timed) for length in counts}
        engine.forget_steps()
        plans[plan.pp], seconds[plan.pp] = plan, times
        corrections[plan.pp] = times[modal] / prediction.step_seconds
    num_samples = sum(counts.values())
    means = {pp: sum(times[n] * counts[n] for n in times) / num_samples for pp, times in seconds.items()}
    best_pp = min(means, key=lambda pp: (means[pp], pp))
    return StaticLayouts(plans, seconds, means, best_pp, corrections, len(example[modal].ids), fastest_move)


def _time_steps(engine: Engine, batch: Batch) -> float:
    """Median seconds of a step on ``batch`` after a warm-up, of the slowest rank.

    Long steps are repeated less: noise is a smaller part of them, and set-up should not outlast a short job.
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
