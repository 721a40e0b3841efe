"""The measurements before training: unit costs, links, the update of weights, and copies in the host's memory.

All ranks plan by the same figures: each measures a share of the units; links and updates are those of the slowest rank,
contention is the mean. A profile is kept in the user's cache folder. The next job with the same shapes on the same kind
of machine uses it again.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TypedDict

import numpy as np
import torch
import torch.distributed as dist

from pipetransformer.adapter import keeps_boundaries
from pipetransformer.config import Config, TrainConfig
from pipetransformer.data import Batch, Dataset, cache_folder, channels_of, known_classes
from pipetransformer.engine.optim import build_optimizer, optimizer_factor, tables_by_row
from pipetransformer.errors import UserError
from pipetransformer.models import Chain
from pipetransformer.pipe.measure.links import between_seconds, median_seconds, reduction_seconds, send_seconds
from pipetransformer.pipe.measure.profile_file import Profile, file_name, load_profile, save_profile
from pipetransformer.pipe.measure.units import Microbatch, prefix_seconds, profile_units
from pipetransformer.pipe.measure.workload import Workload
from pipetransformer.pipe.planner.choice import schedules_of
from pipetransformer.pipe.planner.costs import JobCosts, Link, UnitCosts
from pipetransformer.process.collectives import slowest, smallest, total
from pipetransformer.process.device import device_memory, device_name, synchronize
from pipetransformer.process.world import World

_UPDATE_BYTES = 2**26  # far more than a processor's cache holds, as with real weights and moments
_CONTENTION_ROUNDS = 5
UNITS_SHARE = 0.02
"""The most of a run that the timing of units may take, beside one shape that is always timed."""
_STEP_OVER_FORWARD = 3  # of the time of a step, about
_CHANGE = 1.3  # of a forward's time, beyond which a profile is measured anew
_TIMES = 2  # that a profile is measured at most


def measure_profile(
    chain: Chain,
    dataset: Dataset,
    *,
    workload: Workload,
    config: Config,
    world: World,
    num_steps: int | None = None,
) -> Profile:
    """Collective. The profile that an earlier job has kept, if a forward still takes as long as it says; else a new
    one, measured with real samples. It is measured again, and not kept, where a forward takes another time at its end:
    then it was taken under load.

    Each rank measures a share of the units, which are lent to it where it does not hold them.

    Args:
        dataset: the training data.
        workload: the micro-batches to be measured.
        num_steps: steps of the run, of which measuring takes a small share: shapes that it has no time for get the
            costs of those it has, in proportion; None measures all, however long that takes.
    """
    key = _key(chain, workload=workload, config=config, world=world)
    found: list[Profile | None] = [_kept(key) if world.rank == 0 else None]
    if world.size > 1:
        dist.broadcast_object_list(found, src=0)
    if found[0] is not None and _holds(found[0], chain, dataset, workload=workload, world=world):
        return found[0]
    for _ in range(_TIMES):
        profile = _measure(chain, dataset, key=key, workload=workload, config=config, world=world, num_steps=num_steps)
        if holds := _holds(profile, chain, dataset, workload=workload, world=world):
            break
    is_whole = set(profile.job.by_rows) == set(workload.rows) and set(profile.measured) == set(workload.lengths)
    if world.rank == 0 and is_whole and holds:  # else the next job may have more time, or a quiet machine
        with contextlib.suppress(UserError, RuntimeError):  # without a place to keep it, the next job measures again
            save_profile(profile, _path(key))
    return profile


def _holds(profile: Profile, chain: Chain, dataset: Dataset, *, workload: Workload, world: World) -> bool:
    """Collective. Whether the model's forward takes as long as it did: other work on the machine may have been measured
    with it, then or now."""
    length = workload.modal_length
    batch = microbatch_of(chain, dataset, workload.examples[length], rows=workload.share)
    expected = profile.measured[length].prefix_seconds(0, chain.num_units, num_samples=workload.share)
    now = total(prefix_seconds(chain, batch, share_of_units(chain, world)))
    return expected / _CHANGE <= now <= expected * _CHANGE


def share_of_units(chain: Chain, world: World) -> range:
    """The units that this rank measures."""
    first, stop = (chain.num_units * place // world.size for place in (world.rank, world.rank + 1))
    return range(first, stop)


def _path(key: Mapping[str, object]) -> Path:
    return cache_folder() / "profiles" / file_name(key)


def _kept(key: Mapping[str, object]) -> Profile | None:
    try:
        return load_profile(_path(key))
    except (UserError, RuntimeError):
        return None


def costs_key(config: Config) -> dict[str, object]:
    """The part of a profile's key that comes from the configuration: all settings that the costs depend on."""
    return {
        "model": config.model.model_dump(mode="json", exclude={"pretrained", "save"}),
        "task": config.task,
        "classes": known_classes(config.data),
        "channels": channels_of(config.data),
        "image_size": config.data.image_size,
        "precision": config.train.precision,
        "wide_attention": config.train.wide_attention,
        "float32_matmul": config.train.float32_matmul,
        "optimizer": [config.train.optimizer, config.train.momentum > 0, config.train.optimizer_options],
        "beside the weights": [*config.averages, config.train.compile],
        "weights_apart": weights_apart(config),
        "recompute": config.pipe.recompute,
        "units": config.pipe.units,
    }


