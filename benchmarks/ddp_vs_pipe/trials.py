"""Measurements of layouts on fresh ranks: seconds and memory of steps, phases of an all-frozen step, state, costs.

The functions run on every rank (``FreshRanks.run``). Model, data, plans and steps are the trainer's own parts.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from pipetransformer.cache import AutoCache
from pipetransformer.config import Config
from pipetransformer.data import Batch, epoch_batches
from pipetransformer.engine import Engine, Feed, StepInput
from pipetransformer.engine.optim import build_optimizer
from pipetransformer.models import Stage
from pipetransformer.pipe.measure.profile import measure_profile
from pipetransformer.pipe.measure.workload import Workload, full_batches
from pipetransformer.pipe.planner.costs import JobCosts
from pipetransformer.plan import ParallelPlan
from pipetransformer.process.collectives import led_by, slowest
from pipetransformer.process.device import peak_memory_bytes, reset_peak_memory, synchronize
from pipetransformer.process.heap import release_freed_memory
from pipetransformer.process.world import World
from pipetransformer.run.job import Job, build_job

__all__ = [
    "Probe",
    "RankJob",
    "State",
    "Steps",
    "Trial",
    "hold_state",
    "measure_costs",
    "probe_frozen",
    "time_in_turn",
    "time_steps",
]

_WARM_UP = 1  # steps that are not counted: the first takes the optimizer's memory and builds the schedule


@dataclass(frozen=True, slots=True)
class Trial:
    """One measurement.

    Attributes:
        ddp_bucket_mb: torch's ``DistributedDataParallel`` with buckets of this size in the place of ``plan``, which
            says only that all ranks are replicas, and M; None runs the plan.
        batch: global batch size. steps: that are timed.
    """

    config: Config
    plan: ParallelPlan
    ddp_bucket_mb: int | None
    batch: int
    steps: int


@dataclass(frozen=True, slots=True)
class Steps:
    """Seconds of a step, the slowest rank's, and the most memory that this rank held over what it held before."""

    seconds: float
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Probe:
    """Seconds of a step and of its phases, the slowest rank's, and bytes of gradient that a rank gave to the sum."""

    seconds: float
    data: float
    forward: float
    backward: float
    sent_bytes: int


@dataclass(frozen=True, slots=True)
class State:
    """What a rank trains, in parameters; its most memory; bytes of gradient that it gave to the sum of a step, or None
    where torch's DDP does not tell."""

    num_parameters: int
    peak_bytes: int
    sent_bytes: int | None


def time_in_turn(world: World, trials: tuple[Trial, ...]) -> list[float]:
    """Seconds of a step of each, one after the other in the same processes."""
    return [time_steps(world, trial).seconds for trial in trials]


def hold_state(world: World, trial: Trial) -> State:
    """What a rank holds under the trial's plan, after a warm-up step has taken the optimizer's memory."""
    own = RankJob(world, trial)
    is_ddp = trial.ddp_bucket_mb is not None
    peak_bytes = _timed(own, trial).peak_bytes
    if is_ddp:
        return State(sum(p.numel() for p in own.job.chain.model.parameters()), peak_bytes, None)
    layout = own.engine.layout
    return State(sum(p.numel() for p in layout.parameters.values()), peak_bytes, layout.reducer.sent_bytes)


def time_steps(world: World, trial: Trial) -> Steps:
    return _timed(RankJob(world, trial), trial)


def _timed(own: RankJob, trial: Trial) -> Steps:
    device = own.job.chain.device
    step = own.plan_step() if trial.ddp_bucket_mb is None else own.ddp_step(bucket_mb=trial.ddp_bucket_mb)
    gc.collect()
    reset_peak_memory(device)
    incoming = own.feed().batches([own.batch] * (_WARM_UP + trial.steps), epoch=0)
    for _ in range(_WARM_UP):
        step(next(incoming))
    synchronize(device)
    dist.barrier()
    start = perf_counter()
    for _ in range(trial.steps):
        step(next(incoming))
    synchronize(device)
    seconds = slowest(perf_counter() - start) / trial.steps
    return Steps(seconds, peak_memory_bytes(device) - own.start_bytes)


def probe_frozen(world: World, trial: Trial) -> Probe:
    """Steps of a plan that leaves the head alone active; phases are synchronised with the device, as CUDA events are,
    and follow one another: loading too.

    The boundary of the last block is cached before where the plan says so. The warm-up has one row a rank: a step of
    the original's size takes minutes on a CPU.
    """
    own = RankJob(world, trial)
    plan, device, chain = trial.plan, world.device, own.job.chain
    assert plan.frozen == plan.num_blocks and plan.pp == 1, plan
    own.engine.enter(plan)
    if plan.cached is not None:
        own.fill_cache(boundary=plan.cached)
    layout, feed = own.engine.layout, own.engine.feed("train")
    head = Stage(chain, range(chain.num_units - 1, chain.num_units))
    order = [own.small_batch()] * _WARM_UP + [own.batch] * trial.steps
    sums = np.zeros(4)
    for number, wanted in enumerate(order):
        dist.barrier()
        times = [perf_counter()]
        batch = next(feed.batches([wanted], epoch=0))  # none is read ahead, or its reading would be in no phase
        times.append(perf_counter())
        own.objective.begin(step=number, batch_size=batch.global_count)
        layout.reducer.begin(num_microbatches=1)
        feed.enter(batch)
        loss = own.objective(head(batch.hidden), batch.labels)
        synchronize(device)
        times.append(perf_counter())
        torch.autograd.backward(loss)
        synchronize(device)
        times.append(perf_counter())
        layout.reducer.finish()
        layout.optimizer.step()
        synchronize(device)
        data, forward, backward, rest = np.diff([*times, perf_counter()])
        if number >= _WARM_UP:
            sums += (slowest(data + forward + backward + rest), slowest(data), slowest(forward), slowest(backward))
    own.cache.close()
    seconds, data, forward, backward = map(float, sums / trial.steps)
    return Probe(seconds, data, forward, backward, sent_bytes=layout.reducer.sent_bytes)


