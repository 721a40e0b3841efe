"""Operators of an exported graph: changes in place, aliases and random draws, as only schemas and tags tell."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx


def _schema(node: fx.Node) -> Any:
    """Note: an operator's schema is the only place that tells what it changes and what it aliases."""
    return node.target._schema if isinstance(node.target, torch._ops.OpOverload) else None


def _marked(node: fx.Node, marks: Callable[[Any], bool]) -> Iterator[fx.Node]:
    """Nodes given for those arguments of ``node`` whose alias annotation satisfies ``marks``."""
    for position, argument in enumerate(_schema(node).arguments):
        if argument.alias_info is not None and marks(argument.alias_info):
            given = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
            yield from (value for value in (given if isinstance(given, (list, tuple)) else (given,)) if _is_node(value))


def _is_node(value: object) -> bool:
    return isinstance(value, fx.Node)


def written(node: fx.Node) -> tuple[fx.Node, ...]:
    """The arguments that ``node`` changes in place.

    An operator without a schema (one with a subgraph) is taken to change nothing unless its subgraph does; then all.
    """
    if _schema(node) is not None:
        return tuple(_marked(node, lambda info: bool(info.is_write)))
    for source in node.all_input_nodes:
        subgraph = getattr(node.graph.owning_module, source.target) if source.op == "get_attr" else None  # type: ignore[arg-type]
        if isinstance(subgraph, fx.GraphModule) and any(
            inner.op == "call_function" and written(inner) for inner in subgraph.graph.nodes
        ):
            return tuple(node.all_input_nodes)
    return ()


def aliases(node: fx.Node) -> tuple[fx.Node, ...]:
    """The arguments that the value of ``node`` may share memory with: it is a view of them, or they are returned."""
    if _is_getitem(node) or node.target in _RETURNS_INPUT:
        return tuple(node.all_input_nodes)
    if _schema(node) is None:
        return ()
    return tuple(_marked(node, lambda info: True))


def is_assertion(node: fx.Node) -> bool:
    """Whether ``node`` only checks what the exporter noted. Note: the operator has no public name."""
    return node.target is torch.ops.aten._assert_tensor_metadata.default


def has_random_tag(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def is_light(node: fx.Node) -> bool:
    """Whether ``node`` only reshapes, picks from a tuple or works element by element."""
    if _schema(node) is None:
        return _is_getitem(node)
    return torch.Tag.pointwise in node.target.tags or node.target in _RETURNS_INPUT or bool(aliases(node))  # type: ignore[union-attr]


def _is_getitem(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "") == "getitem"


# Note: their schema shows no alias, but without anything to drop they return what they were given.
_RETURNS_INPUT = (
    torch.ops.aten.dropout.default,
    torch.ops.aten.feature_dropout.default,
    torch.ops.aten.alpha_dropout.default,
    torch.ops.aten.feature_alpha_dropout.default,
)
