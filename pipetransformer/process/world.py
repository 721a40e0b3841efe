"""The job's world: one rank a device, from the first step to the last.

Ranks come from torchrun (see ``launch/node.py``); an entry that runs alone is a world of one, without a port.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from datetime import timedelta
from threading import Thread
from time import perf_counter_ns
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from pipetransformer.errors import UserError

__all__ = [
    "World",
    "close_world",
    "device_memory",
    "first_of_ranks",
    "init_world",
    "led_by",
    "now_ns",
    "slowest",
    "synchronize",
]


Result = TypeVar("Result")
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.01, 0.5  # seconds between two questions whether the leaders are ready


@dataclass(frozen=True, slots=True)
class World:
    """This rank's place in the job.

    Attributes:
        rank: number in the job.
        size: ranks of the job.
        local_rank: number on its node.
        local_size: ranks of its node.
        device: device of this rank.
        timeout: longest time of a collective; give it to every group made later (torch's default is another).
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    timeout: timedelta = timedelta(minutes=5)

    @property
    def num_nodes(self) -> int:
        return self.size // self.local_size


def init_world(*, timeout_seconds: float) -> World:
    """Join the default process group that torchrun's environment describes, or a group of one without it.

    Backend: NCCL for tensors on CUDA devices and gloo for those on the CPU; gloo alone where there is no CUDA device.
    """
    timeout = timedelta(seconds=timeout_seconds)
    launched = dist.is_torchelastic_launched()
    rank, size, local_rank, local_size = (
        int(os.environ[name]) if launched else alone
        for name, alone in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1))
    )
    device = _device(local_rank, local_size=local_size)
    on_cuda = device.type == "cuda"
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_cuda else "gloo",
            store=None if launched else dist.HashStore(),  # type: ignore[attr-defined]
            rank=rank,
            world_size=size,
            timeout=timeout,
            device_id=device if on_cuda else None,
        )
    except dist.DistStoreError as error:
        raise UserError(f"run.timeout: not all ranks were there after {timeout_seconds:g} s; give more") from error
    sizes = [0] * size
    dist.all_gather_object(sizes, local_size)
    if len(set(sizes)) > 1:
        raise UserError(f"NPROC: the nodes have {', '.join(map(str, sorted(set(sizes))))} ranks; give all the same")
    return World(rank, size, local_rank, local_size, device, timeout)


def close_world() -> None:
    """Leave all groups, after a success: after a failure this may wait for peers (``process/shutdown.py``)."""
    dist.destroy_process_group()


def device_memory(device: torch.device) -> int | None:
    """Bytes of a GPU that plans may fill, without a tenth that they do not count; None on a CPU."""
    return int(0.9 * torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else None


def first_of_ranks(number: int | None) -> tuple[int, int] | None:
    """Collective. The smallest (number, rank) of the ranks that give a number; None if none does."""
    size, nothing = dist.get_world_size(), 2**62
    found = torch.tensor(nothing if number is None else number * size + dist.get_rank())
    dist.all_reduce(found, op=dist.ReduceOp.MIN)
    return None if int(found) == nothing else divmod(int(found), size)


def slowest(seconds: float) -> float:
    """Collective. The most seconds of any rank."""
    most = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return float(most)


def led_by(leader: int, action: Callable[[], Result]) -> Result:
    """Collective. The result of ``action``, which the leader alone calls; every rank names its leader.

    The action may take longer than a collective may: the ranks ask each other until all leaders are ready. Meanwhile it
    runs in a thread, which an interrupted process does not unwind; alone, in the caller's.

    Raises:
        UserError: on every rank, if any leader's action raises one.
    """
    if dist.get_world_size() == 1:
        return action()
    answer: Future[Result] | None = None
    if dist.get_rank() == leader:
        answer = Future()
        # A daemon: whoever is interrupted need not wait for its end.
        Thread(target=_fulfil, args=(answer, action), daemon=True).start()
    pause = _SHORTEST_PAUSE
    while True:
        if answer is not None:
            wait([answer], timeout=pause)
        is_ready = torch.tensor(int(answer is None or answer.done()))
        dist.all_reduce(is_ready, op=dist.ReduceOp.MIN)
        if is_ready:
            break
        pause = min(2 * pause, _LONGEST_PAUSE)
    outcome: tuple[object, str | None] = (None, None)
    if answer is not None:
        try:
            outcome = (answer.result(), None)
        except UserError as error:
            outcome = (None, str(error))
    gathered = [outcome] * dist.get_world_size()
    dist.all_gather_object(gathered, outcome)
    if (error_line := next((line for _, line in gathered if line is not None), None)) is not None:
        raise UserError(error_line)
    return cast(Result, gathered[leader][0])


def _fulfil(answer: Future[Result], action: Callable[[], Result]) -> None:
    try:
        answer.set_result(action())
    except BaseException as error:
        answer.set_exception(error)


def synchronize(device: torch.device) -> None:
    """Waits for all launched work on ``device``, so that a clock read next tells its time."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def now_ns(device: torch.device) -> int:
    """The clock in nanoseconds, after all launched work on ``device``."""
    synchronize(device)
    return perf_counter_ns()


def _device(local_rank: int, *, local_size: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if local_size > torch.cuda.device_count():
        raise UserError(
            f"NPROC: {local_size} ranks do not fit on {torch.cuda.device_count()} CUDA device(s), one a rank; "
            "give fewer, or set CUDA_VISIBLE_DEVICES= to run on the CPU"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device
