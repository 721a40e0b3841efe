"""A pipeline's stage that is timed, recomputes, and splits its backward only where that is exact."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from pipetransformer.adapter.split import alias, splits_exactly
from pipetransformer.process.whereabouts import HERE

if TYPE_CHECKING:
    from pipetransformer.adapter.recomputation import Recompute


class Span(NamedTuple):
    """A piece of a rank's work, by its clock.

    Attributes:
        kind: ``forward``, ``backward``, or another phase of a step.
        start, stop: seconds.
        stage, microbatch: of what; None where it is of the whole step.
    """

    kind: str
    start: float
    stop: float
    stage: int | None = None
    microbatch: int | None = None


@dataclass(slots=True)
class StageTimes:
    """Seconds that one stage spent computing since ``clear``; the rest of a step is waiting for a neighbour.

    Attributes:
        spans: each piece of work, where they are kept; None elsewhere.
    """

    forward: float = 0.0
    backward: float = 0.0
    spans: list[Span] | None = None

    def clear(self) -> None:
        self.forward = self.backward = 0.0

    def ran_forward(self, start: float, stop: float, *, stage: int, microbatch: int) -> None:
        """Takes note of a micro-batch's forward."""
        self.forward += stop - start
        if self.spans is not None:
            self.spans.append(Span("forward", start, stop, stage, microbatch))

    def ran_backward(self, start: float, stop: float, *, stage: int, microbatch: int) -> None:
        """Takes note of a micro-batch's backward, or of a half of it."""
        self.backward += stop - start
        if self.spans is not None:
            self.spans.append(Span("backward", start, stop, stage, microbatch))


class TimedStage(PipelineStage):
    """A stage with its times.

    Note: the ``*_one_chunk`` methods are where every schedule calls a stage; arguments that differ between versions
    are passed through. On CUDA, kernels are asynchronous and the times are launch times.

    Attributes:
        times: counts the seconds spent here.
        recompute: is told of every micro-batch; None where nothing is recomputed.
        last_microbatch: number of the step's last.
        may_split: whether the schedule has backwards of weights apart.
    """

    times: StageTimes
    recompute: Recompute | None
    last_microbatch: int
    may_split: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._whole: set[int] = set()  # micro-batches whose backward is not split
        self._is_exact: bool | None = None  # whether a split backward is; None before the first forward

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        if not self.may_split:
            return super().forward_maybe_with_nosync(*args, **kwargs)  # type: ignore[no-untyped-call]
        output = super().forward_maybe_with_nosync(*map(alias, args), **kwargs)  # type: ignore[no-untyped-call]
        return tuple(map(alias, output)) if isinstance(output, tuple) else alias(output)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        if self.recompute is not None:
            self.recompute.is_last_microbatch = fwd_chunk_id == self.last_microbatch
        if self.has_backward:
            HERE.enter("forward")
        start = perf_counter()
        try:
            output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
            if self.may_split and not self._splits(fwd_chunk_id, output):
                self._whole.add(fwd_chunk_id)
            if self.is_last and self.has_backward:
                self._forget_outputs(fwd_chunk_id)
        finally:
            self.times.ran_forward(start, perf_counter(), stage=self.stage_index, microbatch=fwd_chunk_id)
        return output

    def _forget_outputs(self, microbatch: int) -> None:
        """Drop the last stage's outputs, which training does not ask for.

        Note: torch keeps a stage's outputs until their backward, also the last one's, which begins at the loss: the
        logits of all micro-batches that are alive. Where they are kept depends on the version.
        """
        if hasattr(self, "_forward_chunk_states"):
            inputs = self._forward_chunk_states[microbatch].input_values
            self._forward_chunk_states[microbatch] = self._make_forward_chunk_state((), inputs)
        else:
            cache: dict[int, tuple[Any, list[Tensor]]] = self.fwd_cache  # type: ignore[attr-defined]
            cache[microbatch] = ((), cache[microbatch][1])

    def _splits(self, microbatch: int, output: Tensor | tuple[Tensor, ...]) -> bool:
        """Whether the backward of a micro-batch is split.

        Note: that of a recomputed one would run its forward again for every parameter's share of the weights' half, and
        selective recomputation refuses that. Of stage 0, torch does the whole later.

        A schedule's stage looks at one graph for all micro-batches that it does not recompute: their shapes are alike,
        and what of a stage trains does not change while a layout lasts.
        """
        recompute, is_last = self.recompute, microbatch == self.last_microbatch
        if self.is_first:
            return True
        if recompute is not None and recompute.applies_to(is_last_microbatch=is_last):
            return False
        if self._is_exact is None:
            outputs = output if isinstance(output, tuple) else (output,)
            self._is_exact = splits_exactly(outputs, self.submod.parameters())
        return self._is_exact

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: Any = False
    ) -> None:
        full_backward = full_backward or bwd_chunk_id in self._whole
        HERE.enter("backward")
        start = perf_counter()
        try:
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        finally:
            self.times.ran_backward(start, perf_counter(), stage=self.stage_index, microbatch=bwd_chunk_id)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """The weights' half of a backward.

        Note: torch adds these gradients to ``.grad`` itself, in place, and autograd's hooks never hear of it: they
        are called here. Which parameters have one, only its private state tells.
        """
        if bwd_chunk_id in self._whole:
            self._whole.remove(bwd_chunk_id)
            return None
        start = perf_counter()
        groups = self.backward_state[bwd_chunk_id][1] or ()
        reached = [node.variable for group in groups for node in group["params"]]
        try:
            result = super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)
        finally:
            self.times.ran_backward(start, perf_counter(), stage=self.stage_index, microbatch=bwd_chunk_id)
        for parameter in reached:
            for hook in (parameter._post_accumulate_grad_hooks or {}).values():
                hook(parameter)
        return result
