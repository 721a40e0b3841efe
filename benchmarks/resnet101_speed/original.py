"""The original's table predicted at its own size: work counted per unit, one attained rate, the step simulator.

    units (operations, bytes) + one rate, fitted on the table's first row alone -> seconds of every part
        -> the step simulator with the original's batch, micro-batches and recomputation -> samples/s of every row

No accelerator is needed and nothing is timed, so that a prediction is the same everywhere. Assumptions are added one
after another, and none of them is fitted: memory traffic and copies between GPUs go by the data sheet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from math import ceil
from statistics import mean

import torch
from torch import nn

from benchmarks.support.flops import UnitWork, count_work
from benchmarks.support.graphs import Setting
from pipetransformer.graphs.analysis.cut import cut_graph
from pipetransformer.graphs.graph import Graph, GraphCosts, trace
from pipetransformer.pipe.planner.costs import Link
from pipetransformer.pipe.planner.step_simulator import StageCosts, simulate

__all__ = ["Assumption", "Original", "Prediction", "assumptions", "mean_error", "predict"]

_COUNTED_ROWS = 16  # of the traced micro-batch; work is in proportion to rows


@dataclass(frozen=True, slots=True)
class Original:
    """The original's experiment, as far as the table's settings do not have it.

    Attributes:
        balances: by name of the row, the layers of each part.
        layers: for each layer of the original's sequence the module of our model that does its work, "" for none.
        copies_beside: whether its version computed while it copied between GPUs.
    """

    balances: Mapping[str, tuple[int, ...]]
    layers: Sequence[str]
    copies_beside: bool


@dataclass(frozen=True, slots=True)
class Assumption:
    """All that a step's time is made of beside operations.

    Attributes:
        memory: bytes per second of a device's memory, while it computes nothing; infinite: memory takes no time.
        link: bytes per second between two devices; infinite: copies take no time.
        copies_beside: whether a device computes while it copies.
    """

    name: str
    memory: float = float("inf")
    link: float = float("inf")
    copies_beside: bool = True


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted rates under one assumption, beside the published ones.

    Attributes:
        operations_per_s: attained, fitted on the first row.
        samples_per_s: by name of the row, for the original's balance.
        best_samples_per_s: likewise, for the exact partitioner's cut of these costs.
    """

    assumption: Assumption
    operations_per_s: float
    samples_per_s: Mapping[str, float]
    best_samples_per_s: Mapping[str, float]


def assumptions(*, copies_beside: bool) -> tuple[Assumption, ...]:
    """Of a Tesla P40: 346 GB/s of memory (NVIDIA's data sheet), PCI 3.0 x 16 (15.75 GB/s) to its neighbours; half of
    that where each copy goes into the host's memory and out of it.

    Args:
        copies_beside: whether the original's version computed while it copied; if not, both are told.
    """
    memory, link = 346e9, 15.75e9
    found = [
        Assumption("operations"),
        Assumption("and memory", memory),
        Assumption("and copies beside", memory, link),
    ]
    if not copies_beside:
        found.append(Assumption("and copies that wait", memory, link, copies_beside=False))
        found.append(Assumption("these through the host", memory, link / 2, copies_beside=False))
    return tuple(found)


def predict(
    settings: Sequence[Setting],
    original: Original,
    *,
    published: Mapping[str, float],
    build: Callable[[], nn.Module],
    image_size: int,
) -> list[Prediction]:
    """One for each assumption.

    Args:
        settings: the original's; the first is the one that the rate is fitted on.
        published: samples per second by name of the row. Of others than the first only errors are told.
    """
    with torch.device("meta"):
        graph = trace(build(), (torch.empty(_COUNTED_ROWS, 3, image_size, image_size),))
    steps = _Steps(graph, count_work(graph))
    given = {name: boundaries_of(graph, original.layers, balance) for name, balance in original.balances.items()}
    first = settings[0]
    found = []
    for assumption in assumptions(copies_beside=original.copies_beside):
        seconds = partial(steps.seconds, assumption=assumption)
        rest = seconds(first, given.get(first.name, ()), rate=float("inf"))
        rate = steps.operations(first) / (first.batch_size / published[first.name] - rest)
        rates, best = {}, {}
        for setting in settings:
            cut = steps.best_cut(setting, assumption=assumption, rate=rate)
            rates[setting.name] = setting.batch_size / seconds(setting, given.get(setting.name, ()), rate=rate)
            best[setting.name] = setting.batch_size / seconds(setting, cut, rate=rate)
        found.append(Prediction(assumption, rate, rates, best))
    return found


def mean_error(predicted: Mapping[str, float], published: Mapping[str, float], *, first: str) -> float:
    """Mean of \\|predicted / published - 1\\| over all rows but the one that is fitted on."""
    return mean(abs(predicted[name] / published[name] - 1) for name in published if name != first)