def _key(chain: Chain, *, workload: Workload, config: Config, world: World) -> dict[str, object]:
    """The key of a profile: everything that the costs depend on."""
    device = device_name(world.device)
    devices = [device] * world.size
    if world.size > 1:
        dist.all_gather_object(devices, device)
    return {
        **costs_key(config),
        "parameters": [sum(map(torch.numel, chain.named_parameters([u]).values())) for u in range(chain.num_units)],
        "rows": list(workload.rows),
        "lengths": list(workload.lengths),
        "device": ", ".join(sorted(set(devices))),
        "threads": torch.get_num_threads(),
        "ranks": world.size,
        "nodes": world.num_nodes,
        **{name: version(name) for name in ("torch", "timm", "transformers", "peft")},
    }


def weights_apart(config: Config) -> bool:
    """Whether plans may have a schedule that computes the gradients of weights separately."""
    return "zero_bubble" in dict(schedules_of(config))


def _measure(
    chain: Chain,
    dataset: Dataset,
    *,
    key: Mapping[str, object],
    workload: Workload,
    config: Config,
    world: World,
    num_steps: int | None,
) -> Profile:
    modal = microbatch_of(chain, dataset, workload.examples[workload.modal_length], rows=workload.share)
    contention = partial(_contention, chain, modal, world=world)
    chain.train()
    at_first = contention()
    budget = math.inf
    if num_steps is not None:
        forward = total(prefix_seconds(chain, modal, share_of_units(chain, world)))
        budget = UNITS_SHARE * num_steps * _STEP_OVER_FORWARD * forward
    found = _unit_costs(chain, dataset, workload=workload, config=config, world=world, budget_seconds=budget)
    update_s, memcpy_s, (reduction, send, between) = _bytes_seconds(config.train, chain, world=world)
    job = JobCosts(
        by_rows={rows: costs for (length, rows), costs in found.items() if length == workload.modal_length},
        **weight_bytes(chain, config),
        optimizer_factor=optimizer_factor(config),
        update_ns_per_byte=update_s * 1e9,
        send=send,
        reduction=reduction,
        num_ranks=world.size,
        between=between if world.num_nodes > 1 else None,
        read=Link(0, memcpy_s * 1e9),
        receives_late=world.device.type == "cpu",
        keeps_boundaries=keeps_boundaries(),
        contention=min(at_first, contention()),  # other work on the machine may raise one of the two
        recompute=config.pipe.recompute,
    )
    measured = {length: costs for (length, rows), costs in found.items() if rows == workload.share}
    return Profile(key, job, measured, 1.0 / memcpy_s, smallest(device_memory(world.device)))


class WeightBytes(TypedDict):
    """Fields of ``JobCosts``."""

    parameter_bytes: tuple[int, ...]
    trained_bytes: tuple[int, ...]
    resting_bytes: tuple[int, ...]
    summed_bytes: tuple[int, ...]


def weight_bytes(chain: Chain, config: Config) -> WeightBytes:
    """Bytes of the weights of each unit [num_units]: all, those that train, all while they rest, and those that train
    but for tables of which few rows are summed."""
    units, size = range(chain.num_units), chain.dtype.itemsize
    numbers = [sum(map(torch.numel, chain.named_parameters([unit]).values())) for unit in units]
    trains = [chain.trained_parameters([unit]) for unit in units]
    trained = [sum(map(torch.numel, of_unit.values())) for of_unit in trains]
    tables = tables_by_row(config.train, chain)
    summed = [sum(p.numel() for name, p in of_unit.items() if name not in tables) for of_unit in trains]
    return {
        "parameter_bytes": tuple(size * number for number in numbers),
        "trained_bytes": tuple(size * number for number in trained),
        "resting_bytes": tuple(chain.resting_type(unit).itemsize * number for unit, number in zip(units, numbers)),
        "summed_bytes": tuple(size * number for number in summed),
    }


