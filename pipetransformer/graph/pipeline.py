"""Trains a partition of a graph over ranks, one stage a rank: the schedule, tied weights, batch statistics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from pipetransformer.errors import UserError
from pipetransformer.graph.graph import Graph, GraphTensor
from pipetransformer.graph.stage import GraphStage, RunSegment
from pipetransformer.graph.tied import sum_tied_gradients
from pipetransformer.graph.torch_calls import SENDS_WITHOUT_GRADIENTS, build_graph_schedule

__all__ = ["GraphPipeline"]

Loss = Callable[[Tensor, Tensor], Tensor]


class GraphPipeline:
    """One rank of a pipeline over ``graph``; its stage is ``stage``, whose gradients ``train`` accumulates.

    Args:
        graph: traced for the shape of one micro-batch.
        boundaries: first units of stages 1, 2, ...; as many stages as ``group`` has ranks. Without boundaries it is a
            plain loop over the micro-batches, and ``group`` may be None.
        kind: "gpipe" or "1f1b".
        loss: of one micro-batch's output and target; divides by the size of the whole batch itself.
        segments, run: see ``GraphStage``; ``segments`` outside the stage are ignored.

    Raises:
        UserError: a cut sends a tensor that has no gradient, and this version of torch cannot.
    """

    def __init__(
        self,
        graph: Graph,
        *,
        boundaries: Sequence[int],
        num_microbatches: int,
        kind: str,
        loss: Loss,
        group: dist.ProcessGroup | None,
        segments: Sequence[int] = (),
        run: RunSegment | None = None,
    ) -> None:
        _check_gradients(graph, boundaries)
        index = dist.get_rank(group) if boundaries else 0
        units = graph.stages(boundaries)[index]
        inner = [unit for unit in segments if units.start < unit < units.stop]
        self.stage = GraphStage(graph, units.start, units.stop, segments=inner, run=run)
        self._num_microbatches = num_microbatches
        self._kind = kind
        self._loss = loss
        self._group = group
        self._index = index
        self._num_stages = len(boundaries) + 1
        self._input_names = graph.input_names
        self._input_shapes = graph.input_shapes
        self._input_examples = [
            torch.empty(shape, dtype=dtype, device="meta")
            for shape, dtype in zip(graph.input_shapes, graph.input_dtypes)
        ]
        self._output_examples = graph.output_examples()
        self._tied = graph.tied(boundaries)
        self._schedules: dict[bool, PipelineScheduleSingle] = {}

    @property
    def is_last(self) -> bool:
        return self._index == self._num_stages - 1

    def train(self, inputs: Sequence[Tensor], target: Tensor) -> Tensor | None:
        """Forward and backward of a mini-batch: all micro-batches, then tied gradients and batch statistics.

        Args:
            inputs: the model's inputs [micro-batches x rows, ...], the same on all ranks. target: read by the last.

        Returns:
            The losses of the micro-batches [num_microbatches] on the last stage, None before it.
        """
        self._check(inputs)
        self.stage.train()
        losses: list[Tensor] = []
        if self._num_stages == 1:
            parts = zip(*(tensor.chunk(self._num_microbatches) for tensor in (*inputs, target)), strict=True)
            for *microbatch, microbatch_target in parts:
                loss = self._loss(self.stage(*microbatch), microbatch_target)
                torch.autograd.backward(loss)
                losses.append(loss)
        else:
            self._step(inputs, target=target, losses=losses)
            assert self._group is not None
            sum_tied_gradients(self._parameters(), tied=self._tied, group=self._group)
        self.stage.commit_statistics()
        return torch.stack(losses).detach() if losses else None

    def evaluate(self, inputs: Sequence[Tensor]) -> Tensor | None:
        """Forward of a mini-batch in eval mode: the output [rows, ...] on the last stage, None before it."""
        self._check(inputs)
        self.stage.eval()
        with torch.no_grad():
            if self._num_stages > 1:
                return self._step(inputs)
            parts = zip(*(tensor.chunk(self._num_microbatches) for tensor in inputs), strict=True)
            return torch.cat([self.stage(*microbatch) for microbatch in parts])

    def _step(
        self, inputs: Sequence[Tensor], *, target: Tensor | None = None, losses: list[Tensor] | None = None
    ) -> Tensor | None:
        training = target is not None
        if training not in self._schedules:
            self._schedules[training] = self._build(training=training, device=inputs[0].device)
        named = dict(zip(self._input_names, inputs, strict=True))
        needed: dict[str, Any] = {name: named[name] for name in self.stage.spec.model_inputs if self._index > 0}
        output: Tensor | None = self._schedules[training].step(
            *(inputs if self._index == 0 else ()),
            target=target if self.is_last else None,
            losses=losses if self.is_last else None,
            return_outputs=not training,
            **needed,
        )
        return output

    def _build(self, *, training: bool, device: torch.device) -> PipelineScheduleSingle:
        spec = self.stage.spec
        assert self._group is not None
        return build_graph_schedule(
            self.stage,
            kind=self._kind,
            stage=self._index,
            num_stages=self._num_stages,
            num_microbatches=self._num_microbatches,
            example_inputs=_examples(spec.inputs, training=training) if spec.inputs else self._input_examples,
            example_outputs=_examples(spec.outputs, training=training) if spec.outputs else self._output_examples,
            loss=self._loss if training else None,
            group=self._group,
            device=device,
        )

    def _parameters(self) -> dict[str, nn.Parameter]:
        return {name: self.stage.get_parameter(name) for name in self.stage.spec.parameters}

    def _check(self, inputs: Sequence[Tensor]) -> None:
        # Note: gloo would silently reuse old rows of a smaller batch and abort the peer on a larger one.
        expected = [(self._num_microbatches * rows, *rest) for rows, *rest in self._input_shapes]
        given = [tuple(tensor.shape) for tensor in inputs]
        if given != expected:
            raise RuntimeError(f"stage {self._index} was built for inputs {expected} and got {given}")


def _check_gradients(graph: Graph, boundaries: Sequence[int]) -> None:
    """The same on all ranks: one that gave up alone would leave the others waiting."""
    without = next((t.name for cut in boundaries for t in graph.crossing(cut) if not t.requires_grad), None)
    if without is not None and not SENDS_WITHOUT_GRADIENTS:
        raise UserError(
            f"the cut sends {without}, which has no gradient, and pipelines of torch {torch.__version__} cannot; "
            "update torch or cut elsewhere"
        )


def _examples(tensors: Sequence[GraphTensor], *, training: bool) -> list[Tensor]:
    return [
        torch.empty(t.shape, dtype=t.dtype, device="meta").requires_grad_(training and t.requires_grad) for t in tensors
    ]
