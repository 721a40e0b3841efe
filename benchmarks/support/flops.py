"""Work of every unit of a graph, counted without doing it: no storage is allocated, no arithmetic done.

    with torch.device("meta"):
        model, images = build(), torch.empty(96, 3, 224, 224)
    work = count_work(trace(model, (images,)))

The graph's code runs under ``FakeTensorMode``, so that a model of any size takes seconds and none of its memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from pipetransformer.graphs.graph import Graph
from pipetransformer.graphs.graph.segment import build_segment

__all__ = ["UnitWork", "count_work"]


@dataclass(frozen=True, slots=True)
class UnitWork:
    """Work of one unit on one micro-batch of the graph's shape.

    Attributes:
        forward_flops: operations of matrix products and convolutions, an addition and a multiplication being two.
        backward_flops: likewise, for gradients of inputs and weights.
        forward_bytes: memory that operators read and write, each operand of each once, as kernels do that are not
            fused. Views cost nothing.
        backward_bytes: likewise.
    """

    forward_flops: int
    backward_flops: int
    forward_bytes: int
    backward_bytes: int


def count_work(graph: Graph) -> tuple[UnitWork, ...]:
    """By unit. Weights and devices of the graph do not matter, its shapes do."""
    with FakeTensorMode():
        held = {name: _like(state.tensor) for name, state in graph.program.tensors.items()}
        values = {node.name: _like(node.meta["val"]) for node in graph.program.inputs}
        tracked = {tensor.name for tensor in graph.tensors if tensor.requires_grad}
        return tuple(_count(graph, unit, values=values, held=held, tracked=tracked) for unit in range(graph.num_units))


def _like(tensor: Tensor) -> Tensor:
    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return empty.requires_grad_(tensor.requires_grad)


def _count(
    graph: Graph, unit: int, *, values: dict[str, Tensor], held: Mapping[str, Tensor], tracked: set[str]
) -> UnitWork:
    """Reads the unit's inputs from ``values``, adds its outputs and takes out tensors without a later use."""
    segment = build_segment(graph, unit, unit + 1)
    inputs = [values[name].detach().requires_grad_(name in tracked) for name in segment.inputs]
    given = [*inputs, *(values[name] for name in segment.model_inputs), *(held[name] for name in segment.state)]
    outputs: tuple[Tensor, ...] = ()

    def forward() -> None:
        nonlocal outputs
        outputs = segment.function(*given)

    forward_flops, forward_bytes = _counted(forward)
    reached = [output for output in outputs if output.requires_grad]
    gradients = [torch.empty_like(output) for output in reached]
    leaves = [tensor for tensor in given if tensor.requires_grad]

    def backward() -> None:
        if reached:
            torch.autograd.grad(reached, leaves, gradients, allow_unused=True)

    backward_flops, backward_bytes = _counted(backward)
    values.update(zip(segment.outputs, (output.detach() for output in outputs)))
    for name in segment.finished:
        values.pop(name, None)
    return UnitWork(forward_flops, backward_flops, forward_bytes, backward_bytes)


def _counted(run: Callable[[], None]) -> tuple[int, int]:
    """(operations, bytes) of ``run``."""
    with FlopCounterMode(display=False) as operations, _Traffic() as traffic:
        run()
    return operations.get_total_flops(), traffic.num_bytes


class _Traffic(TorchDispatchMode):
    """Bytes of the operands and results of every operator that makes new memory or changes some."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        made = _tensors(result)
        if made and not func.is_view:
            self.num_bytes += sum(operand.nbytes for operand in [*_tensors((args, kwargs)), *made])
        return result


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