def microbatch_of(chain: Chain, dataset: Dataset, batch: Batch, *, rows: int) -> Microbatch:
    """A micro-batch of samples of ``batch``, which are repeated where needed."""
    ids = np.resize(batch.ids, rows)
    raw = {key: v.to(chain.device) for key, v in dataset.inputs(ids, length=batch.length, epoch=0).items()}
    return Microbatch(raw[chain.family.main_input], {key: raw[key] for key in chain.input_keys}, batch.length)


def _unit_costs(
    chain: Chain, dataset: Dataset, *, workload: Workload, config: Config, world: World, budget_seconds: float
) -> dict[tuple[int, int], UnitCosts]:
    """Collective. Costs by (padded length, rows), each rank's share of the units together.

    The modal length is measured with ``workload.share`` rows and with the fewest, which tell what a micro-batch costs
    beside its rows; then, as far as the budget goes, every other length with ``workload.share``, and the modal length
    with all of ``workload.rows``.
    """
    modal, share, fewest = workload.modal_length, workload.share, min(workload.rows)
    wanted = [(modal, share), (modal, fewest), *((length, share) for length in workload.lengths)]
    shapes = list(dict.fromkeys([*wanted, *((modal, rows) for rows in workload.rows)]))
    chain.give_rows(tables_by_row(config.train, chain))  # as steps do
    costs = profile_units(
        chain,
        [microbatch_of(chain, dataset, workload.examples[length], rows=rows) for length, rows in shapes],
        units=share_of_units(chain, world),
        weights_apart=weights_apart(config),
        recompute=config.pipe.recompute,
        budget_seconds=budget_seconds,
        agree=slowest,
    )
    chain.give_rows(())
    return dict(zip(shapes, map(together, costs)))


def _bytes_seconds(train: TrainConfig, chain: Chain, *, world: World) -> tuple[float, float, list[Link]]:
    """Collective. The slowest rank's costs per byte.

    Returns:
        Seconds per byte of an update of weights; seconds per byte of a copy in memory; and three links: for the sum of
        gradients, for sends inside a node, for sends between nodes.
    """
    figures = torch.tensor(
        [
            _update_seconds_per_byte(train, chain),
            *reduction_seconds(world),
            *send_seconds(world),
            *between_seconds(world),
            _memcpy_seconds_per_byte(),
        ],
        dtype=torch.float64,
        device=chain.device,
    )
    dist.all_reduce(figures, op=dist.ReduceOp.MAX)
    update_s, *links, memcpy_s = figures.tolist()
    every = [Link(round(latency * 1e9), per_byte * 1e9) for latency, per_byte in zip(links[::2], links[1::2])]
    return update_s, memcpy_s, every


def _contention(chain: Chain, batch: Microbatch, *, world: World) -> float:
    """Collective. The time of a forward while all ranks of a node compute, divided by its time on one rank alone."""
    if world.local_size == 1 or world.device.type == "cuda":
        return 1.0

    def forward() -> float:
        start = perf_counter()
        with torch.no_grad():
            chain.run(range(chain.numbering.behind(1)), batch.main, batch.inputs)
        return perf_counter() - start

    ratios = list[float]()
    with chain.lent(range(chain.numbering.behind(1)), awake=True), torch.random.fork_rng(devices=[]):
        forward()
        for _ in range(_CONTENTION_ROUNDS):  # in turn, so that a slow moment of the machine spoils only a round or two
            dist.barrier()
            together, alone = forward(), 0.0
            for rank in range(world.local_size):
                dist.barrier()
                if world.local_rank == rank:
                    alone = forward()
            ratios.append(together / alone)
    ratio = torch.tensor(median(ratios), dtype=torch.float64)
    dist.all_reduce(ratio)
    return max(1.0, float(ratio) / world.size)


def together(costs: UnitCosts) -> UnitCosts:
    """Collective. The costs of all units from each rank's share: the same integers on every rank."""
    table = torch.tensor(costs.columns())
    dist.all_reduce(table, op=dist.ReduceOp.MAX)
    return UnitCosts(costs.rows, costs.length, *(tuple(row) for row in table.tolist()))


def _update_seconds_per_byte(train: TrainConfig, chain: Chain) -> float:
    zeros = torch.zeros(2048, _UPDATE_BYTES // 4 // 2048, dtype=chain.dtype, device=chain.device)
    parameter = torch.nn.Parameter(zeros)
    parameter.grad = torch.zeros_like(parameter)
    optimizer = build_optimizer(train, {"": parameter}, {})

    def update() -> None:
        optimizer.step()
        synchronize(chain.device)

    return median_seconds(update) / parameter.nbytes


def _memcpy_seconds_per_byte() -> float:
    source, target = torch.zeros(2**25, dtype=torch.uint8), torch.zeros(2**25, dtype=torch.uint8)
    return median_seconds(lambda: target.copy_(source)) / 2**25
