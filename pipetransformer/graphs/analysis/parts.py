"""Runs the parts of a partition one after the other in this process and times them, round by round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median, pvariance

import numpy as np
import torch
from torch import Tensor

from pipetransformer.graphs.graph import Graph, GraphStage
from pipetransformer.process.device import now_ns


@dataclass(frozen=True, slots=True)
class Samples:
    """Milliseconds of one part's forward or backward, round by round."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(self.values)

    @property
    def variance(self) -> float:
        return pvariance(self.values)

    @property
    def mean_deviation(self) -> float:
        """Mean distance from the mean."""
        middle = mean(self.values)
        return mean(abs(value - middle) for value in self.values)

    def percentile(self, percent: float) -> float:
        return float(np.percentile(self.values, percent))


def time_parts(
    graph: Graph, boundaries: Sequence[int], inputs: Sequence[Tensor], *, iterations: int, recompute: bool
) -> tuple[tuple[Samples, ...], tuple[Samples, ...]]:
    """(forward, backward) times by part, round by round.

    Every round takes a micro-batch through all parts and its gradient back. A backward computes the gradients of inputs
    and weights; with ``recompute`` the forward keeps nothing and the backward begins with a forward, as under
    activation checkpointing. Gradients are cleared.
    """
    parts = [GraphStage(graph, units.start, units.stop) for units in graph.stages(boundaries)]
    device = inputs[0].device
    forward: list[list[float]] = [[] for _ in parts]
    backward: list[list[float]] = [[] for _ in parts]
    for part in parts:
        part.train()
    for iteration in range(iterations + 1):
        given: list[tuple[Tensor, ...]] = []
        outputs: list[tuple[Tensor, ...]] = []
        named = dict(zip(graph.input_names, inputs, strict=True))
        crossing: tuple[Tensor, ...] = tuple(inputs)
        for number, part in enumerate(parts):
            arguments = _enter(part, crossing, is_first=number == 0)
            side = {} if number == 0 else {name: named[name] for name in part.spec.model_inputs}
            start = now_ns(device)
            with torch.set_grad_enabled(not recompute):
                made = _tuple(part(*arguments, **side))
            spent = now_ns(device) - start
            if iteration:
                forward[number].append(spent / 1e6)
            given.append(arguments)
            outputs.append(made)
            crossing = tuple(tensor.detach() for tensor in made)
        returned: list[Tensor | None] = [torch.ones_like(tensor) for tensor in outputs[-1]]
        for number in reversed(range(len(parts))):
            part, arguments = parts[number], given[number]
            side = {} if number == 0 else {name: named[name] for name in part.spec.model_inputs}
            start = now_ns(device)
            made = _tuple(part(*arguments, **side)) if recompute else outputs[number]
            pairs = [(t, g) for t, g in zip(made, returned, strict=True) if t.requires_grad and g is not None]
            torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
            spent = now_ns(device) - start
            if iteration:
                backward[number].append(spent / 1e6)
            outputs[number] = ()
            returned = [tensor.grad for tensor in arguments]
            part.discard_statistics()
            for parameter in part.parameters():
                if parameter.grad is not None:
                    parameter.grad.zero_()  # kept: a step adds to gradients that are there
    for part in parts:
        for parameter in part.parameters():
            parameter.grad = None
    return tuple(Samples(tuple(v)) for v in forward), tuple(Samples(tuple(v)) for v in backward)


def _enter(part: GraphStage, crossing: Sequence[Tensor], *, is_first: bool) -> tuple[Tensor, ...]:
    if is_first:
        return tuple(crossing)
    return tuple(
        tensor.detach().requires_grad_(known.requires_grad)
        for tensor, known in zip(crossing, part.spec.inputs, strict=True)
    )


def _tuple(made: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return made if isinstance(made, tuple) else (made,)