def measure_costs(world: World, trial: Trial) -> JobCosts:
    """The costs that the planner cuts by, of micro-batches as the trial's batch would be cut."""
    own = RankJob(world, trial)
    data, plan = own.job.datasets["train"], trial.plan
    rows = trial.batch // (plan.dp * plan.num_microbatches)
    length = own.batch.length
    workload = Workload(
        Counter({length: rows}),
        modal_length=length,
        lengths=(length,),
        share=rows,
        rows=(rows,),
        examples=full_batches([own.batch]),
    )
    return measure_profile(own.job.chain, data, workload=workload, config=trial.config, world=world).job


class RankJob:
    """One rank's job. ``start_bytes``: what the rank holds of its device without the model."""

    def __init__(self, world: World, trial: Trial) -> None:
        self._world, self._plan = world, trial.plan
        self.job: Job = build_job(trial.config, world, lead=partial(led_by, 0))
        chain, data = self.job.chain, self.job.datasets["train"]
        train = trial.config.train.model_copy(update={"batch_size": trial.batch})
        config = self._config = trial.config.model_copy(update={"train": train})
        self.cache = AutoCache(config, chain=chain, datasets=self.job.datasets, world=world)
        self.engine = Engine(chain, self.job.datasets, config, world, stores=self.cache.store)
        self.objective = self.engine.objective
        order = epoch_batches(data.lengths, batch_size=trial.batch, seed=0, epoch=0)
        ids = np.concatenate([batch.ids for batch in order])
        # A batch may be larger than the data: samples come again.
        self.batch = Batch(0, (np.resize(ids, trial.batch),), length=int(data.lengths[0]))
        self.start_bytes = 0
        if world.device.type == "cpu":
            gc.collect()
            release_freed_memory()
            weights = sum(p.numel() * p.element_size() for p in chain.model.parameters() if not p.is_meta)
            self.start_bytes = psutil.Process().memory_info().rss - weights

    def feed(self) -> Feed:
        """This rank's share of batches, computed from the inputs."""
        data, num_workers = self.job.datasets["train"], self._config.data.num_workers
        return Feed(
            self.job.chain,
            data,
            self._plan,
            rank=self._world.rank,
            store=None,
            num_workers=num_workers,
            skips_masks=True,
        )

    def plan_step(self) -> Callable[[StepInput], None]:
        self.engine.enter(self._plan)
        self.job.chain.train()
        return partial(self.engine.step, step=0, lr=0.0)

    def ddp_step(self, *, bucket_mb: int) -> Callable[[StepInput], None]:
        """torch's own data parallelism, the settings that cost least: gradients lie in its buckets, and the graph is
        known to be the same in every step. There is no buffer to send.

        M micro-batches sum their gradients under ``no_sync``, without ``static_graph``. One small backward comes first:
        gradients that a first ``no_sync`` makes would lie beside the buckets, another copy of the model.
        """
        chain, device, feed = self.job.chain, self._world.device, self.feed()
        m = self._plan.num_microbatches
        self.job.whole_model().train()
        model = DistributedDataParallel(
            chain.model,
            device_ids=[device] if device.type == "cuda" else None,
            bucket_cap_mb=bucket_mb,
            gradient_as_bucket_view=True,
            static_graph=m == 1,
        )
        optimizer = build_optimizer(self._config.train, dict(chain.model.named_parameters()), {})
        for group in optimizer.param_groups:
            group["lr"] = 0.0

        def backward(batch: StepInput, *, num_microbatches: int) -> None:
            feed.enter(batch)
            # The mean over its own rows: DDP takes the mean over the replicas.
            self.objective.begin(step=0, batch_size=batch.rows)
            optimizer.zero_grad(set_to_none=m == 1)
            assert batch.hidden is not None
            parts = zip(batch.hidden.chunk(num_microbatches), batch.labels.chunk(num_microbatches))
            for number, (rows, labels) in enumerate(parts, start=1):
                with nullcontext() if number == num_microbatches else model.no_sync():
                    with chain.autocast():
                        outputs = model(rows)
                    torch.autograd.backward(self.objective(outputs, labels))

        def step(batch: StepInput) -> None:
            backward(batch, num_microbatches=m)
            optimizer.step()

        if m > 1:
            backward(next(feed.batches([self.small_batch()], epoch=0)), num_microbatches=1)
        return step

    def small_batch(self) -> Batch:
        """One row a rank."""
        return replace(self.batch, parts=(self.batch.ids[: self._world.size],))

    def fill_cache(self, *, boundary: int) -> None:
        """With the activations that leave block ``boundary`` - 1, of all samples."""
        declined = self.cache.reserve()
        assert not declined, declined
        self.cache.advance(boundary)
