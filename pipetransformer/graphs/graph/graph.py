"""A model as a graph of units that a pipeline may cut between, with every tensor that a cut would send."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pipetransformer.errors import UserError
from pipetransformer.graphs.graph.program import Program

__all__ = ["Edge", "Graph", "GraphTensor", "GraphUnit"]


@dataclass(frozen=True, slots=True)
class GraphUnit:
    """Consecutive operators that a cut keeps together.

    Attributes:
        name: qualified name of the module that they belong to, with "#2" and so on where it comes again.
        first, stop: positions among the graph's operators.
        operators: their names, as "conv2d".
        parameters, buffers: first names of what the unit uses; a tied weight is in every unit that uses it.
        block: name of the outermost member of a list or sequence that it belongs to, with "@1" and so on where that is
            called again; empty for what is before, between and behind.
    """

    name: str
    first: int
    stop: int
    operators: tuple[str, ...]
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    block: str


@dataclass(frozen=True, slots=True)
class GraphTensor:
    """A tensor that some cut sends: other units than its producer use it.

    Attributes:
        shape, dtype: of one micro-batch.
        requires_grad: whether its gradient comes back.
        producer: the unit that makes it. consumers: the later units that use it, in order; what the model returns is
            used by the last one.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    num_bytes: int
    requires_grad: bool
    producer: int
    consumers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Edge:
    """A tensor that one stage makes and a later one uses."""

    producer: int
    consumer: int
    name: str
    num_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """The training graph of a model for one micro-batch shape.

    A cut before unit c, 0 < c < number of units, gives ``units[:c]`` to earlier stages. Long skips are relayed: a stage
    is sent everything that is alive at its start, so that one code path serves all schedules; ``Graph.edges`` tells
    what sending each tensor straight to its consumers would be. Model inputs are never sent: all ranks have them.

    Attributes:
        units: in topological order, the order in which the model runs them.
        tensors: all that a cut may send, in the order in which they are made.
        input_names, input_shapes, input_dtypes: of one micro-batch of the model's inputs.
        unused: parameters and buffers of the model that no operator uses; stage 0 carries them.
        program: the operators.
    """

    units: tuple[GraphUnit, ...]
    tensors: tuple[GraphTensor, ...]
    input_names: tuple[str, ...]
    input_shapes: tuple[tuple[int, ...], ...]
    input_dtypes: tuple[torch.dtype, ...]
    unused: tuple[str, ...]
    program: Program = field(repr=False)

    @property
    def num_units(self) -> int:
        return len(self.units)

    def crossing(self, cut: int) -> tuple[GraphTensor, ...]:
        """What is sent over the cut before unit ``cut``, in order of sending; nothing at the ends."""
        if not 0 < cut < self.num_units:
            return ()
        return tuple(t for t in self.tensors if t.producer < cut <= t.consumers[-1])

    def crossing_bytes(self, cut: int) -> int:
        """Bytes of one micro-batch that the forward sends over the cut before unit ``cut``."""
        return sum(tensor.num_bytes for tensor in self.crossing(cut))

    def stages(self, boundaries: Sequence[int]) -> tuple[range, ...]:
        """Units of every stage; ``boundaries`` are the first units of stages 1, 2, ...

        Raises UserError where a stage would be empty.
        """
        cuts = (0, *boundaries, self.num_units)
        if any(a >= b for a, b in zip(cuts, cuts[1:])):
            raise UserError(
                f"boundaries: {tuple(boundaries)} leave a stage of the {self.num_units} units empty; give ascending "
                f"ones from 1 to {self.num_units - 1}"
            )
        return tuple(range(a, b) for a, b in zip(cuts, cuts[1:]))

    def segments(self, units: range) -> tuple[range, ...]:
        """Consecutive ``units`` of one block each: what is recomputed as a whole, as a block of a chain is."""
        starts = [u for u in units if u == units.start or self.units[u].block != self.units[u - 1].block]
        return tuple(range(a, b) for a, b in zip(starts, [*starts[1:], units.stop]))

    def edges(self, boundaries: Sequence[int]) -> tuple[Edge, ...]:
        """The cutting edges: every tensor once for each later stage that uses it."""
        self.stages(boundaries)
        found = []
        for tensor in self.tensors:
            source = bisect_right(boundaries, tensor.producer)
            targets = sorted({bisect_right(boundaries, unit) for unit in tensor.consumers} - {source})
            found += [Edge(source, target, tensor.name, tensor.num_bytes) for target in targets]
        return tuple(found)

    def direct_bytes(self, boundaries: Sequence[int]) -> int:
        """Bytes that one micro-batch's forward would send if every tensor went straight to each stage that uses it."""
        return sum(edge.num_bytes for edge in self.edges(boundaries))

    def output_examples(self) -> list[Tensor]:
        """What the model returns of one micro-batch, without data."""
        return [torch.empty_like(node.meta["val"], device="meta") for node in self.program.outputs]

    def parameter_bytes(self, unit: int) -> int:
        tensors = (self.program.tensors[name].tensor for name in self.units[unit].parameters)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def tied(self, boundaries: Sequence[int]) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """(first name, stages) of every parameter that more than one stage holds a copy of."""
        holders: dict[str, list[int]] = {}
        for stage, units in enumerate(self.stages(boundaries)):
            for name in dict.fromkeys(name for unit in units for name in self.units[unit].parameters):
                holders.setdefault(name, []).append(stage)
        return tuple((name, tuple(stages)) for name, stages in holders.items() if len(stages) > 1)
