"""Every private or version-dependent call into torch, each with its reason. Supported: torch 2.11 to the newest."""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

# Note: what DCP raises has no public name; it is a BaseException, which passes ``except Exception``.
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

# Note: the only base class of a mode that sees every operation; private, and what torch's own documentation names.
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from pipetransformer.errors import UserError
from pipetransformer.failure import RankEnd, read_report
from pipetransformer.shutdown import Interrupted, register

if TYPE_CHECKING:
    from pipetransformer.pipe.recompute import Recompute

__all__ = [
    "CheckpointException",
    "ProductBytes",
    "Schedule",
    "StagePart",
    "StageTimes",
    "belongs_to_parameter",
    "build_schedule",
    "gradient_norms",
    "is_peer_failure",
    "load_tensors",
    "run_ranks",
    "run_schedule",
    "save_tensors",
    "scale_gradients_",
    "selective_contexts",
]


def gradient_norms(gradients: Sequence[Tensor]) -> Tensor:
    """Norm of every gradient [len(gradients)] in one fused pass.

    Note: ``torch.nn.utils.get_total_norm`` fuses alike but returns only the total; ``_foreach_norm`` is what it calls.
    """
    return torch.stack(torch._foreach_norm(list(gradients)))


def save_tensors(tensors: dict[str, Tensor], folder: Path, *, is_alone: bool) -> None:
    """Collective, unless the process ``is_alone``. Writes with DCP; raises CheckpointException.

    Note: a collective of many bytes has gloo's own thread start OpenMP threads, after which those of a process that
    computes alone no longer spin between operations: its steps took 1.7 times as long. Without one, DCP warns.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp_save(tensors, checkpoint_id=folder, no_dist=is_alone)


def load_tensors(tensors: dict[str, Tensor], folder: Path, *, is_alone: bool) -> None:
    """Fills ``tensors`` with what ``save_tensors`` wrote, in any mesh; collective like it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp_load(tensors, checkpoint_id=folder, no_dist=is_alone)


def belongs_to_parameter(tensor: Tensor) -> bool:
    """Whether ``tensor`` is a parameter or a view of one. Note: a view's base has no public name."""
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)


def scale_gradients_(gradients: Sequence[Tensor], scale: Tensor) -> None:
    """Multiplies all gradients by one scalar tensor in one fused pass, without a device synchronisation."""
    torch._foreach_mul_(list(gradients), scale)


@dataclass(slots=True)
class StageTimes:
    """Seconds that one stage spent computing since ``clear``; what is left of a step is waiting for a neighbour."""

    forward: float = 0.0
    backward: float = 0.0

    def clear(self) -> None:
        self.forward = self.backward = 0.0


Schedule = PipelineScheduleSingle | PipelineScheduleMulti


@dataclass(frozen=True, slots=True)
class StagePart:
    """One of the stages that a rank holds.

    Attributes:
        module: what it runs; its ``parameters`` are asked for where a backward is split.
        index: of the stage in the pipeline.
        example_input, example_output: what one micro-batch brings in and sends on (``requires_grad`` counts). They are
            on the meta device or any other: only their metadata is used.
    """

    module: nn.Module
    index: int
    example_input: Tensor
    example_output: Tensor


