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
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

# Note: what DCP raises has no public name; it is a BaseException, which passes ``except Exception``.
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from pipetransformer.failure import RankEnd, read_report
from pipetransformer.shutdown import Interrupted, register

__all__ = [
    "CheckpointException",
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


class _TimedStage(PipelineStage):
    """Note: ``forward_one_chunk`` and ``backward_one_chunk`` are where every schedule calls the stage; their arguments
    differ between versions and are passed through. On CUDA, kernels are asynchronous and the times are launch times."""

    times: StageTimes

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        start = perf_counter()
        try:
            return super().forward_one_chunk(*args, **kwargs)
        finally:
            self.times.forward += perf_counter() - start

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        start = perf_counter()
        try:
            return super().backward_one_chunk(*args, **kwargs)
        finally:
            self.times.backward += perf_counter() - start


def build_schedule(
    module: nn.Module,
    *,
    kind: str,
    stage: int,
    num_stages: int,
    num_microbatches: int,
    example_input: Tensor,
    example_output: Tensor,
    loss: Callable[[Tensor, Tensor], Tensor] | None,
    group: dist.ProcessGroup,
    device: torch.device,
    times: StageTimes,
) -> PipelineScheduleSingle:
    """A schedule over one static-shape stage; ``loss`` None makes a forward-only one.

    Args:
        example_input, example_output: what one micro-batch brings in and sends on (``requires_grad`` counts). They are
            on the meta device or any other: only their metadata is used.

    Note: giving both makes shapes static: no inference forward at the first step. ``scale_grads=False``: the loss is
    already divided by the global count, and the division would also touch gradients on ``eval``.
    """
    pipeline_stage = _TimedStage(
        module,
        stage,
        num_stages,
        device,
        input_args=(example_input,),
        output_args=(example_output,),
        group=group,
    )
    pipeline_stage.times = times
    schedule = ScheduleGPipe if kind == "gpipe" or loss is None else Schedule1F1B
    return schedule(pipeline_stage, num_microbatches, loss_fn=loss, scale_grads=False)


def run_schedule(
    schedule: PipelineScheduleSingle,
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
