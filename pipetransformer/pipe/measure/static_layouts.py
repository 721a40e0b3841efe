"""The step time of every static layout, measured before training and again at its end.

The best static layout is the baseline of an elastic run, and its step time is t0 of the compute floor. The timed steps
are real steps with learning rate 0, so that no bit of the weights changes. Their optimizer state is deleted.

Layouts and lengths take turns, round after round, so that a slow moment of the machine meets all of them. Beside each
unfrozen layout, the shortest step of its pipeline length is timed: with as many blocks frozen as leave each stage a
unit. It tells the constant of a step (``planner/calibration.py``). A short run has time for the fastest of all these
by prediction, or for a few: the rest is left out.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from time import perf_counter
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from pipetransformer.data import Batch
from pipetransformer.pipe.measure.workload import Workload
from pipetransformer.pipe.planner.costs import line
from pipetransformer.pipe.planner.search import Prediction
from pipetransformer.plan import ParallelPlan
from pipetransformer.process.collectives import slowest
from pipetransformer.process.device import synchronize

if TYPE_CHECKING:
    from pipetransformer.engine import Engine, StepInput


_MOST_ROUNDS = 7
TIMED_STEPS = 2  # of a round, behind a warm-up
_LEAST_SECONDS, _MOST_STEPS = 0.05, 50  # of the steps of a round together, or so many of them


@dataclass(frozen=True, slots=True)
class StaticLayouts:
    """The best layout of every pipeline length that was timed, with nothing frozen that can train, and its times.

    Attributes:
        plans: the layouts by pp.
        seconds: seconds of a full step by pp and padded length.
        mean_seconds: mean of these seconds by pp, weighted by the number of samples of each length.
        best_pp: pp of the fastest layout.
        timed: seconds of a full step at the modal length by plan, with nothing frozen and with all that can be.
        rounds: seconds of a full step of the fastest layout at the modal length, round by round.
        timed_samples: number of samples of a timed step.
        fastest_move: seconds of the fastest move to one of these layouts.
        left_out: lengths of pipelines that fit, but were not timed.
    """

    plans: dict[int, ParallelPlan]
    seconds: dict[int, dict[int, float]]
    mean_seconds: dict[int, float]
    best_pp: int
    timed: dict[ParallelPlan, float]
    rounds: tuple[float, ...]
    timed_samples: int
    fastest_move: float
    left_out: tuple[int, ...] = ()

    @property
    def floor_seconds(self) -> dict[int, float]:
        """t0 of the compute floor by padded length, in seconds."""
        return self.seconds[self.best_pp]

    @property
    def spread(self) -> float | None:
        """The middle half of the rounds, as a share of their median; None for fewer than 3, which tell nothing."""
        if len(self.rounds) < 3:
            return None
        low, middle, high = quantiles(self.rounds, n=4)
        return (high - low) / middle


def time_static_layouts(
    predictions: Sequence[Prediction],
    shortest: Sequence[Prediction],
    *,
    engine: Engine,
    workload: Workload,
    budget_seconds: float,
) -> StaticLayouts:
    """Collective. Times real steps of every layout, with learning rate 0. Their optimizer state is deleted.

    Args:
        predictions: the best unfrozen plan of each pipeline length.
        shortest: for each of these lengths, the best plan with as many frozen blocks as it takes.
        workload: the padded lengths to be timed.
        budget_seconds: seconds that this may take with the same layout's rounds at the end of training. No step is
            begun that would end later, but for those of the fastest layout by prediction, at one length.
    """
    counts, modal = workload.counts, workload.modal_length
    rounds: dict[tuple[ParallelPlan, int], list[float]] = defaultdict(list)
    fastest_move, began = math.inf, perf_counter()
    current: ParallelPlan | None = None
    visits = _visits(predictions, shortest, workload)
    predicted = 0.0  # of all steps so far
    for number in range(1, _MOST_ROUNDS + 1):
        for plan, length in list(visits)[:: 1 if number % 2 else -1]:
            if number == 1 and rounds:  # else there is nothing yet to tell how long predicted seconds take
                of_one = slowest(perf_counter() - began) / predicted
                at_the_end = visits[next(iter(visits))]
                if of_one * (predicted + visits[plan, length] + at_the_end) > budget_seconds:
                    continue
            if plan != current:
                fastest_move, current = min(fastest_move, engine.enter(plan).seconds), plan
            rounds[plan, length].append(time_steps(engine, workload.examples[length], num_steps=TIMED_STEPS))
            predicted += visits[plan, length]
            engine.forget_steps()
        is_whole, visits = len(rounds) == len(visits), {visit: visits[visit] for visit in rounds}
        of_round = slowest(perf_counter() - began) / number
        at_the_end = of_round * next(iter(visits.values())) / sum(visits.values())
        if not is_whole or (number + 1) * (of_round + at_the_end) > budget_seconds:
            break
    timed = {key: median(seconds) for key, seconds in rounds.items()}
    plans = {p.plan.pp: p.plan for p in predictions if (p.plan, modal) in timed}
    seconds = {
        pp: {at: line(at, {n: timed[plan, n] for n in workload.lengths if (plan, n) in timed}) for at in counts}
        for pp, plan in plans.items()
    }
    num_samples = sum(counts.values())
    means = {pp: sum(times[n] * counts[n] for n in times) / num_samples for pp, times in seconds.items()}
    best_pp = min(means, key=lambda pp: (means[pp], pp))
    return StaticLayouts(
        plans,
        seconds,
        means,
        best_pp,
        {plan: seconds for (plan, length), seconds in timed.items() if length == modal},
        tuple(rounds[plans[best_pp], modal]),
        len(workload.examples[modal].ids),
        fastest_move,
        tuple(p.plan.pp for p in predictions if p.plan.pp not in plans),
    )


def _visits(
    predictions: Sequence[Prediction], shortest: Sequence[Prediction], workload: Workload
) -> dict[tuple[ParallelPlan, int], float]:
    """Predicted seconds of a step by layout and padded length, the most telling first: the fastest layout, its shortest
    step, other lengths; then the same of other layouts."""
    modal, visits = workload.modal_length, dict[tuple[ParallelPlan, int], float]()
    for full in sorted(predictions, key=lambda p: (p.step_seconds, p.plan.pp)):
        visits[full.plan, modal] = full.step_seconds
        visits |= {(p.plan, modal): p.step_seconds for p in shortest if p.plan.pp == full.plan.pp}
        lengths = [length for length in workload.lengths if length != modal]
        visits |= {(full.plan, length): full.step_seconds * length / modal for length in lengths}
    return visits


def time_steps(engine: Engine, batch: Batch, *, num_steps: int) -> float:
    """Collective. Median seconds of a step on ``batch`` after a warm-up, on the slowest rank: of more steps than
    ``num_steps`` where they are so short that a few tell nothing.

    Behind a prefix, steps begin with random numbers in place of activations, as if these were read from a cache.
    """
    times = list[float]()
    inputs = engine.feed("train").batches([batch] * (_MOST_STEPS + 1), epoch=0)
    engine.chain.train()
    dist.barrier()
    step = 0
    while step <= num_steps:
        entering = _behind_prefix(next(inputs), engine)
        start = perf_counter()
        engine.step(entering, step=step, lr=0.0, probed=False)
        synchronize(engine.chain.device)
        times.append(perf_counter() - start)
        if step == 1:  # not by the warm-up, which also builds the schedule
            num_steps = max(num_steps, _steps_that_tell(slowest(times[1])))
        step += 1
    inputs.close()
    return slowest(median(times[1:]))


def round_seconds(step_seconds: float, *, num_steps: int) -> float:
    """Seconds that ``time_steps`` takes of steps of ``step_seconds``, with its warm-up."""
    return step_seconds * (1 + max(num_steps, _steps_that_tell(step_seconds)))


def _steps_that_tell(step_seconds: float) -> int:
    return min(_MOST_STEPS, math.ceil(_LEAST_SECONDS / step_seconds))


def _behind_prefix(batch: StepInput, engine: Engine) -> StepInput:
    """``batch`` with random numbers for what the plan would read from a cache.

    Note: zeros stay zeros in a model from scratch, and each layer norm's backward would multiply by a thousand or more.
    """
    plan, chain = engine.plan, engine.chain
    if plan.cached is not None and batch.hidden is not None:
        like = chain.boundary(plan.first_computed - 1, rows=batch.rows, length=batch.length)
        random = torch.Generator(chain.device).manual_seed(0)
        batch.hidden = torch.randn(like.shape, generator=random, dtype=like.dtype, device=chain.device)
        batch.enters = plan.first_computed
    return batch
