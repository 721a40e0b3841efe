"""A whole elastic run, simulated: the plan that each freeze leads to, and the seconds of the run. Pure and fast.

It asks the planner as a job does, at every change of n, and adds up predicted steps, transitions and the cache's
advance passes. Its assumptions are in docs/simulator.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from pipetransformer.pipe.planner.answers import Outlook
from pipetransformer.pipe.planner.choice import Planner
from pipetransformer.pipe.planner.constraints import Constraints, divisors
from pipetransformer.pipe.planner.costs import JobCosts
from pipetransformer.pipe.planner.search import Prediction
from pipetransformer.plan import ParallelPlan
from pipetransformer.plan.prefix import cached_choices
from pipetransformer.plan.schedules import fewest_stages
from pipetransformer.simulation.analytic import costs_of
from pipetransformer.simulation.schema import SimulationConfig


@dataclass(frozen=True, slots=True)
class Segment:
    """Epochs under one plan.

    Attributes:
        first_epoch: the first of its epochs, counted from 0.
        num_epochs: epochs under the plan.
        num_steps: steps under the plan.
        prediction: the plan, with the expected figures of its step.
        transition_seconds: time of the transition before its first step.
        advance_seconds: time of the cache's advance before its first step.
    """

    first_epoch: int
    num_epochs: int
    num_steps: int
    prediction: Prediction
    transition_seconds: float
    advance_seconds: float

    @property
    def seconds(self) -> float:
        return self.num_steps * self.prediction.step_seconds + self.transition_seconds + self.advance_seconds


def run_simulation(config: SimulationConfig, *, planning: type[Planner] = Planner) -> tuple[Segment, ...]:
    """The run's segments, from a start with nothing frozen, as training has.

    Args:
        planning: decides; another than a job's own, for comparison.

    Raises:
        UserError: no plan fits.
    """
    planner, costs, frozen = _planner(config, planning), costs_of(config), config.frozen()
    changes = [0, *(e for e in range(1, len(frozen)) if frozen[e] != frozen[e - 1]), len(frozen)]
    prediction = planner.first_plan(costs, {}).prediction
    held: int | None = None  # the boundary that the cache has, read or not
    segments: list[Segment] = []
    for epoch, stop in pairwise(changes):
        current = prediction.plan
        options = partial(_options, config, current=current, costs=costs, held=held)
        remaining_steps = (len(frozen) - epoch) * config.steps_per_epoch
        outlook = Outlook(costs, remaining_steps, fixed_seconds=config.cluster.transition_seconds)
        choice = planner.settle(frozen[epoch], current=current, options=options, outlook=outlook).choice
        moves = advance = 0.0
        if choice is not None:
            prediction, moves = choice.prediction, choice.transition_seconds
            advance = options(choice.plan.frozen)[choice.plan.cached]
            held = held if choice.plan.cached is None else choice.plan.cached
        num_steps = (stop - epoch) * config.steps_per_epoch
        segments.append(Segment(epoch, stop - epoch, num_steps, prediction, moves, advance))
    return tuple(segments)


def _planner(config: SimulationConfig, planning: type[Planner]) -> Planner:
    pipe, cluster = config.pipe, config.cluster
    length = pipe.initial_length
    constraints = Constraints(
        world_size=config.world_size,
        global_batch_size=config.train.batch_size,
        schedules=tuple((name, fewest_stages(name)) for name in pipe.schedules),
        num_microbatches=pipe.microbatches,
        pipeline_lengths=divisors(cluster.devices_per_node) if length is None else (length,),
        memory_limit=cluster.memory,
    )
    return planning(
        constraints,
        num_blocks=config.model.blocks,
        local_size=cluster.devices_per_node,
        keeps_length=not pipe.replicas,
        keeps_cut=not pipe.elastic,
        limit_key="cluster.memory",
    )


def _options(
    config: SimulationConfig, frozen: int, *, current: ParallelPlan, costs: JobCosts, held: int | None
) -> dict[int | None, float]:
    """Boundaries that may be read, each with the seconds of the advance pass to get there."""
    return {
        cached: _advance_seconds(config, current, costs=costs, held=held, target=cached)
        for cached in (cached_choices(frozen, held=held) if config.pipe.cache else (None,))
        if cached is None or _fits(config, current, costs=costs, boundary=cached)
    }


def _fits(config: SimulationConfig, plan: ParallelPlan, *, costs: JobCosts, boundary: int) -> bool:
    """Whether the nodes can keep a boundary of every sample."""
    memory, nodes = config.cluster.host_memory, config.cluster.nodes
    step_bytes = costs.unit_costs(config.train.batch_size).boundary_bytes[plan.numbering.behind(boundary) - 1]
    return memory is None or config.steps_per_epoch * step_bytes <= nodes * memory


def _advance_seconds(
    config: SimulationConfig, current: ParallelPlan, *, costs: JobCosts, held: int | None, target: int | None
) -> float:
    """Time for all ranks together to take every sample to boundary ``target``, the frozen forward data-parallel."""
    if target is None or target == held:
        return 0.0
    unit = costs.unit_costs(-(-config.train.batch_size // current.world_size))
    first, stop = current.numbering.behind(held or 0), current.numbering.behind(target)
    moved = unit.boundary_bytes[stop - 1] + (unit.boundary_bytes[first - 1] if first else 0)
    batch_ns = sum(unit.prefix_ns[first:stop]) + (costs.read.ns(moved) if costs.read is not None else 0)
    return config.steps_per_epoch * batch_ns / 1e9