class _Stage(PipelineStage):
    """Note: the ``*_one_chunk`` methods are where every schedule calls a stage; arguments that differ between versions
    are passed through. On CUDA, kernels are asynchronous and the times are launch times.

    Attributes:
        times: counts the seconds spent here. recompute: is told of every micro-batch; None where nothing is recomputed.
        last_microbatch: number of the step's last.
    """

    times: StageTimes
    recompute: Recompute | None
    last_microbatch: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._done_whole: set[int] = set()

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        if self.recompute is not None:
            self.recompute.is_last_microbatch = fwd_chunk_id == self.last_microbatch
        start = perf_counter()
        try:
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        finally:
            self.times.forward += perf_counter() - start

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: Any = False
    ) -> None:
        """Note: a split backward of what is recomputed would run it again for every parameter's share of the weights'
        half, and selective recomputation refuses that: the whole is done at once. (Of stage 0, torch does it later.)
        """
        if not full_backward and not self.is_first and self._recomputes(bwd_chunk_id):
            full_backward = True
            self._done_whole.add(bwd_chunk_id)
        start = perf_counter()
        try:
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        finally:
            self.times.backward += perf_counter() - start

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Note: torch adds these gradients to ``.grad`` itself, in place, and autograd's hooks never hear of it: they
        are called here. Which parameters have one, only its private state tells.
        """
        if bwd_chunk_id in self._done_whole:
            self._done_whole.remove(bwd_chunk_id)
            return None
        start = perf_counter()
        groups = self.backward_state[bwd_chunk_id][1] or ()
        reached = [node.variable for group in groups for node in group["params"]]
        if len(set(reached)) < len(reached):  # Note: torch would count such a gradient twice
            raise UserError(
                "pipe.schedule: zero_bubble cannot split the backward of a parameter that a stage uses more than once; "
                "give interleaved or 1f1b"
            )
        try:
            result = super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)
        finally:
            self.times.backward += perf_counter() - start
        for parameter in reached:
            for hook in (parameter._post_accumulate_grad_hooks or {}).values():
                hook(parameter)
        return result

    def _recomputes(self, microbatch: int) -> bool:
        recompute = self.recompute
        return recompute is not None and recompute.applies_to(is_last_microbatch=microbatch == self.last_microbatch)


def build_schedule(
    parts: Sequence[StagePart],
    *,
    kind: str,
    num_stages: int,
    num_microbatches: int,
    loss: Callable[[Tensor, Tensor], Tensor] | None,
    group: dist.ProcessGroup,
    device: torch.device,
    times: StageTimes,
    recompute: Recompute | None = None,
) -> Schedule:
    """A schedule over the static-shape stages of one rank; ``loss`` None makes a forward-only one.

    Note: giving both examples makes shapes static: no inference forward at the first step. ``scale_grads=False``: the
    loss is already divided by the global count, and the division would also touch gradients on ``eval``. A schedule
    without a loss has no backward in any version, whatever its kind.
    """
    stages = []
    for part in parts:
        stage = _Stage(
            part.module,
            part.index,
            num_stages,
            device,
            input_args=(part.example_input,),
            output_args=(part.example_output,),
            group=group,
        )
        stage.times, stage.recompute, stage.last_microbatch = times, recompute, num_microbatches - 1
        stages.append(stage)
    if loss is None:
        kind = "gpipe" if len(stages) == 1 else "breadth_first"
    if kind in _ONE_STAGE:
        return _ONE_STAGE[kind](stages[0], num_microbatches, loss_fn=loss, scale_grads=False)
    # Note: where a step fails, these log the whole schedule beside the error that they raise.
    logging.getLogger(PipelineScheduleMulti.__module__).setLevel(logging.CRITICAL)
    return _MANY_STAGES[kind](stages, num_microbatches, loss_fn=loss, scale_grads=False)


_ONE_STAGE: Mapping[str, Callable[..., PipelineScheduleSingle]] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
_MANY_STAGES: Mapping[str, Callable[..., PipelineScheduleMulti]] = {
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
    "breadth_first": ScheduleLoopedBFS,
}


def run_schedule(
    schedule: Schedule,
    *,
    hidden: Tensor | None,
    inputs: Mapping[str, Tensor],
    target: Tensor | None,
    training: bool,
) -> Tensor | None:
    """One step of a schedule; returns the last stage's logits where it does not train.

    Note: ``return_outputs`` spares training the merge of outputs that nobody reads; it is not in every version's
    public signature.
    """
    arguments: tuple[Tensor, ...] = () if hidden is None else (hidden,)
    keywords: dict[str, Any] = dict(inputs)
    with torch.set_grad_enabled(training):
        output: Tensor | None = schedule.step(*arguments, target=target, return_outputs=not training, **keywords)
    return output


# --- recomputation: what ``selective`` keeps ---


@lru_cache(maxsize=1)
def _products() -> frozenset[Any]:
    """Matrix products and attention. Note: kernels of attention have private names, by version and device."""
    attention = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
    names = ("mm", "addmm", "bmm", "baddbmm", "convolution", *(f"_scaled_dot_product_{name}" for name in attention))
    return frozenset(getattr(torch.ops.aten, name).default for name in names if hasattr(torch.ops.aten, name))


def _is_kept(operation: Any, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> bool:
    """Note: attention that drops out is not kept: where it did not run again, the random numbers of what comes behind
    it would be other ones. Only the private schema tells where ``dropout_p`` stands.
    """
    if operation not in _products():
        return False
    names = [argument.name for argument in operation._schema.arguments]
    return not {**dict(zip(names, arguments)), **keywords}.get("dropout_p")


def selective_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The contexts of one forward and its recomputation, in which products and attention do not run twice."""

    def policy(_: object, operation: Any, *arguments: Any, **keywords: Any) -> CheckpointPolicy:
        kept = _is_kept(operation, arguments, keywords)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    first, again = create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
    return first, again


class ProductBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts, as a context, the bytes of what ``selective_contexts`` would keep."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if _is_kept(func, args, kwargs):
            tensors = result if isinstance(result, (tuple, list)) else (result,)
            self.num_bytes += sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))
        return result


# --- launch: torchrun's API, and what ranks and launcher tell each other through it ---

_PEER_FAILURES = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|socket closed|remote process exited|communicator was aborted"
    r"|failed to recv, got 0 bytes",
    re.IGNORECASE,
)


def is_peer_failure(error: BaseException) -> bool:
    """Whether a collective failed only because another rank is gone.

    Note: neither gloo nor NCCL nor the store has an exception type for this, so the message has to tell; schedules of
    ``torch.distributed.pipelining`` raise their own error from it.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, RuntimeError) and _PEER_FAILURES.search(str(cause)):
            return True
        cause = cause.__cause__
    return False


def run_ranks(
    script: Path,
    arguments: Sequence[str],
    *,
    num_ranks: int,
    num_nodes: int,
    node_rank: int,
    address: str,
    port: int,
    stop_seconds: int,
) -> dict[int, RankEnd]:
    """Run this node's share of a job under torchrun, in this process, until all its ranks have ended.

    Returns how each rank of this node ended if any failed (by its global number), or else nothing.
    Raises ``Interrupted`` on a signal. Ranks that do not end within ``stop_seconds`` of being told to are killed.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    logging.disable(logging.CRITICAL)  # torchrun logs what the last line of a failed job says better
    _limit_stop_seconds(stop_seconds)
    with tempfile.TemporaryDirectory(prefix="pipetransformer_") as folder:  # torchrun leaves its own behind
        unregister = register(lambda: shutil.rmtree(folder, ignore_errors=True))
        # Note: timm imports wandb, which makes temporary folders at once; a rank that is ended cannot delete them. But
        # data loaders put sockets there, whose whole path may have 107 characters.
        if len(folder) < 70:
            os.environ["TMPDIR"] = folder
        flags = {
            "--nnodes": num_nodes,
            "--nproc-per-node": num_ranks,
            "--node-rank": node_rank,
            "--master-addr": address,
            "--master-port": port,
            "--max-restarts": 0,
            "--monitor-interval": 0.1,
            "--log-dir": folder,
        }
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # nohup: torchrun would end the job all the same
            flags["--signals-to-handle"] = "SIGTERM,SIGINT,SIGQUIT"
        try:
            options = [f"{flag}={value}" for flag, value in flags.items()]
            run(parse_args([*options, str(script), *arguments]))  # type: ignore[no-untyped-call]
        except ChildFailedError as error:
            return {
                rank: RankEnd(exit_code=failure.exitcode, time=failure.timestamp, report=read_report(failure.message))
                for rank, failure in error.failures.items()
            }
        except SignalException as error:
            raise Interrupted(error.sigval) from None
        finally:
            unregister()
    return {}


def _limit_stop_seconds(stop_seconds: int) -> None:
    """Bound torchrun's wait between telling its ranks to end and killing them.

    Note: 30 s are fixed where a rank failed, and before torch 2.12 everywhere. A second signal during that wait would
    make torchrun abandon its ranks, so signals are ignored meanwhile.
    """
    from torch.distributed.elastic.multiprocessing import PContext

    close = PContext.close

    def close_soon(self: PContext, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
        handlers = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            close(self, death_sig, min(timeout, stop_seconds))
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    PContext.close = close_soon  # type: ignore[method-assign]
