"""Measured costs of every unit of a graph on this device, for the graph's micro-batch shape."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from pipetransformer.graphs.graph.graph import Graph
from pipetransformer.graphs.graph.segment import Segment, build_segment
from pipetransformer.process.device import now_ns

_FEWEST, _LONG_NS = 3, 20_000_000_000


@dataclass(frozen=True, slots=True)
class GraphCosts:
    """Costs of every unit for one micro-batch: medians in nanoseconds, bytes.

    Attributes:
        forward_ns: time of the forward; with recomputation, of the one that keeps nothing.
        recompute_ns: time of the forward again, before the backward; 0 without recomputation.
        backward_ns: time for gradients of inputs and weights, these added to those of micro-batches before.
        activation_bytes: storages kept by autograd and by no unit before, weights and buffers left out.
        parameter_bytes: weights; a tied one counts in every unit that uses it.
        crossing_bytes: tensors sent forward over a cut behind the unit; 0 for the last unit.
        returned_bytes: gradients sent back over that cut; 0 for the last unit.
        shared: (producer, unit, bytes) of storages first kept by ``unit``, but made by a unit before.
    """

    forward_ns: tuple[int, ...]
    recompute_ns: tuple[int, ...]
    backward_ns: tuple[int, ...]
    activation_bytes: tuple[int, ...]
    parameter_bytes: tuple[int, ...]
    crossing_bytes: tuple[int, ...]
    returned_bytes: tuple[int, ...]
    shared: tuple[tuple[int, int, int], ...]

    @property
    def returning_ns(self) -> tuple[int, ...]:
        """Time of recomputation and backward."""
        return tuple(map(sum, zip(self.recompute_ns, self.backward_ns)))

    @property
    def unit_ns(self) -> tuple[int, ...]:
        """Time of forward, recomputation and backward."""
        return tuple(map(sum, zip(self.forward_ns, self.returning_ns)))

    def kept_bytes(self, first: int, stop: int) -> int:
        """Bytes that ``units[first:stop]`` as a stage hold of a micro-batch until its backward, without recomputation.

        All received tensors, and those that autograd keeps of its own.
        """
        received = self.crossing_bytes[first - 1] if first > 0 else 0
        foreign = sum(n for producer, unit, n in self.shared if producer < first <= unit < stop)
        return received + sum(self.activation_bytes[first:stop]) - foreign


def profile_graph(graph: Graph, inputs: Sequence[Tensor], *, repeats: int, recompute: bool) -> GraphCosts:
    """Times the units one by one, in ``repeats`` rounds after a warm-up; in 3 where these take long.

    A round goes as a training step does, all forwards and then all backwards in reverse, so that caches hold what they
    hold then. Weights, buffers and the state of random numbers are left as they were; gradients are cleared.

    Args:
        inputs: one micro-batch of the model's inputs, on the model's device.
        repeats: timed rounds.
        recompute: activation checkpointing of every unit.
    """
    device = inputs[0].device
    units = [_Unit(graph, number, device=device) for number in range(graph.num_units)]
    buffers = [state.tensor for state in graph.program.tensors.values() if state.kind == "buffer"]
    before = [buffer.clone() for buffer in buffers]
    kept = _Kept(graph)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.enable_grad():
        began = now_ns(device)
        for repeat in range(repeats + 1):
            if repeat > _FEWEST and now_ns(device) - began > _LONG_NS:
                break
            values = dict(zip(graph.input_names, inputs, strict=True))
            gradients: dict[str, Tensor] = {}
            is_timed = repeat > 0
            for unit in units:  # the warm-up also counts bytes; hooks would disturb a timed round
                with nullcontext() if is_timed else kept.by(unit.number, values):
                    unit.run_forward(values, recompute=recompute and is_timed)
            for unit in reversed(units):
                unit.run_backward(gradients, recompute=recompute and is_timed)
    with torch.no_grad():
        for buffer, old in zip(buffers, before):
            buffer.copy_(old)
    cuts = range(1, graph.num_units + 1)
    return GraphCosts(
        forward_ns=tuple(_middle(unit.forward) for unit in units),
        recompute_ns=tuple(_middle(unit.recompute) for unit in units),
        backward_ns=tuple(_middle(unit.backward) for unit in units),
        activation_bytes=tuple(kept.by_unit),
        parameter_bytes=tuple(graph.parameter_bytes(number) for number in range(graph.num_units)),
        crossing_bytes=tuple(graph.crossing_bytes(cut) for cut in cuts),
        returned_bytes=tuple(sum(t.num_bytes for t in graph.crossing(cut) if t.requires_grad) for cut in cuts),
        shared=tuple(kept.shared),
    )


def _middle(times: Sequence[int]) -> int:
    """The median of all rounds but the warm-up."""
    return int(median(times[1:]))


class _Unit:
    """One unit, with its times."""

    def __init__(self, graph: Graph, number: int, *, device: torch.device) -> None:
        self.number = number
        self._device = device
        self._segment: Segment = build_segment(graph, number, number + 1)
        self._state = [graph.program.tensors[name].tensor for name in self._segment.state]
        self._parameters = [tensor for tensor in self._state if tensor.requires_grad]
        self._tracked = {tensor.name for tensor in graph.tensors if tensor.requires_grad}
        self._given: list[Tensor] = []
        self._outputs: tuple[Tensor, ...] = ()
        self.forward: list[int] = []
        self.recompute: list[int] = []
        self.backward: list[int] = []

    def run_forward(self, values: dict[str, Tensor], *, recompute: bool) -> None:
        """Reads its inputs from ``values``, adds its outputs and takes out tensors without a later use."""
        given = [values[name].detach().requires_grad_(name in self._tracked) for name in self._segment.inputs]
        self._given = [*given, *(values[name] for name in self._segment.model_inputs), *self._state]
        start = now_ns(self._device)
        with torch.set_grad_enabled(not recompute):
            self._outputs = self._segment.function(*self._given)
        self.forward.append(now_ns(self._device) - start)
        values.update(zip(self._segment.outputs, (output.detach() for output in self._outputs)))
        for name in self._segment.finished:
            values.pop(name, None)

    def run_backward(self, gradients: dict[str, Tensor], *, recompute: bool) -> None:
        """Takes the gradients of its outputs out of ``gradients`` and adds to those of its inputs."""
        start = now_ns(self._device)
        if recompute:
            self._outputs = self._segment.function(*self._given)
        self.recompute.append(now_ns(self._device) - start if recompute else 0)
        for parameter in self._parameters:
            parameter.grad = torch.zeros_like(parameter)
        named = [(name, output) for name, output in zip(self._segment.outputs, self._outputs) if output.requires_grad]
        arriving = [gradients.pop(name) if name in gradients else torch.ones_like(output) for name, output in named]
        leaving = [(name, leaf) for name, leaf in zip(self._segment.inputs, self._given) if leaf.requires_grad]
        start = now_ns(self._device)
        if named:
            torch.autograd.backward([output for _, output in named], arriving)
        for name, leaf in leaving:
            if leaf.grad is not None:
                gradients[name] = gradients[name] + leaf.grad if name in gradients else leaf.grad
        self.backward.append(now_ns(self._device) - start)
        for parameter in self._parameters:
            parameter.grad = None  # at once: all units' gradients together may not fit
        self._given, self._outputs = [], ()


class _Kept:
    """Bytes kept by autograd, each storage once, by the unit that keeps it first."""

    def __init__(self, graph: Graph) -> None:
        self.by_unit = [0] * graph.num_units
        self.shared: list[tuple[int, int, int]] = []
        self._held = {state.tensor.untyped_storage().data_ptr() for state in graph.program.tensors.values()}
        self._producers: dict[int, int] = {}  # by address of what units behind use: who made it
        self._seen: set[int] = set()

    @contextmanager
    def by(self, unit: int, values: dict[str, Tensor]) -> Iterator[None]:
        """Counts while ``unit`` runs its forward on ``values``; kept tensors must live until all units have run."""

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            address = storage.data_ptr()
            if address not in self._held and address not in self._seen:
                self._seen.add(address)
                self.by_unit[unit] += storage.nbytes()
                if address in self._producers:
                    self.shared.append((self._producers[address], unit, storage.nbytes()))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield
        alive = {value.untyped_storage().data_ptr() for value in values.values()}
        self._producers = {address: self._producers.get(address, unit) for address in alive}
