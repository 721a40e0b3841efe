"""Costs that are counted, not timed, for ``pipe.measure: false``: operations and bytes of a sample, at assumed speeds.

They tell which plan does less work, not how long it takes.
"""

from __future__ import annotations

from pipetransformer.adapter import keeps_boundaries
from pipetransformer.config import Config
from pipetransformer.data import Dataset
from pipetransformer.engine.optim import optimizer_factor
from pipetransformer.models import Chain
from pipetransformer.pipe.measure.profile import (
    microbatch_of,
    share_of_units,
    together,
    weight_bytes,
    weights_apart,
)
from pipetransformer.pipe.measure.profile_file import Profile
from pipetransformer.pipe.measure.static_layouts import StaticLayouts
from pipetransformer.pipe.measure.units import count_units
from pipetransformer.pipe.measure.workload import Workload
from pipetransformer.pipe.planner.costs import JobCosts, Link
from pipetransformer.pipe.planner.search import Prediction
from pipetransformer.process.collectives import smallest
from pipetransformer.process.device import device_memory
from pipetransformer.process.world import World

# Assumed: links of 5 GB/s, memory of 10 GB/s, of which an update reads and writes weights and state.
_LATENCY_NS, _LINK_NS_PER_BYTE, _MEMORY_NS_PER_BYTE = 50_000, 0.2, 0.1


def counted_profile(chain: Chain, dataset: Dataset, *, workload: Workload, config: Config, world: World) -> Profile:
    """Collective. Costs by one sample of each padded length; more rows are taken to cost in proportion."""
    lengths = workload.lengths
    samples = [microbatch_of(chain, dataset, workload.examples[length], rows=1) for length in lengths]
    chain.train()
    apart, recompute = weights_apart(config), config.pipe.recompute
    costs = count_units(chain, samples, units=share_of_units(chain, world), weights_apart=apart, recompute=recompute)
    counted = dict(zip(lengths, map(together, costs)))
    factor, link = optimizer_factor(config), Link(_LATENCY_NS, _LINK_NS_PER_BYTE)
    job = JobCosts(
        by_rows={1: counted[workload.modal_length]},
        **weight_bytes(chain, config),
        optimizer_factor=factor,
        update_ns_per_byte=2 * factor * _MEMORY_NS_PER_BYTE,
        send=link,
        reduction=link,
        num_ranks=world.size,
        between=link if world.num_nodes > 1 else None,
        read=Link(0, _MEMORY_NS_PER_BYTE),
        receives_late=world.device.type == "cpu",
        keeps_boundaries=keeps_boundaries(),
        recompute=recompute,
    )
    return Profile({}, job, counted, 1e9 / _MEMORY_NS_PER_BYTE, smallest(device_memory(world.device)))


def predicted_layouts(predictions: tuple[Prediction, ...], workload: Workload) -> StaticLayouts:
    """The static layouts by predictions: without timings, rounds and a floor."""
    seconds = {p.plan.pp: p.step_seconds for p in predictions}
    return StaticLayouts(
        plans={p.plan.pp: p.plan for p in predictions},
        seconds={pp: {} for pp in seconds},
        mean_seconds=seconds,
        best_pp=min(seconds, key=lambda pp: (seconds[pp], pp)),
        timed={},
        rounds=(),
        timed_samples=len(workload.examples[workload.modal_length].ids),
        fastest_move=0.0,
    )
