"""A backward in two halves, one of inputs and a later one of weights: where it is exact, and the bytes in between.

Torch goes from every parameter up to the first operators that also depend on an input, keeps their gradients, and goes
down from these again:

    input ----> matmul ----> output      the gradient at matmul is kept; the weights' half begins there
    weight ---->

That gives the whole gradient where there is one such operator. Where there are several (a parameter that is used twice)
it counts some twice, by the luck of a set's order; where there is none (an output made of parameters alone) it leaves
the gradient out, without an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

# Note: private; what a stage's split backward calls.
from torch.distributed.pipelining._backward import stage_backward_input

from pipetransformer.adapter.memory import LiveBytes


def splits_exactly(outputs: Sequence[Tensor], parameters: Iterable[nn.Parameter]) -> bool:
    """Whether torch's split backward gives each of ``parameters`` its gradient, once.

    Args:
        outputs: of one forward; every other leaf behind them is an input.
    """
    weights = set(parameters)
    roots = [get_gradient_edge(output).node for output in outputs if output.requires_grad]
    nodes = _topological(roots)
    has_input: dict[Node, bool] = {}
    for node in reversed(nodes):
        leaf = getattr(node, "variable", None)
        is_input = leaf is not None and leaf not in weights
        has_input[node] = is_input or any(has_input[source] for source, _ in node.next_functions if source is not None)
    # By operator on parameters alone: those above it that also depend on an input; None where it leads to an output.
    above: dict[Node, set[Node | None]] = {node: set() for node in nodes if not has_input[node]}
    for root in roots:
        if not has_input[root]:
            above[root].add(None)
    for node in nodes:
        for source, _ in node.next_functions:
            if source in above:
                above[source] |= {node} if has_input[node] else above[node]
    return all(len(found) == 1 and None not in found for node, found in above.items() if hasattr(node, "variable"))


def _topological(roots: Sequence[Node]) -> list[Node]:
    """All operators behind ``roots``, each before those whose values it used."""
    finished: list[Node] = []
    seen: set[Node] = set()
    waiting = [(root, False) for root in roots]
    while waiting:
        node, is_done = waiting.pop()
        if is_done:
            finished.append(node)
        elif node not in seen:
            seen.add(node)
            waiting.append((node, True))
            waiting += [(source, False) for source, _ in node.next_functions if source is not None]
    return finished[::-1]


class _Alias(torch.autograd.Function):
    """The same memory in another tensor. Note: ``detach`` makes what autograd takes for no view, and copies nothing."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.contiguous()


def alias(tensor: Tensor) -> Tensor:
    """An input or an output of a stage with a split backward.

    Note: such a backward sends gradients as they come, contiguous or not, and detaches outputs in place. That fails for
    a view, and where the operator that made the output keeps it for the weights' half (a relu, say).
    """
    return _Alias.apply(tensor) if tensor.requires_grad else tensor


def bytes_between_halves(
    forward: Callable[[Tensor], Tensor], source: Tensor, parameters: Iterable[nn.Parameter]
) -> int:
    """Bytes between the halves of a split backward, beside activations: gradients at results of operators on weights.

    Args:
        forward: of one tensor that needs a gradient.
        parameters: all other leaves behind its result.
    """
    with LiveBytes() as live:
        output = alias(forward(alias(source)))
        before = live.alive
        gradient = torch.ones_like(output)
        kept = stage_backward_input([output], [gradient], [source], iter(parameters))[1]
        source.grad = None
        del gradient
        between: int = live.alive - before
    del kept
    return max(0, between)
