"""Four processes, started once a session, that run functions of test modules as the ranks of a gloo group.

    def sum_of_ranks(world: World) -> float: ...

    def test_all_ranks_agree(ranks: RankPool) -> None:
        assert ranks.run(4, sum_of_ranks) == [6.0] * 4

The function must be at the top of its module. Arguments and results are pickled. Each job has its own group, and what
one leaves in global state (default dtype, seeds) is reset before the next.
"""

from __future__ import annotations

import atexit
import faulthandler
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed import TCPStore

__all__ = ["RankPool"]

_NUM_WORKERS = 4
_COLLECTIVE_SECONDS = 45.0
_PEER_SECONDS = 10.0  # what ranks may still take once another has failed


@dataclass(frozen=True, slots=True)
class _Worker:
    process: BaseProcess
    connection: Connection


class RankPool:
    """Starts its workers on first use; ``close`` ends them."""

    def __init__(self) -> None:
        self._workers: list[_Worker] = []
        self._num_jobs = 0
        self._store: TCPStore | None = None
        self._folder = Path(tempfile.mkdtemp(prefix="ranks_"))
        atexit.register(self.close)  # runs before multiprocessing's own hook, which would wait for the workers

    def run(self, world_size: int, function: Callable[..., Any], *args: object, timeout: float = 120) -> list[Any]:
        """``function(world, *args)`` on ``world_size`` ranks; their results in order of rank.

        Raises AssertionError with the tracebacks of all ranks that failed, and where those stood that did not answer.
        """
        assert 1 <= world_size <= _NUM_WORKERS, world_size
        job = pickle.dumps((function, args))
        port = self._start()
        self._num_jobs += 1
        workers = self._workers[:world_size]
        for rank, worker in enumerate(workers):
            worker.connection.send((self._num_jobs, port, rank, world_size))
            worker.connection.send_bytes(job)
        results, failures = self._collect(workers, deadline=time.monotonic() + timeout)
        silent = [rank for rank in range(world_size) if rank not in results and rank not in failures]
        if silent:
            failures.update({rank: self._stack(rank) for rank in silent})
            self._kill()
        if failures:
            raise AssertionError(
                "".join(f"\n--- rank {rank} of {world_size} ---\n{text}" for rank, text in sorted(failures.items()))
            )
        return [results[rank] for rank in range(world_size)]

    def close(self) -> None:
        self._kill()
        for path in self._folder.glob("*"):
            path.unlink()
        if self._folder.exists():
            self._folder.rmdir()

    def _start(self) -> int:
        """Start what is not there; returns the port of the store that the groups meet at."""
        from torch.distributed import TCPStore

        if self._store is None:
            self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("spawn")
        for number in range(len(self._workers), _NUM_WORKERS):
            here, there = context.Pipe()
            process = context.Process(target=_work, args=(there, str(self._stack_path(number))), name=f"rank {number}")
            process.start()
            there.close()
            self._workers.append(_Worker(process, here))
        return self._store.port

    def _collect(self, workers: list[_Worker], *, deadline: float) -> tuple[dict[int, Any], dict[int, str]]:
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        waiting = {worker.connection: rank for rank, worker in enumerate(workers)}
        while waiting and (seconds := deadline - time.monotonic()) > 0:
            for connection in wait(list(waiting), seconds):
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    failed, answer = pickle.loads(connection.recv_bytes())
                except EOFError:  # the process is dead, and its peers may wait for ever
                    return results, failures
                (failures if failed else results)[rank] = answer
                if failed:
                    deadline = min(deadline, time.monotonic() + _PEER_SECONDS)
        return results, failures

    def _stack(self, rank: int) -> str:
        process = self._workers[rank].process
        process.join(0.2)
        if process.exitcode is not None:
            return f"died with exit code {process.exitcode}\n"
        os.kill(process.pid or 0, signal.SIGUSR1)
        time.sleep(0.2)
        return f"did not answer; it stood at\n{self._stack_path(rank).read_text()}"

    def _stack_path(self, number: int) -> Path:
        return self._folder / f"stack_{number}"

    def _kill(self) -> None:
        """End the workers: the next job gets new ones."""
        for worker in self._workers:
            worker.process.kill()
            worker.process.join()
            worker.connection.close()
        self._workers.clear()


def _work(connection: Connection, stack_path: str) -> None:
    """A worker's life: jobs until the pool closes its end."""
    os.environ["OMP_NUM_THREADS"] = "1"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the session, which then ends the pool
    with open(stack_path, "w") as stack_file:
        faulthandler.register(signal.SIGUSR1, file=stack_file)
        while True:
            try:
                job = connection.recv()
                connection.send_bytes(_answer(connection.recv_bytes(), *job))
            except (EOFError, BrokenPipeError):
                return
            _leave_group()


def _answer(call: bytes, number: int, port: int, rank: int, world_size: int) -> bytes:
    """Pickled (failed, result or traceback)."""
    import torch
    import torch.distributed as dist

    from pipetransformer.process.world import World

    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    timeout = timedelta(seconds=_COLLECTIVE_SECONDS)
    try:
        function, args = pickle.loads(call)
        store = dist.PrefixStore(str(number), dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
        world = World(rank, world_size, rank, world_size, torch.device("cpu"), timeout)
        return pickle.dumps((False, function(world, *args)))
    except Exception:
        return pickle.dumps((True, traceback.format_exc()))


def _leave_group() -> None:
    """Frees peers that still wait; comes after the answer, because it may itself wait for work that is under way."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
