"""Trains a partition of a graph over ranks: the schedule, recomputation, tied weights, batch statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipetransformer.adapter import Recompute, Schedule, StagePart, StageTimes, build_schedule, run_schedule
from pipetransformer.errors import UserError
from pipetransformer.graphs.graph.batch_norm import recomputing
from pipetransformer.graphs.graph.checks import check_gradients, check_recomputation, check_schedule
from pipetransformer.graphs.graph.graph import Graph, GraphTensor
from pipetransformer.graphs.graph.stage import GraphStage
from pipetransformer.graphs.graph.tied import sum_tied_gradients

Loss = Callable[[Tensor, Tensor], Tensor]


class GraphPipeline:
    """One rank of a pipeline over ``graph``; ``train`` accumulates the gradients of its ``stages``.

    Args:
        graph: traced for the shape of one micro-batch.
        boundaries: first units of stages 1, 2, ...; rank r of K holds the stages r, r + K, ... Without boundaries it is
            a plain loop over the micro-batches, and ``group`` may be None.
        num_microbatches: micro-batches of a mini-batch (M).
        kind: one of ``plan.schedules.SCHEDULES``.
        loss: loss of one micro-batch's output and target; divides by the size of the whole batch itself.
        group: the ranks of the pipeline.
        stages_per_rank: stages of each rank (v).
        recompute: choice of recomputed activations, one of ``adapter.MODES``; block by block (``Graph.segments``).

    Raises:
        UserError: on all ranks alike, where the schedule does not run with these numbers, where ``recompute`` is no
            mode or the model's forward cannot run twice, and where a cut sends what this version of torch cannot.
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
        stages_per_rank: int = 1,
        recompute: str = "never",
    ) -> None:
        check_recomputation(recompute, graph)
        check_gradients(graph, boundaries)
        place, num_ranks = (dist.get_rank(group), dist.get_world_size(group)) if boundaries else (0, 1)
        self._num_stages = len(boundaries) + 1
        check_schedule(
            kind,
            num_stages=self._num_stages,
            num_ranks=num_ranks,
            num_microbatches=num_microbatches,
            stages_per_rank=stages_per_rank,
        )
        again = None if recompute == "never" else Recompute(recompute, context_fn=recomputing)
        units = graph.stages(boundaries)
        self._indices = range(place, self._num_stages, num_ranks)
        self.stages = tuple(GraphStage(graph, units[i].start, units[i].stop, around=again) for i in self._indices)
        self._recompute = again
        self._num_microbatches = num_microbatches
        self._kind = kind
        self._loss = loss
        self._group = group
        self._graph = graph
        self._tied = tuple(
            (name, sorted({stage % num_ranks for stage in stages})) for name, stages in graph.tied(boundaries)
        )
        self._schedules: dict[bool, Schedule] = {}
        self._times = StageTimes()

    @property
    def is_last(self) -> bool:
        """Whether it holds the last stage."""
        return self._num_stages - 1 in self._indices

    def train(self, inputs: Sequence[Tensor], target: Tensor) -> Tensor | None:
        """Forward and backward of a mini-batch: all micro-batches, then tied gradients and batch statistics.

        Args:
            inputs: the model's inputs [micro-batches x rows, ...], the same on all ranks. target: read by the last.

        Returns:
            The losses of the micro-batches [num_microbatches] where the last stage is, else None.
        """
        self._check(inputs)
        for stage in self.stages:
            stage.train()
        losses: list[Tensor] = []
        if self._num_stages == 1:
            losses += self._train_alone(inputs, target)
        else:
            self._step(inputs, target=target, losses=losses)
            assert self._group is not None
            sum_tied_gradients(self._parameters(), tied=self._tied, group=self._group)
        for stage in self.stages:
            stage.commit_statistics()
        return torch.stack(losses).detach() if losses else None

    def evaluate(self, inputs: Sequence[Tensor]) -> Tensor | None:
        """Forward of a mini-batch in eval mode: the output [rows, ...] where the last stage is, else None."""
        self._check(inputs)
        for stage in self.stages:
            stage.eval()
        if self._num_stages > 1:
            return self._step(inputs)
        with torch.no_grad():
            return torch.cat([self.stages[0](*microbatch) for microbatch in self._microbatches(*inputs)])

    def _train_alone(self, inputs: Sequence[Tensor], target: Tensor) -> Iterator[Tensor]:
        for number, (*microbatch, microbatch_target) in enumerate(self._microbatches(*inputs, target), start=1):
            if self._recompute is not None:
                self._recompute.is_last_microbatch = number == self._num_microbatches
            loss = self._loss(self.stages[0](*microbatch), microbatch_target)
            torch.autograd.backward(loss)
            yield loss

    def _microbatches(self, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        return zip(*(tensor.chunk(self._num_microbatches) for tensor in tensors), strict=True)

    def _step(
        self, inputs: Sequence[Tensor], *, target: Tensor | None = None, losses: list[Tensor] | None = None
    ) -> Tensor | None:
        training = target is not None
        if training not in self._schedules:
            self._schedules[training] = self._build(training=training, device=inputs[0].device)
        named = dict(zip(self._graph.input_names, inputs, strict=True))
        needed = {name for i, stage in zip(self._indices, self.stages) if i > 0 for name in stage.spec.model_inputs}
        return run_schedule(
            self._schedules[training],
            arguments=inputs if 0 in self._indices else (),
            keywords={name: tensor for name, tensor in named.items() if name in needed},
            target=target if self.is_last else None,
            training=training,
            losses=losses if self.is_last else None,
        )

    def _build(self, *, training: bool, device: torch.device) -> Schedule:
        assert self._group is not None
        return build_schedule(
            [self._part(index, stage, training=training) for index, stage in zip(self._indices, self.stages)],
            kind=self._kind,
            num_stages=self._num_stages,
            num_microbatches=self._num_microbatches,
            loss=self._loss if training else None,
            group=self._group,
            device=device,
            times=self._times,
            recompute=self._recompute,
        )

    def _part(self, index: int, stage: GraphStage, *, training: bool) -> StagePart:
        graph, spec = self._graph, stage.spec
        entering = _examples(spec.inputs, training=training)
        if index == 0:
            shapes = zip(graph.input_shapes, graph.input_dtypes)
            entering = tuple(torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in shapes)
        is_last = index == self._num_stages - 1
        leaving = tuple(graph.output_examples()) if is_last else _examples(spec.outputs, training=training)
        return StagePart(stage, index, example_inputs=entering, example_outputs=leaving)

    def _parameters(self) -> dict[str, nn.Parameter]:
        return {name: stage.get_parameter(name) for stage in self.stages for name in stage.spec.parameters}

    def _check(self, inputs: Sequence[Tensor]) -> None:
        # Note: gloo would silently reuse old rows of a smaller batch and abort the peer on a larger one.
        expected = [(self._num_microbatches * rows, *rest) for rows, *rest in self._graph.input_shapes]
        given = [tuple(tensor.shape) for tensor in inputs]
        if given != expected:
            raise UserError(
                f"inputs: of shapes {given} are no {self._num_microbatches} micro-batches of the traced shapes; give "
                f"{expected}"
            )


def _examples(tensors: Sequence[GraphTensor], *, training: bool) -> tuple[Tensor, ...]:
    return tuple(
        torch.empty(t.shape, dtype=t.dtype, device="meta").requires_grad_(training and t.requires_grad) for t in tensors
    )
