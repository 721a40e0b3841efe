"""The ranks of a job as forks of one server, which has imported all: an attempt starts in a second.

Each runs the project's own entry, as under torchrun; ``supervise`` stands for torchrun and its last line.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Thread
from time import monotonic, sleep
from time import time as now

from pipetransformer.launch.node import free_port
from pipetransformer.process.failure import RankEnd, first_cause, read_report
from pipetransformer.process.shutdown import AT_ONCE

PRELOADED = ["pipetransformer.trainer", "timm", "transformers.models.bert", "sklearn.datasets", "datasets"]
_POLL_SECONDS = 0.01

Setup = Callable[[int], None]
"""Called with the rank in each process, before the entry; it must be picklable."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a job.

    Attributes:
        exit_code: 0, or the first one that is not.
        cause: the last line that torchrun's launcher would show; empty where all ended well.
        out: standard output of all ranks.
        seconds: from the first end of a rank to the last.
    """

    exit_code: int
    cause: str
    out: str
    seconds: float


class ForkedJob:
    """A job whose ranks run ``main_xx.py CONFIG [key=value ...]``.

    Args:
        task: of the configuration.
        arguments: of the entry.
        setup: called in each rank; None for nothing.
    """

    def __init__(self, task: str, arguments: Sequence[str], *, num_ranks: int, setup: Setup | None = None) -> None:
        context = get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._folder = tempfile.TemporaryDirectory(prefix="forked_")
        port, folder, (reader, writer) = free_port(), self._folder.name, context.Pipe(duplex=False)
        self.ranks: list[BaseProcess] = [
            context.Process(target=_rank, args=(rank, num_ranks, port, task, list(arguments), folder, writer, setup))
            for rank in range(num_ranks)
        ]
        for process in self.ranks:
            process.start()
        writer.close()
        self._out = list[bytes]()
        self._reading = Thread(target=_read_all, args=(reader, self._out), daemon=True)
        self._reading.start()

    def kill(self, ranks: Sequence[int]) -> None:
        self.signal(ranks, signal.SIGKILL)

    def signal(self, ranks: Sequence[int], number: int) -> None:
        for rank in ranks:
            pid = self.ranks[rank].pid
            if pid is not None and self.ranks[rank].is_alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    def supervise(self, *, stop_seconds: float = 7.0, timeout: float = 120.0) -> Ended:
        """Waits for the end, and ends the others where a rank fails, as the launcher does."""
        ended: dict[int, float] = {}
        until, told = monotonic() + timeout, False
        while len(ended) < len(self.ranks):
            for rank, process in enumerate(self.ranks):
                if rank not in ended and process.exitcode is not None:
                    ended[rank] = now()
            alive = [rank for rank in range(len(self.ranks)) if rank not in ended]
            if not told and any(self.ranks[rank].exitcode for rank in ended):
                told, until = True, min(until, monotonic() + stop_seconds)
                self.signal(alive, AT_ONCE)
            if monotonic() > until:
                self.kill(alive)
            sleep(_POLL_SECONDS)
        ends = {
            rank: RankEnd(process.exitcode or 0, ended[rank], self._report(rank))
            for rank, process in enumerate(self.ranks)
        }
        bad = {rank: end for rank, end in ends.items() if end.exit_code}
        self._reading.join(timeout=5.0)
        self._folder.cleanup()
        exit_code = next((end.exit_code for end in bad.values()), 0)
        seconds = max(ended.values()) - min(ended.values())
        out = b"".join(self._out).decode(errors="replace")
        return Ended(exit_code, first_cause(bad).line if bad else "", out, seconds)

    def _report(self, rank: int) -> object:
        with contextlib.suppress(OSError, ValueError):
            return read_report(json.loads(Path(self._folder.name, f"error_{rank}.json").read_text())["message"])
        return None


@contextlib.contextmanager
def running(job: ForkedJob) -> Iterator[ForkedJob]:
    """Leaves no rank behind."""
    try:
        yield job
    finally:
        job.kill(range(len(job.ranks)))


def _read_all(reader: Connection, out: list[bytes]) -> None:
    """What the ranks print; of a pipe, for a file would be on the disk that a test has be full."""
    with contextlib.suppress(OSError):
        while block := os.read(reader.fileno(), 2**16):
            out.append(block)
    reader.close()


def _rank(
    rank: int,
    size: int,
    port: int,
    task: str,
    arguments: list[str],
    folder: str,
    out: Connection,
    setup: Setup | None,
) -> None:
    os.dup2(out.fileno(), 1)
    out.close()
    os.dup2(os.open(f"{folder}/err_{rank}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC), 2)
    os.environ |= {
        "TORCHELASTIC_RUN_ID": "forked",
        "TORCHELASTIC_ERROR_FILE": f"{folder}/error_{rank}.json",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "TMPDIR": folder,
    }
    tempfile.tempdir = None
    import torch

    from pipetransformer.launch.entry import main

    torch.set_num_threads(1)
    if setup is not None:
        setup(rank)
    exit_code = main(task, arguments)
    sys.stdout.flush()
    os._exit(exit_code)
