"""An exported model as an ordered list of operators, of two sorts by the work of a stage with each.

    main   the model's work: depends on a parameter, on a floating-point input, on random numbers or on a state that
           changes. Each is computed once, on the stage that its unit belongs to.
    side   the rest: position ids, masks, shape arithmetic. Every stage that needs one computes it again from the
           model's inputs, which all ranks have; it is never sent.

Operators that change memory in place are followed by the memory that they change: see ``Program.inseparable``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind

from pipetransformer.adapter import aliases, is_assertion, is_light, written
from pipetransformer.errors import UserError
from pipetransformer.graphs.graph.modes import draws_numbers

_BATCH_NORM = torch.ops.aten.batch_norm.default


@dataclass(frozen=True, slots=True, eq=False)
class StateTensor:
    """A tensor that the model holds.

    Attributes:
        names: all names in the model, the graph's own first; a tied weight has several.
        kind: parameter or buffer, or a constant that the exporter lifted out of the code; no state_dict has that.
        is_persistent: whether the model's state_dict has it.
    """

    names: tuple[str, ...]
    tensor: Tensor
    kind: Literal["parameter", "buffer", "constant"]
    is_persistent: bool


class Statistics(NamedTuple):
    """Names of a batch normalisation's running statistics.

    Attributes:
        mean: the running mean.
        variance: the running variance.
        counter: the number of mini-batches; None where there is none.
    """

    mean: str
    variance: str
    counter: str | None


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """Operators of a model, in the order of their running.

    Attributes:
        module: the exported graph; owns the subgraphs that some operators call.
        inputs: the model's inputs.
        outputs: the model's flat tensor outputs.
        state: by placeholder, the name of its StateTensor in ``tensors``.
        tensors: the model's tensors by their first name.
        order: position of every operator.
        main: operators computed once, in order.
        side: operators that every stage computes for itself.
        side_writers: side operators that change memory in place, with the roots of that memory.
        statistics: the batch normalisations that update running statistics.
        changing: first names of other buffers that the forward changes.
        roots: by node, the nodes whose memory its value may be.
        inseparable: (first, last) positions in ``main`` that must stay in one unit: memory between its birth and its
            last in-place change, a state that changes between its first and last use, a tuple and its elements.
    """

    module: fx.GraphModule
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    state: Mapping[fx.Node, str]
    tensors: Mapping[str, StateTensor]
    order: Mapping[fx.Node, int]
    main: tuple[fx.Node, ...]
    side: frozenset[fx.Node]
    side_writers: tuple[tuple[fx.Node, frozenset[fx.Node]], ...]
    statistics: Mapping[fx.Node, Statistics]
    changing: tuple[str, ...]
    roots: Mapping[fx.Node, frozenset[fx.Node]]
    inseparable: tuple[tuple[int, int], ...]

    def works(self, node: fx.Node) -> bool:
        """Whether an operator does more than reshape, or than combine values element by element."""
        read = (self.tensors[self.state[source]] for source in node.all_input_nodes if source in self.state)
        return not is_light(node) or any(state.kind == "parameter" for state in read)

    def side_needed(self, values: Iterable[fx.Node]) -> tuple[fx.Node, ...]:
        """Side operators behind ``values``, in order, with all that change the memory of one of them."""
        needed: set[fx.Node] = set()
        waiting = list(values)
        while waiting:
            node = waiting.pop()
            if node in self.side and node not in needed:
                needed.add(node)
                waiting += node.all_input_nodes
                waiting += [writer for writer, changed in self.side_writers if changed & self.roots[node]]
        return tuple(sorted(needed, key=self.order.__getitem__))


def read_program(exported: ExportedProgram, model: nn.Module) -> Program:
    """Reads an exported model as a program.

    Raises:
        UserError: the model cannot be cut; names the operator.
    """
    signature = exported.graph_signature
    if any(spec.kind is not OutputKind.USER_OUTPUT for spec in signature.output_specs):
        changed = next(spec for spec in signature.output_specs if spec.kind is not OutputKind.USER_OUTPUT)
        raise UserError(f"{type(model).__name__} cannot be cut: it changes {changed.target} in place")
    tensors, canonical = _state_tensors(exported, model)
    lifted: dict[str, str] = {
        **signature.inputs_to_parameters,
        **signature.inputs_to_buffers,
        **signature.inputs_to_lifted_tensor_constants,
    }
    placeholders = exported.graph.find_nodes(op="placeholder")
    state = {node: canonical[lifted[node.name]] for node in placeholders if node.name in lifted}
    user_inputs = set(signature.user_inputs)
    inputs = tuple(node for node in placeholders if node.name in user_inputs)
    if len(state) + len(inputs) != len(placeholders):
        odd = next(node.name for node in placeholders if node not in state and node not in inputs)
        raise UserError(f"{type(model).__name__} cannot be cut: it holds {odd}, which is no tensor")
    (output,) = exported.graph.find_nodes(op="output")
    outputs = tuple(node for node in output.all_input_nodes if isinstance(node.meta.get("val"), Tensor))
    if not outputs:
        raise UserError(f"{type(model).__name__} cannot be cut: it returns no tensor")
    called = [node for node in exported.graph.nodes if node.op == "call_function" and not is_assertion(node)]
    statistics = {node: _statistics(node, state, tensors) for node in called if _tracks_statistics(node)}
    counters = {names.counter for names in statistics.values()}
    operators = [node for node in called if not any(state.get(target, "") in counters for target in written(node))]
    _check_values(operators, type(model).__name__)
    roots = _roots([*placeholders, *operators])
    changing = {root for node in operators for root in _changed(node, roots) if root.op == "placeholder"}
    changed_names = tuple(name for node, name in state.items() if node in changing)
    changing |= {
        source for node in statistics for source in node.all_input_nodes if state.get(source) in statistics[node]
    }
    parameters = {node: name for node, name in state.items() if tensors[name].kind == "parameter"}
    _check_changes(changing, inputs, parameters, type(model).__name__)
    floating = {node for node in inputs if node.meta["val"].is_floating_point()}
    main = _main(operators, roots, seeds=floating | parameters.keys() | changing)
    side = [node for node in operators if node not in main]
    ordered = tuple(node for node in operators if node in main)
    return Program(
        module=exported.graph_module,
        inputs=inputs,
        outputs=outputs,
        state=state,
        tensors=tensors,
        order={node: index for index, node in enumerate(operators)},
        main=ordered,
        side=frozenset(side),
        side_writers=tuple((node, changed) for node in side if (changed := _changed(node, roots))),
        statistics=statistics,
        changing=changed_names,
        roots=roots,
        inseparable=_inseparable(ordered, roots, changing),
    )


def _tracks_statistics(node: fx.Node) -> bool:
    return node.target is _BATCH_NORM and node.args[5] is True and node.args[3] is not None


def _statistics(node: fx.Node, state: Mapping[fx.Node, str], tensors: Mapping[str, StateTensor]) -> Statistics:
    _, _, _, mean, variance, *_ = node.args
    assert isinstance(mean, fx.Node) and isinstance(variance, fx.Node)
    counter = ".".join([*state[mean].split(".")[:-1], "num_batches_tracked"])
    return Statistics(state[mean], state[variance], counter if counter in tensors else None)


def _state_tensors(exported: ExportedProgram, model: nn.Module) -> tuple[dict[str, StateTensor], dict[str, str]]:
    """All tensors of the model by their first name, and the first name of every name."""
    persistent = set(model.state_dict(keep_vars=True))
    constants = {name: value for name, value in exported.constants.items() if isinstance(value, Tensor)}
    buffers = dict(model.named_buffers(remove_duplicate=False))
    parameters = dict(model.named_parameters(remove_duplicate=False))
    known: dict[Tensor, list[str]] = {}
    for name, tensor in {**constants, **buffers, **parameters}.items():
        known.setdefault(tensor, []).append(name)
    tensors: dict[str, StateTensor] = {}
    for tensor, names in known.items():
        kind: Literal["parameter", "buffer", "constant"] = (
            "parameter" if isinstance(tensor, nn.Parameter) else "buffer" if names[0] in buffers else "constant"
        )
        tensors[names[0]] = StateTensor(tuple(names), tensor, kind, not persistent.isdisjoint(names))
    return tensors, {name: state.names[0] for state in tensors.values() for name in state.names}


def _check_values(operators: Sequence[fx.Node], model: str) -> None:
    for node in operators:
        values = node.meta.get("val")
        for value in values if isinstance(values, (list, tuple)) else (values,):
            sizes = value.shape if isinstance(value, Tensor) else (value,)
            if any(isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)) for size in sizes):
                raise UserError(
                    f"unexportable model: {model} has {node.target}, whose result has a shape that depends "
                    "on values; replace it by an operator of fixed shape"
                )


def _check_changes(
    changing: Iterable[fx.Node], inputs: Sequence[fx.Node], parameters: Mapping[fx.Node, str], model: str
) -> None:
    for node in changing:
        if node in inputs:
            raise UserError(f"{model} cannot be cut: it changes its input {node.name} in place; give it a copy")
        if node in parameters:
            raise UserError(f"{model} cannot be cut: its forward changes the parameter {parameters[node]} in place")


def _roots(nodes: Sequence[fx.Node]) -> dict[fx.Node, frozenset[fx.Node]]:
    roots: dict[fx.Node, frozenset[fx.Node]] = {}
    for node in nodes:
        shared = aliases(node) if node.op == "call_function" else ()
        roots[node] = frozenset().union(*(roots.get(source, frozenset()) for source in shared)) or frozenset({node})
    return roots


def _changed(node: fx.Node, roots: Mapping[fx.Node, frozenset[fx.Node]]) -> frozenset[fx.Node]:
    """Roots of the memory that an operator changes in place."""
    return frozenset().union(*(roots[target] for target in written(node)))


def _main(
    operators: Sequence[fx.Node], roots: Mapping[fx.Node, frozenset[fx.Node]], *, seeds: set[fx.Node]
) -> set[fx.Node]:
    """Operators that depend on a seed, draw random numbers, or share memory that such an operator changes.

    Args:
        seeds: placeholders.
    """
    main: set[fx.Node] = set()
    while True:
        before = len(main)
        for node in operators:
            if draws_numbers(node) or any(source in main or source in seeds for source in node.all_input_nodes):
                main.add(node)
                main |= {root for root in _changed(node, roots) if root.op == "call_function"}
        if len(main) == before:
            return main


def _inseparable(
    main: Sequence[fx.Node], roots: Mapping[fx.Node, frozenset[fx.Node]], changing: set[fx.Node]
) -> tuple[tuple[int, int], ...]:
    position = {node: index for index, node in enumerate(main)}
    pairs: set[tuple[int, int]] = set()
    for node, index in position.items():
        for root in _changed(node, roots) & position.keys():
            pairs.add((position[root], index))
        if isinstance(node.meta.get("val"), (list, tuple)):
            pairs.add((index, max((position[user] for user in node.users if user in position), default=index)))
    uses: dict[fx.Node, list[int]] = {}
    for node, index in position.items():
        for source in node.all_input_nodes:
            for root in roots.get(source, frozenset()) & changing:
                uses.setdefault(root, []).append(index)
    pairs.update((min(indices), max(indices)) for indices in uses.values())
    return tuple(sorted(pair for pair in pairs if pair[0] < pair[1]))
