"""What is measured before training: unit costs, link and update costs, and the step time of every static layout.

The best static layout is the honest baseline of an elastic run: its step time is t0 of the compute floor. The timed
steps are real ones with learning rate 0, so that weights stay as they are to the bit; optimizer state is thrown away.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter

import numpy as np
import torch
import torch.distributed as dist

from pipetransformer.config import TrainConfig
from pipetransformer.data import Batch, Dataset
from pipetransformer.distributed import World, synchronize
from pipetransformer.feed import Feed
from pipetransformer.layout import Layout
from pipetransformer.models import Chain
from pipetransformer.optim import build_optimizer
from pipetransformer.pipe.costs import JobCosts, UnitCosts, at_length, line
from pipetransformer.pipe.planner import Prediction, microbatch_choices
from pipetransformer.pipe.profile import profile_units
from pipetransformer.plan import ParallelPlan
from pipetransformer.step import Stepper

__all__ = ["Calibration", "Measurements", "calibrate", "measure_costs"]

_LINK_BYTES = 2**22
_UPDATE_BYTES = 2**26  # far more than a cache holds, as weights and moments are
_LONGEST_TIMING = 1.0  # seconds that one timing may take, warm-up included, unless two steps take longer
_RARE = 0.1
"""A padded length of a smaller share of samples is not measured."""


@dataclass(frozen=True, slots=True)
class Measurements:
    """What is known before training.

    Attributes:
        job: costs at the padded length that most samples have, ``modal_length``.
        by_length: unit costs of every padded length. measured_lengths: the modal one, and one far from it if there is
            one that is not rare; the others' costs are on the line through these.
    """

    job: JobCosts
    by_length: dict[int, UnitCosts]
    modal_length: int
    measured_lengths: tuple[int, ...]
    memcpy_bytes_per_second: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """What the planner and the compute floor know.

    Attributes:
        measurements: unit, link and update costs.
        static_plans: the layouts that were timed, by pp; static_seconds: their full step by pp and padded length.
        best_pp: the pipeline length whose steps, weighted by how often each padded length comes, are fastest.
        corrections: measured over predicted step time by pp, at the modal length.
        timed_samples: samples of a timed step.
    """

    measurements: Measurements
    static_plans: dict[int, ParallelPlan]
    static_seconds: dict[int, dict[int, float]]
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
    counts = _samples_by_length(batches)
    example = _full_batches(batches)
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
    total = {pp: sum(times[length] * counts[length] for length in times) for pp, times in seconds.items()}
    best_pp = min(total, key=lambda pp: (total[pp], pp))
    stepper.clear()
    return Calibration(measurements, plans, seconds, best_pp, corrections, timed_samples=len(example[modal].ids))


def _samples_by_length(batches: Sequence[Batch]) -> Counter[int]:
    counts = Counter[int]()
    for batch in batches:
        counts[batch.length] += len(batch.ids)
    return counts


def _full_batches(batches: Sequence[Batch]) -> dict[int, Batch]:
    """A batch of every padded length, with as many samples as the largest has (repeated where there are too few)."""
    full = [max(map(len, parts)) for parts in zip(*(batch.parts for batch in batches))]
    longest = {batch.length: batch for batch in sorted(batches, key=len)}
    return {
        length: replace(batch, parts=tuple(np.resize(batch.ids, size) for size in full))
        for length, batch in longest.items()
    }


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
            repeats = min(repeats, max(1, int(_LONGEST_TIMING / _of_slowest_rank(times[0])) - 1))
    batches.close()
    return _of_slowest_rank(median(times[1:]))


def _of_slowest_rank(seconds: float) -> float:
    slowest = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


def measure_costs(
    chain: Chain,
    dataset: Dataset,
    *,
    batches: Sequence[Batch],
    pipeline_lengths: Sequence[int],
    train: TrainConfig,
    world: World,
    microbatches: int | None,
) -> Measurements:
    """Collective. Profiles the chain, whole on every rank, on real samples; each figure is the maximum over the ranks.

    Args:
        batches: an epoch's batches. microbatches: a fixed M, or None.
    """
    counts, example = _samples_by_length(batches), _full_batches(batches)
    modal = min(counts, key=lambda length: (-counts[length], length))
    frequent = [length for length in sorted(counts) if counts[length] >= _RARE * sum(counts.values())]
    far = max(frequent, key=lambda length: (abs(length - modal), length), default=modal)
    measured_lengths = (modal,) if far == modal else (modal, far)
    chain.train()

    def profile(length: int, rows: int) -> UnitCosts:
        ids = np.resize(example[length].ids, rows)
        raw = {key: v.to(chain.device) for key, v in dataset.inputs(ids, length=length, epoch=0).items()}
        inputs = {key: raw[key] for key in chain.input_keys}
        return _maximum(profile_units(chain, raw[chain.family.main_input], inputs, length=length))

    share = -(-train.batch_size // world.size)
    measured = {length: profile(length, share) for length in measured_lengths}
    rows_wanted = {share}
    for pp in pipeline_lengths:
        replica_share = -(-train.batch_size // (world.size // pp))
        choices = (microbatches,) if microbatches is not None else microbatch_choices(replica_share, pp=pp)
        rows_wanted |= {-(-replica_share // m) for m in choices}
    by_rows = {rows: measured[modal] if rows == share else profile(modal, rows) for rows in sorted(rows_wanted)}
    parameter_bytes = tuple(
        sum(p.numel() * p.element_size() for p in chain.named_parameters([unit]).values())
        for unit in range(chain.num_units)
    )
    figures = torch.tensor(
        [
            _reduce_seconds_per_byte(world, chain),
            _update_seconds_per_byte(train, chain),
            *_send_seconds(world, chain),
            _memcpy_seconds_per_byte(),
        ],
        dtype=torch.float64,
        device=chain.device,
    )
    dist.all_reduce(figures, op=dist.ReduceOp.MAX)
    reduce_s, update_s, send_s, latency_s, memcpy_s = figures.tolist()
    states = 2 if train.optimizer == "adamw" else int(train.momentum > 0)
    job = JobCosts(
        by_rows=by_rows,
        parameter_bytes=parameter_bytes,
        optimizer_factor=1.0 + states,
        reduce_ns_per_byte=reduce_s * 1e9,
        update_ns_per_byte=update_s * 1e9,
        send_ns_per_byte=send_s * 1e9,
        send_latency_ns=round(latency_s * 1e9),
    )
    by_length = {length: at_length(length, measured) for length in sorted(counts)}
    return Measurements(job, by_length, modal, measured_lengths, 1.0 / memcpy_s)


def _maximum(costs: UnitCosts) -> UnitCosts:
    """The costs as the slowest rank has them: the same integers everywhere."""
    columns = (costs.forward_ns, costs.backward_ns, costs.activation_bytes, costs.boundary_bytes, costs.prefix_ns)
    table = torch.tensor(columns)
    dist.all_reduce(table, op=dist.ReduceOp.MAX)
    return UnitCosts(costs.rows, costs.length, *(tuple(row) for row in table.tolist()))


def _timed(action: Callable[[], object], *, repeats: int = 5) -> float:
    times = []
    for _ in range(repeats + 1):
        start = perf_counter()
        action()
        times.append(perf_counter() - start)
    return median(times[1:])


def _reduce_seconds_per_byte(world: World, chain: Chain) -> float:
    if world.size == 1:
        return 0.0
    buffer = torch.zeros(_LINK_BYTES // 4, device=chain.device)

    def reduce() -> None:
        dist.all_reduce(buffer)
        synchronize(chain.device)

    return _timed(reduce) / _LINK_BYTES


def _update_seconds_per_byte(train: TrainConfig, chain: Chain) -> float:
    zeros = torch.zeros(2048, _UPDATE_BYTES // 4 // 2048, dtype=chain.dtype, device=chain.device)
    parameter = torch.nn.Parameter(zeros)
    parameter.grad = torch.zeros_like(parameter)
    optimizer = build_optimizer(train, {"": parameter}, {})

    def update() -> None:
        optimizer.step()
        synchronize(chain.device)

    return _timed(update) / (parameter.numel() * parameter.element_size())


def _send_seconds(world: World, chain: Chain) -> tuple[float, float]:
    """(seconds a byte, seconds of latency) between neighbours, by real sends between ranks 2k and 2k + 1."""
    peer = world.rank ^ 1
    if peer >= world.size:
        return 0.0, 0.0

    def exchange(num_bytes: int) -> Callable[[], None]:
        buffer = torch.zeros(num_bytes, dtype=torch.uint8, device=chain.device)

        def there_and_back() -> None:
            for sender in (0, 1):
                (dist.send if world.rank % 2 == sender else dist.recv)(buffer, peer)
            synchronize(chain.device)

        return there_and_back

    latency = _timed(exchange(8)) / 2
    return max(0.0, _timed(exchange(_LINK_BYTES)) / 2 - latency) / _LINK_BYTES, latency


def _memcpy_seconds_per_byte() -> float:
    source, target = torch.zeros(2**25, dtype=torch.uint8), torch.zeros(2**25, dtype=torch.uint8)
    return _timed(lambda: target.copy_(source)) / 2**25
