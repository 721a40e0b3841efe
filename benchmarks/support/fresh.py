"""Ranks that live for one measurement: what one leaves behind, or dies of, is no matter of the next one's.

``ranks.launch`` starts a whole script again. Here the script stays, and asks for new ranks again and again: a rank that
runs out of memory can only be ended, and its peers, which wait for it, with it.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.util
import os
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from time import monotonic
from typing import Any, TypeVar

import torch

from pipetransformer.errors import UserError
from pipetransformer.launch.node import free_port
from pipetransformer.process.world import World, close_world, init_world

__all__ = ["FreshRanks", "OutOfMemory"]

Argument = TypeVar("Argument")
Result = TypeVar("Result")
_PRELOADED = ["torch", "timm", "sklearn.datasets", "matplotlib.pyplot", "pipetransformer.run.job"]
_GRACE_SECONDS = 5.0  # from the first failure on: whether another rank had its cause; to end after the last answer


class OutOfMemory(Exception):
    """Some rank had not the memory that the measurement takes."""


@dataclass(frozen=True, slots=True)
class FreshRanks:
    """New processes of this machine for every ``run``; made by ``FreshRanks.ready``."""

    _context: Any
    _timeout_seconds: float

    @classmethod
    @contextmanager
    def ready(cls, *, timeout_seconds: float = 600.0) -> Iterator[FreshRanks]:
        """One thread a rank; once a process. Costs and data that jobs keep are in a folder that goes with it.

        Args:
            timeout_seconds: what one ``run`` may take, from the start of its ranks on.

        Note: where there is no GPU, ranks are forked from a process that has only imported: an import takes seconds.
        CUDA does not survive a fork of what has looked at it, as libraries do when they are imported.
        """
        with tempfile.TemporaryDirectory() as cache:
            # Without the threshold the C library keeps what is freed, more or less of it from run to run.
            os.environ.update(OMP_NUM_THREADS="1", MALLOC_MMAP_THRESHOLD_="32768", PIPETRANSFORMER_CACHE=cache)
            context = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")
            if not torch.cuda.is_available():
                context.set_forkserver_preload(_PRELOADED)
            yield cls(context, timeout_seconds)

    def run(self, function: Callable[[World, Argument], Result], argument: Argument, *, num_ranks: int) -> list[Result]:
        """``function(world, argument)`` on ``num_ranks`` ranks; the results in order of rank.

        Raises:
            OutOfMemory: if any rank had not enough.
            UserError: as a rank raised it.
            RuntimeError: with the traceback of the first rank that failed otherwise, or at the timeout.
        """
        port = free_port()
        ranks: dict[Connection, tuple[int, BaseProcess]] = {}
        try:
            for rank in range(num_ranks):
                mine, theirs = self._context.Pipe(duplex=False)
                given = (theirs, function, argument, rank, num_ranks, port, self._timeout_seconds)
                process = self._context.Process(target=_be_rank, args=given)
                process.start()
                theirs.close()
                ranks[mine] = (rank, process)
            results = _collect(ranks, timeout_seconds=self._timeout_seconds)
            for _, process in ranks.values():
                process.join(_GRACE_SECONDS)  # it ends what it started: a process that is killed leaves its semaphores
            return results
        finally:
            for _, process in ranks.values():
                process.kill()
                process.join()


def _collect(ranks: dict[Connection, tuple[int, BaseProcess]], *, timeout_seconds: float) -> list[Any]:
    results: dict[int, Any] = {}
    failures: list[Exception] = []
    waiting, deadline = dict(ranks), monotonic() + timeout_seconds
    while waiting and not any(isinstance(failure, OutOfMemory) for failure in failures):
        ready = wait(list(waiting), timeout=max(0.0, deadline - monotonic()))
        if not ready:
            break
        for connection in ready:
            assert isinstance(connection, Connection)
            rank, process = waiting.pop(connection)
            answer = _answer(connection, process)
            if isinstance(answer, Exception):
                failures.append(answer)
                deadline = min(deadline, monotonic() + _GRACE_SECONDS)
            else:
                results[rank] = answer[0]
    # A peer of a rank that ran out of memory fails too, perhaps before that rank has told.
    failures.sort(key=lambda failure: (not isinstance(failure, OutOfMemory), not isinstance(failure, UserError)))
    if failures:
        raise failures[0]
    if waiting:
        raise RuntimeError(f"ranks gave no answer within {timeout_seconds:.0f} s")
    return [results[rank] for rank in range(len(ranks))]


def _answer(connection: Connection, process: BaseProcess) -> tuple[Any] | Exception:
    """A rank's result, or why there is none."""
    try:
        answer: tuple[Any] | Exception = connection.recv()
        return answer
    except EOFError:
        process.join()
    if process.exitcode == -signal.SIGKILL:  # what the kernel does where the machine's memory is spent
        return OutOfMemory()
    return RuntimeError(f"a rank ended without a word (exit code {process.exitcode})")


def _be_rank(
    connection: Connection,
    function: Callable[[World, Any], Any],
    argument: object,
    rank: int,
    size: int,
    port: int,
    timeout_seconds: float,
) -> None:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    as_torchrun = {"TORCHELASTIC_RUN_ID": "benchmark", "MASTER_ADDR": "127.0.0.1"}
    os.environ.update(as_torchrun | {name: str(number) for name, number in numbers.items()})
    torch.set_num_threads(1)
    try:
        world = init_world(timeout_seconds=timeout_seconds)
        result = function(world, argument)
        close_world()
    except UserError as error:
        connection.send(error)
    except Exception as error:
        connection.send(OutOfMemory() if _is_out_of_memory(error) else RuntimeError(traceback.format_exc()))
    else:
        connection.send((result,))
    connection.close()
    # Note: groups that are still open wait for peers when the interpreter ends, so that it may not; its semaphores and
    # workers are ended here instead.
    multiprocessing.util._exit_function()  # type: ignore[attr-defined]
    os._exit(0)


def _is_out_of_memory(error: Exception) -> bool:
    """Note: only messages tell of the CPU's allocator and of NCCL's buffers."""
    text = str(error)
    is_typed = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    return is_typed or "out of memory" in text or "can't allocate memory" in text
