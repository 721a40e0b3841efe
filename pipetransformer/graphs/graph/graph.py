"""A model as a graph of units, with places for a pipeline's cuts and every tensor that a cut would send."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor, fx

from pipetransformer.errors import UserError
from pipetransformer.graphs.graph.program import Program


@dataclass(frozen=True, slots=True)
class GraphUnit:
    """Consecutive operators that a cut keeps together.

    Attributes:
        name: qualified name of the module that they belong to, with "#2" and so on where it comes again.
        first, stop: positions among the graph's operators.
        operators: their names, as "conv2d".
        parameters: first names of the unit's parameters; a tied weight is in every unit that uses it.
        buffers: first names of the unit's buffers.
        block: name of the outermost member of a list or sequence that it belongs to, with "@1" and so on where that is
            called again; empty before, between and behind blocks.
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
        shape: sizes for one micro-batch.
        dtype: type of its numbers.
        num_bytes: bytes of one micro-batch.
        requires_grad: whether its gradient comes back.
        producer: the unit that makes it.
        consumers: the later units that use it, in order; the last unit uses the model's outputs.
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
    """A tensor between two stages.

    Attributes:
        producer: the stage that makes it.
        consumer: the later stage that uses it.
        num_bytes: bytes of one micro-batch.
    """

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
        tensors: all that a cut may send, in the order of their making.
        input_names: names of the model's inputs.
        input_shapes: shapes of the inputs for one micro-batch.
        input_dtypes: types of the inputs' numbers.
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
        """The tensors sent over the cut before unit ``cut``, in order of sending; none at the ends."""
        if not 0 < cut < self.num_units:
            return ()
        return tuple(t for t in self.tensors if t.producer < cut <= t.consumers[-1])

    def crossing_bytes(self, cut: int) -> int:
        """Bytes of one micro-batch that the forward sends over the cut before unit ``cut``."""
        return sum(tensor.num_bytes for tensor in self.crossing(cut))

    def stages(self, boundaries: Sequence[int]) -> tuple[range, ...]:
        """Units of every stage; ``boundaries`` are the first units of stages 1, 2, ...

        Raises:
            UserError: a stage would be empty.
        """
        cuts = (0, *boundaries, self.num_units)
        if any(a >= b for a, b in pairwise(cuts)):
            raise UserError(
                f"boundaries: {tuple(boundaries)} leave a stage of the {self.num_units} units empty; give ascending "
                f"ones from 1 to {self.num_units - 1}"
            )
        return tuple(range(a, b) for a, b in pairwise(cuts))

    def segments(self, units: range) -> tuple[range, ...]:
        """Consecutive ``units`` of one block each: the pieces of recomputation, as blocks are in a chain."""
        starts = [u for u in units if u == units.start or self.units[u].block != self.units[u - 1].block]
        return tuple(range(a, b) for a, b in pairwise([*starts, units.stop]))

    def edges(self, boundaries: Sequence[int]) -> tuple[Edge, ...]:
        """The cutting edges: every tensor once for each later stage that uses it."""
        self.stages(boundaries)
        found = []
        for tensor in self.tensors:
            source = bisect_right(boundaries, tensor.producer)
            targets = sorted({bisect_right(boundaries, unit) for unit in tensor.consumers} - {source})
            found += [Edge(source, target, tensor.name, tensor.num_bytes) for target in targets]
        return tuple(found)

    def work_needs(self) -> tuple[frozenset[int], ...]:
        """By unit, the earlier units whose work its own work needs.

        A sum belongs to the unit of one of its branches, but the work of that branch does not need the others: those
        that read the sum need them all.
        """
        needs: list[frozenset[int]] = []
        behind: dict[fx.Node, frozenset[int]] = {}  # by value, the units whose work it is made of
        for number, unit in enumerate(self.units):
            of_unit = frozenset[int]()
            for node in self.program.main[unit.first : unit.stop]:
                before = frozenset().union(*(behind.get(source, frozenset()) for source in node.all_input_nodes))
                works = self.program.works(node)
                of_unit |= before if works else frozenset()
                behind[node] = frozenset({number}) if works else before
            needs.append(of_unit - {number})
        return tuple(needs)

    def output_examples(self) -> list[Tensor]:
        """The model's outputs for one micro-batch, without data."""
        values = [node.meta["val"] for node in self.program.outputs]
        # Strides too: torch compares them with those of what the last stage gives.
        return [torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device="meta") for v in values]

    def parameter_bytes(self, unit: int) -> int:
        return sum(self.program.tensors[name].tensor.nbytes for name in self.units[unit].parameters)

    def tied(self, boundaries: Sequence[int]) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """(first name, stages) of every parameter with copies on more than one stage."""
        holders: dict[str, list[int]] = {}
        for stage, units in enumerate(self.stages(boundaries)):
            for name in dict.fromkeys(name for unit in units for name in self.units[unit].parameters):
                holders.setdefault(name, []).append(stage)
        return tuple((name, tuple(stages)) for name, stages in holders.items() if len(stages) > 1)
