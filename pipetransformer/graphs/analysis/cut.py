"""From a model to the report of its best partition: trace, profile, cut, run the parts, analyse."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from statistics import mean

import torch
from torch import Tensor

from pipetransformer.errors import UserError
from pipetransformer.graphs.analysis.parts import Samples, time_parts
from pipetransformer.graphs.analysis.report import STATE_FACTOR, PartitionReport, analyse
from pipetransformer.graphs.graph import Graph, GraphCosts, profile_graph, trace
from pipetransformer.graphs.graph.profile_file import kept_costs
from pipetransformer.graphs.zoo import ZooModel
from pipetransformer.pipe.planner.costs import Link
from pipetransformer.pipe.planner.partition import partition, smallest_limit
from pipetransformer.process.device import device_name

_PROFILE_REPEATS = 7
_TRIALS, _TRIAL_ROUNDS = 5, 5


def analyse_model(
    model: ZooModel,
    *,
    example: Tensor,
    num_stages: int,
    iterations: int,
    depth: int | None,
    recompute: bool,
    memory_limit: int | None,
    num_microbatches: int,
    link: Link,
    title: str,
    source: str,
    profiles: Path | None,
    tell: Callable[[str], None] = lambda message: None,
) -> tuple[PartitionReport, Graph]:
    """The report of a model's best partition, and the graph that it cuts.

    Args:
        example: a micro-batch.
        iterations: timed rounds over the parts.
        depth: levels of the module tree that units tell apart; None: all.
        memory_limit: bytes that a part may take; None: no limit.
        title: heading of the report.
        source: origin of the micro-batch, as the report tells it.
        profiles: folder that keeps costs of units for the next run; None: none.
        tell: called with the name of each phase as it begins, for who waits.

    Raises:
        UserError: the model cannot be cut so.
    """
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name_of_device = device_name(device)
    module = model.build().to(device)
    inputs = (example.to(device),)
    graph = trace(module, inputs, depth=depth)
    _check_stages(num_stages, num_units=graph.num_units)  # before what takes minutes
    key = {"model": model.name, "dtype": str(next(module.parameters()).dtype), "device": name_of_device}
    tell(f"costs of {graph.num_units} units")
    costs = _unit_costs(graph, inputs, recompute=recompute, key=key, profiles=profiles)
    tell(f"at most {_TRIALS} cuts run, each until units cost what they do in its parts")
    boundaries, before = measured_cut(
        graph, inputs, costs, num_stages=num_stages, link=link, recompute=recompute, memory_limit=memory_limit,
        rounds=min(iterations, max(_TRIAL_ROUNDS, iterations // 5)),
    )  # fmt: skip
    tell(f"{num_stages} parts timed, {iterations} rounds")
    forward, backward = time_parts(graph, boundaries, inputs, iterations=iterations, recompute=recompute)
    in_parts = _corrected(before, graph.stages(boundaries), forward=forward, backward=backward)
    report = analyse(
        graph, boundaries, costs=costs, before=before, in_parts=in_parts, forward=forward, backward=backward,
        link=link, recompute=recompute, num_microbatches=num_microbatches, title=title, device=name_of_device,
        source=source, num_parameters=sum(parameter.numel() for parameter in module.parameters()),
    )  # fmt: skip
    return report, graph


def _unit_costs(
    graph: Graph, inputs: Sequence[Tensor], *, recompute: bool, key: Mapping[str, object], profiles: Path | None
) -> GraphCosts:
    """Costs of the units one by one: those that ``profiles`` keeps, or else measured.

    Args:
        key: model, type of its numbers and device; all else that costs depend on is added.
    """
    measure = partial(profile_graph, graph, inputs, repeats=_PROFILE_REPEATS, recompute=recompute)
    if profiles is None:
        return measure()
    whole_key = {
        **key,
        "units": [unit.name for unit in graph.units],
        "shape": list(inputs[0].shape),
        "recompute": recompute,
        "threads": torch.get_num_threads(),
        "torch": version("torch"),
    }
    return kept_costs(whole_key, folder=profiles, measure=measure)


def measured_cut(
    graph: Graph,
    inputs: Sequence[Tensor],
    costs: GraphCosts,
    *,
    num_stages: int,
    link: Link,
    recompute: bool,
    memory_limit: int | None = None,
    rounds: int = _TRIAL_ROUNDS,
) -> tuple[tuple[int, ...], GraphCosts]:
    """The exact cut by the times of units inside running parts, and these costs: the mean of some trials.

    Units timed one by one take longer than in a part: each call has its price, and what they hand on leaves the caches.
    So the parts of a cut are run, their units corrected in proportion, and cut again, until a cut comes back. The last
    cut is by all trials, and not the luckiest of them.

    Args:
        costs: of the units one by one.
        rounds: timed rounds of a trial.

    Raises:
        UserError: see ``cut_graph``.
    """
    cut = partial(cut_graph, num_stages=num_stages, link=link, recompute=recompute, memory_limit=memory_limit)
    boundaries, tried, trials, found = cut(costs), set[tuple[int, ...]](), list[GraphCosts](), costs
    while boundaries not in tried and len(tried) < _TRIALS:
        forward, backward = time_parts(graph, boundaries, inputs, iterations=rounds, recompute=recompute)
        tried.add(boundaries)
        trials.append(_corrected(costs, graph.stages(boundaries), forward=forward, backward=backward))
        found = _mean(trials)
        boundaries = cut(found)
    return boundaries, found


def _mean(trials: Sequence[GraphCosts]) -> GraphCosts:
    def column(of_trials: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
        return tuple(round(mean(of_unit)) for of_unit in zip(*of_trials))

    return replace(
        trials[0],
        forward_ns=column(trial.forward_ns for trial in trials),
        recompute_ns=column(trial.recompute_ns for trial in trials),
        backward_ns=column(trial.backward_ns for trial in trials),
    )


def _corrected(
    costs: GraphCosts, parts: Sequence[range], *, forward: Sequence[Samples], backward: Sequence[Samples]
) -> GraphCosts:
    """Costs with every part's units scaled to sum to the part's own time, forward and backward apart."""

    def scaled(column: Sequence[int], taken: Sequence[Samples], within: Sequence[int]) -> tuple[int, ...]:
        factors = [
            samples.median * 1e6 / max(1, sum(within[part.start : part.stop])) for part, samples in zip(parts, taken)
        ]
        return tuple(
            chain.from_iterable((round(column[u] * factor) for u in part) for part, factor in zip(parts, factors))
        )

    return replace(
        costs,
        forward_ns=scaled(costs.forward_ns, forward, costs.forward_ns),
        recompute_ns=scaled(costs.recompute_ns, backward, costs.returning_ns),
        backward_ns=scaled(costs.backward_ns, backward, costs.returning_ns),
    )


def cut_graph(
    costs: GraphCosts, *, num_stages: int, link: Link, recompute: bool, memory_limit: int | None = None
) -> tuple[int, ...]:
    """The exact min-max cut, by forward, recomputation, backward and the bytes sent both ways.

    Args:
        memory_limit: bytes of a part at most: weights, gradients and AdamW's moments; of K - part micro-batches, as
            1F1B keeps them, the received tensors and the activations, or with ``recompute`` activations of one alone.

    Raises:
        UserError: there are fewer units than stages, or nothing fits; names what would.
    """
    _check_stages(num_stages, num_units=len(costs.forward_ns))
    crossing = [link.ns(sent) + link.ns(returned) for sent, returned in zip(costs.crossing_bytes, costs.returned_bytes)]
    alive = range(num_stages, 0, -1)
    memory = [
        [
            STATE_FACTOR * weights + kept * (1 if recompute else count)
            for weights, kept in zip(costs.parameter_bytes, costs.activation_bytes)
        ]
        for count in alive
    ]
    received = [[count * num_bytes for num_bytes in (0, *costs.crossing_bytes[:-1])] for count in alive]

    cut = partial(partition, costs.unit_ns, num_stages=num_stages, crossing=crossing, memory=memory, received=received)
    if (boundaries := cut(memory_limit=memory_limit)) is not None:
        return boundaries
    assert memory_limit is not None
    least = smallest_limit(lambda limit: cut(memory_limit=limit) is not None, refused=memory_limit)
    raise UserError(f"--memory-limit: {memory_limit} bytes hold no cut into {num_stages} parts; give at least {least}")


def _check_stages(num_stages: int, *, num_units: int) -> None:
    if num_stages > num_units:
        raise UserError(f"--stages: {num_stages} exceeds the {num_units} units of the model; give at most {num_units}")
