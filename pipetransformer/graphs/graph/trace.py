"""A model as a ``Graph``: export, places for a pipeline's cuts, tensors over each cut.

    model --torch.export--> operators --runs of one submodule--> units --live between units--> crossing tensors

Every unit has work of its own: operators that only reshape or go element by element lie on that side of a cut where
the cut sends less. Nothing is cut that memory changed in place ties together.

Note: the shapes are static, the batch included. A dynamic batch dimension leaves size arithmetic on values of one stage
in the code of others and is refused by some models; a trace takes seconds, and a pipeline's micro-batches are of one
shape anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from torch import Tensor, fx, nn

from pipetransformer.adapter import block_call, export, export_failure, module_call, requires_grad
from pipetransformer.errors import UserError
from pipetransformer.graphs.graph.graph import Graph, GraphTensor, GraphUnit
from pipetransformer.graphs.graph.program import Program, read_program


def trace(model: nn.Module, example: tuple[Tensor, ...], *, depth: int | None = None) -> Graph:
    """The training graph of ``model`` for micro-batches shaped like ``example``.

    A model in eval mode is traced in training mode; of a model in training mode, submodules that are in eval mode stay
    so. Modes, weights and buffers are left as they were; the graph shares the tensors.

    Args:
        example: the model's positional inputs, dimension 0 being the batch.
        depth: levels of the module tree that units tell apart: 1 for the model's direct children, the modules of a
            ModuleList being one level with it; None for all, down to single layers.

    Raises:
        UserError: the model cannot be exported or cut; names the operator.
    """
    if depth is not None and depth < 1:
        raise UserError(f"depth: {depth} gives no units; give at least 1")
    modes = {module: module.training for module in model.modules()}
    if not model.training:
        model.train()
    try:
        exported = export(model, example)
    except Exception as error:
        raise UserError(_unexportable(model, error)) from error
    finally:
        for module, mode in modes.items():
            module.training = mode
    program = read_program(exported, model)
    calls = _carried(module_call(node, depth) for node in program.main)
    works = [program.works(node) for node in program.main]
    starts = _starts(program, calls, works)
    tracked = requires_grad(
        program.module,
        {
            node: node in program.state and program.tensors[program.state[node]].tensor.requires_grad
            for node in program.module.graph.find_nodes(op="placeholder")
        },
    )
    units = _units(program, starts, calls, works, root=type(model).__name__)
    used = {name for unit in units for name in (*unit.parameters, *unit.buffers)}
    return Graph(
        units=units,
        tensors=_tensors(program, units, tracked),
        input_names=tuple(node.name for node in program.inputs),
        input_shapes=tuple(tuple(node.meta["val"].shape) for node in program.inputs),
        input_dtypes=tuple(node.meta["val"].dtype for node in program.inputs),
        unused=tuple(name for name, held in program.tensors.items() if held.kind != "constant" and name not in used),
        program=program,
    )


def _unexportable(model: nn.Module, error: Exception) -> str:
    operator, place, reason = export_failure(error, calls_from=Path(__file__).parent)
    where = "".join((f" at {operator}" if operator else "", f", line `{place}`" if place else ""))
    remedy = "rewrite that line" if place else "rewrite it"
    return f"unexportable model: {type(model).__name__} fails{where}: {reason.rstrip('.')}; {remedy} for torch.export"


def _carried(calls: Iterable[tuple[str, str] | None]) -> list[tuple[str, str]]:
    """By main operator: a module and the number of its call; where the exporter made it, those of the one before."""
    return list(accumulate(calls, lambda before, call: before if call is None else call, initial=("", "")))[1:]


def _starts(program: Program, calls: Sequence[tuple[str, str]], works: Sequence[bool]) -> list[int]:
    """Positions of the first operators of all units.

    Between two operators with work of their own that belong to different submodules there is one cut, the cheapest: of
    the fewest bytes, then of the fewest tensors, then the last.
    """
    alive = _alive(program)
    whole = {position for first, last in program.inseparable for position in range(first + 1, last + 1)}
    starts = [0]
    for here, there in pairwise(position for position, does_work in enumerate(works) if does_work):
        if any(calls[position] != calls[here] for position in range(here + 1, there + 1)):
            choices = [position for position in range(here + 1, there + 1) if position not in whole]
            if choices:
                starts.append(min(choices, key=lambda position: (*alive[position], -position)))
    return starts


def _alive(program: Program) -> list[tuple[int, int]]:
    """(bytes, tensors) that a cut before each operator would send."""
    position = {node: index for index, node in enumerate(program.main)}
    changes = [[0, 0] for _ in range(len(position) + 1)]
    for node, made in position.items():
        last = max((position[user] for user in node.users if user in position), default=made)
        value = node.meta.get("val")
        if isinstance(value, Tensor) and last > made:
            for at, sign in ((made + 1, 1), (last + 1, -1)):
                changes[at][0] += sign * value.nbytes
                changes[at][1] += sign
    return list(zip(*map(accumulate, zip(*changes))))


def _units(
    program: Program, starts: Sequence[int], calls: Sequence[tuple[str, str]], works: Sequence[bool], *, root: str
) -> tuple[GraphUnit, ...]:
    blocks = _carried(map(block_call, program.main))
    units: list[GraphUnit] = []
    seen: dict[str, int] = {}
    for first, stop in pairwise([*starts, len(program.main)]):
        nodes = program.main[first:stop]
        named = next((position for position in range(first, stop) if works[position]), first)
        name = calls[named][0] or root
        seen[name] = seen.get(name, 0) + 1
        side = program.side_needed(source for node in nodes for source in node.all_input_nodes)
        held = _held(program, [*nodes, *side])
        units.append(
            GraphUnit(
                name=name if seen[name] == 1 else f"{name}#{seen[name]}",
                first=first,
                stop=stop,
                operators=tuple(_operator(node) for node in nodes),
                parameters=tuple(n for n in held if program.tensors[n].kind == "parameter"),
                buffers=tuple(n for n in held if program.tensors[n].kind == "buffer"),
                block="@".join(filter(None, blocks[named])),
            )
        )
    return tuple(units)


def _held(program: Program, nodes: Iterable[fx.Node]) -> tuple[str, ...]:
    """First names of the state that ``nodes`` read, and of the counters of their statistics."""
    names: dict[str, None] = {}
    for node in nodes:
        names.update(dict.fromkeys(program.state[source] for source in node.all_input_nodes if source in program.state))
        if node in program.statistics and (counter := program.statistics[node].counter):
            names[counter] = None
    return tuple(names)


def _operator(node: fx.Node) -> str:
    target: Any = getattr(node.target, "overloadpacket", node.target)
    return str(target.__name__)


def _tensors(program: Program, units: Sequence[GraphUnit], tracked: dict[fx.Node, bool]) -> tuple[GraphTensor, ...]:
    unit_of = {node: i for i, unit in enumerate(units) for node in program.main[unit.first : unit.stop]}
    found: list[GraphTensor] = []
    for node, producer in unit_of.items():
        consumers = {unit_of[user] for user in node.users if user in unit_of}
        if node in program.outputs:
            consumers.add(len(units) - 1)
        consumers.discard(producer)
        if consumers:
            value = node.meta["val"]
            assert isinstance(value, Tensor) and min(consumers) > producer, node.format_node()
            found.append(
                GraphTensor(
                    name=node.name,
                    shape=tuple(value.shape),
                    dtype=value.dtype,
                    num_bytes=value.nbytes,
                    requires_grad=tracked[node],
                    producer=producer,
                    consumers=tuple(sorted(consumers)),
                )
            )
    return tuple(found)