def boundaries_of(graph: Graph, layers: Sequence[str], balance: Sequence[int]) -> tuple[int, ...]:
    """The first units of the parts behind the first, for a ``balance`` of the original's ``layers``.

    A unit goes with the layer of its module, or of the nearest module around it; one of no layer with the unit before.
    """
    assert sum(balance) == len(layers), f"{sum(balance)} layers in the balance, {len(layers)} in the sequence"
    positions = {layer: position for position, layer in enumerate(layers) if layer}
    of_units = []
    for unit in graph.units:
        names = list(accumulate(unit.name.partition("#")[0].split("."), lambda outer, name: f"{outer}.{name}"))
        known = [positions[name] for name in names if name in positions]
        of_units.append(known[-1] if known else of_units[-1] if of_units else 0)
    return tuple(
        next(unit for unit, position in enumerate(of_units) if position >= start)
        for start in list(accumulate(balance))[:-1]
    )


class _Steps:
    """Steps of the original's rows on units of known work."""

    def __init__(self, graph: Graph, work: Sequence[UnitWork]) -> None:
        self._graph, self._work = graph, work

    def operations(self, setting: Setting) -> float:
        """Of the step of a row that recomputes nothing."""
        return setting.batch_size / _COUNTED_ROWS * sum(unit.forward_flops + unit.backward_flops for unit in self._work)

    def best_cut(self, setting: Setting, *, assumption: Assumption, rate: float) -> tuple[int, ...]:
        costs = self._costs(setting, assumption=assumption, rate=rate)
        return cut_graph(
            costs, num_stages=setting.num_devices, link=Link(0, 1e9 / assumption.link), recompute=setting.recomputes
        )

    def seconds(self, setting: Setting, boundaries: tuple[int, ...], *, assumption: Assumption, rate: float) -> float:
        """Of one step.

        Note: the simulator's micro-batches are all alike; that the last one is not recomputed is spread over them.
        """
        costs, (_, number) = self._costs(setting, assumption=assumption, rate=rate), _microbatches(setting)
        link, memory_ns = Link(0, 1e9 / assumption.link), 1e9 / assumption.memory
        # Nanoseconds over the cut before each unit, forward and backward; nothing crosses the ends.
        sent = [0, *map(link.ns, costs.crossing_bytes)]
        returned = [0, *map(link.ns, costs.returned_bytes)]
        waits = not assumption.copies_beside
        stages, update = [], []
        for units in self._graph.stages(boundaries):
            first, stop = units.start, units.stop
            weights = sum(costs.parameter_bytes[first:stop]) * memory_ns
            # A weight's gradient is added to that of the micro-batches before: two are read, one is written.
            adding = round(3 * weights) if number > 1 else 0
            forward, backward = sum(costs.forward_ns[first:stop]), sum(costs.returning_ns[first:stop]) + adding
            stages.append(
                StageCosts(
                    forward=forward + waits * (sent[first] + sent[stop]),
                    backward=backward + waits * (returned[first] + returned[stop]),
                    send=0 if waits else sent[stop],
                    send_back=0 if waits else returned[first],
                )
            )
            update.append(round(4 * weights))  # SGD reads weight and gradient, writes the weight, and zeroes
        step = simulate("gpipe", stages, num_ranks=len(stages), num_microbatches=number, update=update)
        return step.total / 1e9

    def _costs(self, setting: Setting, *, assumption: Assumption, rate: float) -> GraphCosts:
        """Of one micro-batch."""
        recomputed, number = _microbatches(setting)
        share = setting.batch_size / number / _COUNTED_ROWS
        graph = self._graph

        def ns(flops: int, num_bytes: int) -> float:
            return share * (flops / rate + num_bytes / assumption.memory) * 1e9

        forward = [ns(unit.forward_flops, unit.forward_bytes) for unit in self._work]
        cuts = range(1, graph.num_units + 1)
        return GraphCosts(
            forward_ns=tuple(map(round, forward)),
            recompute_ns=tuple(round(recomputed / number * each) for each in forward),
            backward_ns=tuple(round(ns(unit.backward_flops, unit.backward_bytes)) for unit in self._work),
            activation_bytes=(0,) * graph.num_units,
            parameter_bytes=tuple(graph.parameter_bytes(unit) for unit in range(graph.num_units)),
            crossing_bytes=tuple(round(share * graph.crossing_bytes(cut)) for cut in cuts),
            returned_bytes=tuple(
                round(share * sum(t.num_bytes for t in graph.crossing(cut) if t.requires_grad)) for cut in cuts
            ),
            shared=(),
        )


def _microbatches(setting: Setting) -> tuple[int, int]:
    """(recomputed, all) of a step, as torchgpipe makes them.

    Note: ``Tensor.chunk`` makes fewer than it is asked for where the rows do not divide, and torchgpipe's last one,
    which is not recomputed, is the last of those that were asked for: then all are recomputed.
    """
    asked = setting.num_microbatches
    number = ceil(setting.batch_size / ceil(setting.batch_size / asked))
    recomputed = {"always": number, "except_last": min(number, asked - 1)}.get(setting.checkpoint or "never", 0)
    return recomputed, number
