"""Runs the parts of a partition one after the other in this process and times them, round by round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

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
    parts = [_Part(graph, units, inputs) for units in graph.stages(boundaries)]
    for _ in range(iterations + 1):  # the first warms up
        crossing = tuple(inputs)
        for part in parts:
            crossing = part.run_forward(crossing, recompute=recompute)
        returned: list[Tensor | None] = [torch.ones_like(tensor) for tensor in crossing]
        for part in reversed(parts):
            returned = part.run_backward(returned, recompute=recompute)
    for part in parts:
        part.stage.zero_grad()
    return tuple(_samples(part.forward_ns) for part in parts), tuple(_samples(part.backward_ns) for part in parts)


def _samples(times_ns: Sequence[int]) -> Samples:
    return Samples(tuple(ns / 1e6 for ns in times_ns[1:]))


class _Part:
    """One part, with its times."""

    def __init__(self, graph: Graph, units: range, inputs: Sequence[Tensor]) -> None:
        self.stage = GraphStage(graph, units.start, units.stop)
        self.stage.train()
        self._device = inputs[0].device
        self._model_inputs = dict(zip(graph.input_names, inputs, strict=True))
        entering = self.stage.spec.inputs if units.start else inputs
        self._tracked = [tensor.requires_grad for tensor in entering]
        self._given: tuple[Tensor, ...] = ()
        self._made: tuple[Tensor, ...] = ()
        self.forward_ns: list[int] = []
        self.backward_ns: list[int] = []

    def run_forward(self, crossing: Sequence[Tensor], *, recompute: bool) -> tuple[Tensor, ...]:
        """Returns what it sends."""
        pairs = zip(crossing, self._tracked, strict=True)
        self._given = tuple(tensor.detach().requires_grad_(is_tracked) for tensor, is_tracked in pairs)
        start = now_ns(self._device)
        with torch.set_grad_enabled(not recompute):
            self._run()
        self.forward_ns.append(now_ns(self._device) - start)
        return tuple(tensor.detach() for tensor in self._made)

    def run_backward(self, returned: Sequence[Tensor | None], *, recompute: bool) -> list[Tensor | None]:
        """Takes the gradients of what it sent, and returns those of what it was sent."""
        start = now_ns(self._device)
        if recompute:
            self._run()
        pairs = [(t, g) for t, g in zip(self._made, returned, strict=True) if t.requires_grad and g is not None]
        torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
        self.backward_ns.append(now_ns(self._device) - start)
        self._made = ()
        self.stage.discard_statistics()
        self.stage.zero_grad(set_to_none=False)  # kept: a step adds to gradients that are there
        return [tensor.grad for tensor in self._given]

    def _run(self) -> None:
        made = self.stage(*self._given, **self._model_inputs)
        self._made = made if isinstance(made, tuple) else (made,)
