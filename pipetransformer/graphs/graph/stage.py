"""Part of a graph as a module: from the tensors over its first cut to those over its last cut.

    crossing(first) ---+--> operators of units[first:stop] --+--> crossing(stop)
                       +------------- relayed --------------+
    model inputs --------> side operators

The module holds only the tensors that its units use, under the names that they have in the model, so that the state
dicts of all stages together are the model's. Its operators are the model's own, run by generated code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from pipetransformer.errors import UserError
from pipetransformer.graphs.graph.batch_norm import MiniBatchNorm
from pipetransformer.graphs.graph.graph import Graph, GraphTensor
from pipetransformer.graphs.graph.program import StateTensor, Statistics
from pipetransformer.graphs.graph.segment import build_segment


@dataclass(frozen=True, slots=True)
class StageSpec:
    """The face of a stage.

    Attributes:
        inputs: tensors from the stage before; none for stage 0.
        outputs: tensors for the stage behind; none for the last.
        model_inputs: names of the model's inputs in use here; stage 0 is given all of them, in order.
        parameters: first names of its parameters.
    """

    inputs: tuple[GraphTensor, ...]
    outputs: tuple[GraphTensor, ...]
    model_inputs: tuple[str, ...]
    parameters: tuple[str, ...]


class GraphStage(nn.Module):
    """``graph.units[first:stop]`` of a model, sharing the model's tensors.

    ``forward(*inputs, **model_inputs)`` returns what it sends, a tensor or a tuple of tensors; the last stage returns
    what the model returns. Stage 0 takes all the model's inputs in order instead. Model inputs that it does not need
    are ignored: a schedule gives all stages of a rank the same.

    In training mode it is the model as it was traced. In eval mode dropout is off and batch normalisation uses its
    running statistics.

    Args:
        around: called with (function of one segment, its arguments) in that function's place, to recompute it, say.
            Without it the stage is one segment, with it ``graph.segments``.
    """

    def __init__(
        self, graph: Graph, first: int, stop: int, *, around: Callable[..., tuple[Tensor, ...]] | None = None
    ) -> None:
        super().__init__()
        units = graph.units[first:stop]
        segments = (range(first, stop),) if around is None else graph.segments(range(first, stop))
        self._segments = [build_segment(graph, segment.start, segment.stop) for segment in segments]
        self._around = around
        self._argument_names = graph.input_names if first == 0 else tuple(t.name for t in graph.crossing(first))
        held = dict.fromkeys(name for unit in units for name in (*unit.parameters, *unit.buffers))
        held.update(dict.fromkeys(name for segment in self._segments for name in segment.state))
        held.update(dict.fromkeys(graph.unused if first == 0 else ()))
        self._slots = {name: _hold(self, graph.program.tensors[name]) for name in held}
        for number, segment in enumerate(self._segments):
            self.add_module(f"_segment_{number}", segment.function)
        self.spec = StageSpec(
            inputs=graph.crossing(first),
            outputs=graph.crossing(stop),
            model_inputs=tuple(n for n in graph.input_names if any(n in s.model_inputs for s in self._segments)),
            parameters=tuple(name for name in held if graph.program.tensors[name].kind == "parameter"),
        )

    def forward(self, *arguments: Tensor, **model_inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        values = {**dict(zip(self._argument_names, arguments, strict=True)), **model_inputs}
        outputs: tuple[Tensor, ...] = ()
        for segment in self._segments:
            given = [values[name] for name in (*segment.inputs, *segment.model_inputs)]
            given += [getattr(*self._slots[name]) for name in segment.state]
            outputs = segment.function(*given) if self._around is None else self._around(segment.function, *given)
            del given
            values.update(zip(segment.outputs, outputs))
            for name in segment.finished:
                values.pop(name, None)
        if self.spec.outputs:  # Note: gloo and NCCL send contiguous tensors only
            outputs = tuple(values[tensor.name].contiguous() for tensor in self.spec.outputs)
        return outputs[0] if len(outputs) == 1 else outputs

    def train(self, mode: bool = True) -> GraphStage:
        """Sets the mode.

        Raises:
            UserError: evaluation would draw random numbers, which may be training's only.
        """
        if not mode and (random := next((name for segment in self._segments for name in segment.random), None)):
            raise UserError(f"a graph with {random} has no evaluation mode: load these weights into the model itself")
        super().train(mode)
        return self

    def commit_statistics(self) -> None:
        """Updates the running statistics of batch normalisations; call once a mini-batch."""
        for layer, names in self._statistics():
            layer.commit(
                getattr(*self._slots[names.mean]),
                getattr(*self._slots[names.variance]),
                None if names.counter is None else getattr(*self._slots[names.counter]),
            )

    def discard_statistics(self) -> None:
        """Forgets the statistics of batch normalisations since the last commit."""
        for layer, _ in self._statistics():
            layer.discard()

    def _statistics(self) -> list[tuple[MiniBatchNorm, Statistics]]:
        return [pair for segment in self._segments for pair in segment.statistics]


def _hold(root: nn.Module, state: StateTensor) -> tuple[nn.Module, str]:
    """Registers a tensor of the model under all its names; returns the owner and name to read it by."""
    owner, field = root, ""
    for name in reversed(state.names):
        *path, field = name.split(".")
        owner = root
        for step in path:
            if not hasattr(owner, step):
                owner.add_module(step, nn.Module())
            owner = owner.get_submodule(step)
        if isinstance(state.tensor, nn.Parameter):
            owner.register_parameter(field, state.tensor)
        else:
            owner.register_buffer(field, state.tensor, persistent=state.is_persistent)
    return owner, field
