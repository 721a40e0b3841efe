"""Any module as a chain: its forward is traced, and cut before the first and behind the last of its blocks.

    x -> stem -> block 0 -> ... -> block L-1 -> head -> outputs

Tracing is torch.fx's (Reed et al., arXiv 2112.08429). The parts run on the module itself, through its own modules and
parameters, so that names, dropout and later changes are its own; ``chain.py`` proves them equal to the whole forward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from pipetransformer.errors import UserError
from pipetransformer.models.families import OWN, Family


class _Tracer(fx.Tracer):
    """Takes blocks whole."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self._blocks = {id(block) for block in blocks}

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return id(m) in self._blocks or super().is_leaf_module(m, module_qualified_name)


def traced_family(model: nn.Module, blocks: str, *, name: str, main_input: str | None = None) -> Family:
    """The family of one module.

    Args:
        blocks: attribute path of its block list.
        name: of the module, for messages.
        main_input: the name under which batches hold its first input; None for the forward's own name.

    Raises:
        UserError: there is no such list; or the forward cannot be traced, or is no chain of stem, blocks and head.
    """
    try:
        listed = list(model.get_submodule(blocks).named_children())
    except AttributeError:
        lists = [path for path, part in model.named_modules() if isinstance(part, (nn.ModuleList, nn.Sequential))]
        known = ", ".join(lists) or "none"
        raise UserError(f"blocks: {name} has no {blocks}; its lists of modules are {known}") from None
    if len(listed) < 2:
        raise UserError(f"blocks: {blocks} of {name} holds {len(listed)} modules; give a list of at least 2 blocks")
    graph = _graph_of(model, [block for _, block in listed], name=name)
    calls = [_call_of(graph, f"{blocks}.{own}", name=name) for own, _ in listed]
    for before, call in zip([None, *calls], calls):
        extra = [node for node in call.all_input_nodes if before is not None and node is not before]
        if extra or len(call.args) != 1 or call.kwargs:
            raise _no_chain(name, f"{call.target} takes more than what leaves the one before")
    (entering,) = calls[0].all_input_nodes
    stem, head = _part(graph, entering, start=None), _part(graph, _output_of(graph, name=name), start=calls[-1])
    if taken := [node.target for node in head.nodes if node.op == "placeholder"][1:]:
        raise _no_chain(name, f"what follows the blocks reads the input {taken[0]}")
    if shared := _owned(stem) & _owned(head):
        raise _no_chain(name, f"{min(shared)} is used before and behind the blocks")
    main, *others = [str(node.target) for node in stem.nodes if node.op == "placeholder"]
    named = main if main_input is None else main_input

    def run_stem(module: Any, inputs: Mapping[str, Tensor]) -> Tensor:
        rest = (inputs[key] for key in others)
        dtype = next(parameter.dtype for parameter in module.parameters() if parameter.is_floating_point())
        return _run(module, stem, inputs[named], *(x.to(dtype) if x.is_floating_point() else x for x in rest))

    def run_head(module: Any, hidden: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        return _run(module, head, hidden)

    return Family(
        name=f"a module of your own ({name})",
        blocks=blocks,
        stem_prefixes=tuple(sorted(f"{path}." if _is_module(model, path) else path for path in _owned(stem))),
        main_input=named,
        stem=run_stem,
        head=run_head,
        block_arguments=lambda module, hidden, inputs: {},
        stem_inputs=tuple(others),
    )


def take_blocks(model: nn.Module, blocks: str | None, *, name: str, main_input: str) -> None:
    """Has ``model`` cut at ``model.blocks``, where that is given. Raises UserError, as ``traced_family``."""
    if blocks is not None:
        try:
            model.__dict__[OWN] = traced_family(model, blocks, name=name, main_input=main_input)
        except UserError as error:
            raise UserError(f"model.{error}") from error


def _run(module: nn.Module, graph: fx.Graph, *inputs: Tensor) -> Tensor:
    found: Tensor = fx.Interpreter(module, garbage_collect_values=False, graph=graph).run(*inputs)
    return found


def _graph_of(model: nn.Module, blocks: Sequence[nn.Module], *, name: str) -> fx.Graph:
    """The traced forward, which must be the same in training and in evaluation."""
    mode, graphs = model.training, list[fx.Graph]()
    try:
        for training in (True, False):
            model.train(training)
            graphs.append(_Tracer(blocks).trace(model))
    except Exception as error:  # whatever control flow makes of a stand-in for a tensor
        said = " ".join(str(error).split())[:160]
        raise UserError(
            f"blocks: the forward of {name} cannot be traced ({type(error).__name__}: {said}); write it as a stem, a "
            "loop over the blocks and a head, without branches on tensors"
        ) from error
    finally:
        model.train(mode)
    if str(graphs[0]) != str(graphs[1]):
        raise UserError(
            f"blocks: the forward of {name} asks whether it trains; leave that to modules such as nn.Dropout"
        )
    return graphs[0]


def _call_of(graph: fx.Graph, path: str, *, name: str) -> fx.Node:
    calls: list[fx.Node] = [node for node in graph.nodes if node.op == "call_module" and node.target == path]
    if len(calls) != 1:
        raise _no_chain(name, f"{path} is called {len(calls)} times")
    return calls[0]


def _output_of(graph: fx.Graph, *, name: str) -> fx.Node:
    (output,) = (node for node in graph.nodes if node.op == "output")
    found = output.args[0]
    if not isinstance(found, fx.Node):
        raise _no_chain(name, "it returns more than one tensor")
    return found


def _part(graph: fx.Graph, end: fx.Node, *, start: fx.Node | None) -> fx.Graph:
    """What leads to ``end``, from ``start``, which is an input then, and from the forward's own inputs."""
    needed, waiting = set[fx.Node](), [end]
    while waiting:
        node = waiting.pop()
        if node not in needed:
            needed.add(node)
            waiting += [] if node is start else node.all_input_nodes
    part, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    if start is not None:
        copies[start] = part.placeholder("hidden")
    for node in graph.nodes:
        if node in needed and node is not start:
            copies[node] = part.node_copy(node, copies.__getitem__)
    part.output(copies[end])
    return part


def _owned(graph: fx.Graph) -> set[str]:
    """Paths of the modules and parameters that a part uses."""
    return {str(node.target) for node in graph.nodes if node.op in ("call_module", "get_attr")}


def _is_module(model: nn.Module, path: str) -> bool:
    try:
        model.get_submodule(path)
        return True
    except AttributeError:
        return False


def _no_chain(name: str, reason: str) -> UserError:
    return UserError(f"blocks: {name} is no chain of a stem, blocks and a head: {reason}")


def logits_of(told: Any) -> Tensor:
    """The outputs of a model of any library: a tensor, or the logits that transformers names."""
    if isinstance(told, Tensor):
        return told
    return torch.stack((told.start_logits, told.end_logits), dim=-1) if "start_logits" in told else told.logits
