"""The function of consecutive units of a graph, generated: tensors in, tensors out, nothing held."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from pipetransformer.graphs.graph.batch_norm import MiniBatchNorm
from pipetransformer.graphs.graph.graph import Graph
from pipetransformer.graphs.graph.modes import Switched, draws_numbers, switched
from pipetransformer.graphs.graph.program import Statistics


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Consecutive units as a function.

    Attributes:
        function: called with the tensors named in ``inputs``, ``model_inputs`` and ``state``, in this order; returns
            those named in ``outputs``. It has no parameter of its own.
        inputs: tensors of units before.
        model_inputs: inputs of the model.
        state: parameters, buffers and constants of the model.
        outputs: tensors for units behind; for the last units, the model's outputs.
        finished: tensors without a use behind these units.
        statistics: batch normalisations, with the names of their running statistics.
        random: operators that draw numbers and are not known to be training's only.
    """

    function: fx.GraphModule
    inputs: tuple[str, ...]
    model_inputs: tuple[str, ...]
    state: tuple[str, ...]
    outputs: tuple[str, ...]
    finished: tuple[str, ...]
    statistics: tuple[tuple[MiniBatchNorm, Statistics], ...]
    random: tuple[str, ...]


def build_segment(graph: Graph, first: int, stop: int) -> Segment:
    """The function of ``graph.units[first:stop]``."""
    program = graph.program
    nodes = program.main[graph.units[first].first : graph.units[stop - 1].stop]
    later = {tensor.name for tensor in graph.tensors if tensor.consumers[-1] >= stop}
    returned = program.outputs if stop == graph.num_units else tuple(node for node in nodes if node.name in later)
    wanted = [source for node in nodes for source in node.all_input_nodes]
    body = sorted([*nodes, *program.side_needed([*wanted, *returned])], key=program.order.__getitem__)
    sources = dict.fromkeys([*(source for node in body for source in node.all_input_nodes), *returned])
    inside = set(body)
    given = [node for node in sources if node not in inside]
    inputs = tuple(node for node in given if node in program.order)
    model_inputs = tuple(node for node in program.inputs if node in given)
    state = tuple(node for node in given if node in program.state)

    copied = fx.Graph()
    held: dict[str, nn.Module] = {}
    statistics: list[tuple[MiniBatchNorm, Statistics]] = []
    new = {node: copied.placeholder(node.name) for node in (*inputs, *model_inputs, *state)}
    for node in given:
        if node.op == "get_attr":  # a subgraph that an operator calls
            assert isinstance(node.target, str)
            held[node.target] = program.module.get_submodule(node.target)
            new[node] = copied.get_attr(node.target)
    for node in body:
        if node in program.statistics:
            layer = MiniBatchNorm(momentum=node.args[6], eps=node.args[7])  # type: ignore[arg-type]
            statistics.append((layer, program.statistics[node]))
            new[node] = _call_module(copied, held, layer, tuple(new.get(a) for a in node.args[:5]))  # type: ignore[arg-type]
        elif switched(node):
            arguments = fx.node.map_arg(node.args, new.__getitem__)
            new[node] = _call_module(
                copied, held, Switched(node), arguments, fx.node.map_arg(node.kwargs, new.__getitem__)
            )
        else:
            new[node] = copied.node_copy(node, new.__getitem__)
            new[node].meta.clear()  # it would keep the whole export alive
    copied.output(tuple(new[node] for node in returned))
    return Segment(
        function=fx.GraphModule(held, copied),
        inputs=tuple(node.name for node in inputs),
        model_inputs=tuple(node.name for node in model_inputs),
        state=tuple(program.state[node] for node in state),
        outputs=tuple(node.name for node in returned),
        finished=tuple(t.name for t in graph.tensors if first <= t.consumers[-1] < stop),
        statistics=tuple(statistics),
        random=tuple(str(node.target) for node in body if draws_numbers(node) and not switched(node)),
    )


def _call_module(
    graph: fx.Graph,
    held: dict[str, nn.Module],
    module: nn.Module,
    arguments: tuple[Any, ...],
    options: dict[str, Any] | None = None,
) -> fx.Node:
    name = f"layer_{len(held)}"
    held[name] = module
    # Note: Graph.call_module would warn that no module owns the graph yet.
    return graph.create_node("call_module", name, arguments, options or {})
