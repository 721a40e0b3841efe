"""An entry whose ranks end as the first override says: see the functions below."""

import os
import signal
import sys
import time
from pathlib import Path

from pipetransformer.errors import UserError
from pipetransformer.launch.entry import run_guarded

RANK = int(os.environ["RANK"])


def succeed() -> None:
    # In one write: both ranks write to one pipe, unbuffered.
    sys.stdout.write(f"rank {RANK} of {os.environ['WORLD_SIZE']} has arguments {sys.argv[1:]}\n")


def every_rank_finds_the_mistake() -> None:
    raise UserError("data.path: there is no folder nowhere")


def one_raises() -> None:
    _join()
    if RANK == 1:
        _mark()
        raise ValueError("the cause\nand its details")
    _wait_for_peers()


def one_is_killed() -> None:
    _join()
    if RANK == 1:
        _mark()
        os.kill(os.getpid(), signal.SIGKILL)
    _wait_for_peers()


def one_will_not_listen() -> None:
    """Rank 0 holds the interpreter's lock in C for ever: neither its handler nor its watcher can run."""
    import ctypes

    if RANK == 1:
        _mark()
        raise ValueError("the cause")
    library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


def all_wait_for_each_other() -> None:
    """Both ranks wait in C++, where no handler of Python's runs."""
    import torch
    import torch.distributed as dist

    from pipetransformer.process.shutdown import cleaned_up

    _join()
    here = Path(sys.argv[1])
    half_written = here / f"half_written_{RANK}"
    half_written.touch()
    with cleaned_up(half_written.unlink):
        (here / f"ready_{RANK}").write_text(str(os.getpid()))
        dist.recv(torch.zeros(1), src=1 - RANK)


def _mark() -> None:
    """Tells when this rank failed."""
    (Path(sys.argv[1]) / "failed_at").write_text(str(time.monotonic()))


def _join() -> None:
    from pipetransformer.process.world import init_world

    init_world(timeout_seconds=300)


def _wait_for_peers() -> None:
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.zeros(1))


if __name__ == "__main__":
    sys.exit(run_guarded(globals()[sys.argv[2]]))
