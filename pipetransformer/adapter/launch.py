"""torchrun's API, and the messages of ranks and launcher that go through it."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import logging
import math
import os
import re
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch.distributed as dist

from pipetransformer.adapter.rendezvous import Rendezvous, ends_of, tell_restarts
from pipetransformer.errors import UserError
from pipetransformer.process.failure import RankEnd, is_timeout
from pipetransformer.process.shutdown import AT_ONCE, Interrupted, cleaned_up

_HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_FOLDER, _LOCK = "pipetransformer_", ".lock"
_PEER_FAILURES = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|socket closed|remote process exited|communicator was aborted"
    r"|failed to recv, got 0 bytes",
    re.IGNORECASE,
)


def is_peer_failure(error: BaseException) -> bool:
    """Whether a collective failed only because another rank is gone, or does not answer.

    Note: neither gloo nor NCCL nor the store has an exception type for this, so the message has to tell; schedules of
    ``torch.distributed.pipelining`` raise their own error from it.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, RuntimeError) and (_PEER_FAILURES.search(str(cause)) or is_timeout(str(cause))):
            return True
        cause = cause.__cause__
    return False


def silent_nodes(*, seconds: float) -> list[int]:
    """The nodes of which no rank tells, within ``seconds``, that it waits in vain; for ranks that do, at about the same
    time. Node 0, if its store gives no answer.
    """
    rank, size, local_size = dist.get_rank(), dist.get_world_size(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    nodes, found = range(size // local_size), list[bool]()

    def ask() -> None:
        # Note: private; the store at which the ranks have met.
        store = dist.distributed_c10d._get_default_store()
        with contextlib.suppress(Exception):  # a store that is gone gives no answer
            store.set(f"waits/{rank}", "")
            time.sleep(0.8 * seconds)
            waits = [store.check([f"waits/{other}"]) for other in range(size)]
            found.extend(any(waits[node * local_size : (node + 1) * local_size]) for node in nodes)

    asking = threading.Thread(target=ask, daemon=True)  # a store that is gone may keep it for minutes
    asking.start()
    asking.join(seconds)
    own = rank // local_size
    return [node for node in nodes if node != own and not found[node]] if found else [0] * (own > 0)


def run_ranks(
    script: Path,
    arguments: Sequence[str],
    *,
    num_ranks: int,
    rendezvous: Rendezvous,
    max_restarts: int = 0,
    stop_seconds: float,
    saving_seconds: float,
) -> dict[int, RankEnd]:
    """Run this node's share of a job under torchrun, in this process, until all its ranks have ended.

    Returns how each rank of this node ended if any failed (by its global number), or else nothing.
    Raises ``Interrupted`` on a signal. Ranks that do not end within ``stop_seconds`` of being told to are killed, or,
    where a SIGTERM has come to this process, within ``saving_seconds``.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.run import parse_args, run

    logging.disable(logging.CRITICAL)  # torchrun logs what the last line of a failed job says better
    _limit_stop_seconds(stop_seconds, saving_seconds=saving_seconds)
    tell_restarts(max_restarts)
    _sweep()
    folder = tempfile.mkdtemp(prefix=_FOLDER)  # torchrun leaves its own behind
    with cleaned_up(functools.partial(shutil.rmtree, folder, ignore_errors=True)), _locked(Path(folder)):
        # Note: timm imports wandb, which makes temporary folders at once; a rank that is ended cannot delete them. But
        # data loaders put sockets there, whose whole path may have 107 characters.
        if len(folder) < 70:
            os.environ["TMPDIR"] = folder
        flags = {
            **rendezvous.flags,
            "--nproc-per-node": num_ranks,
            "--max-restarts": max_restarts,
            "--monitor-interval": 0.1,
            "--log-dir": folder,
        }
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # nohup: torchrun would end the job all the same
            flags["--signals-to-handle"] = "SIGTERM,SIGINT,SIGQUIT"
        # Note: torchrun does not put back the handlers that it replaces.
        handlers = {number: signal.getsignal(number) for number in _HANDLED}
        try:
            options = [f"{flag}={value}" for flag, value in flags.items()]
            run(parse_args([*options, str(script), *arguments]))  # type: ignore[no-untyped-call]
        except ChildFailedError as error:
            return ends_of(error.failures)
        except RendezvousError as error:
            raise UserError(rendezvous.obstacle) from error
        except SignalException as error:
            raise Interrupted(error.sigval) from None
        finally:
            for number, handler in handlers.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
    return {}


def _sweep() -> None:
    """Deletes the temporary folders of this user's launchers that were killed: the kernel has freed their locks."""
    for lock in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*/{_LOCK}"):
        with contextlib.suppress(OSError), lock.open("r") as file:
            if lock.stat().st_uid == os.getuid():
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Holds the lock by which ``_sweep`` knows that a folder is in use, in whatever container."""
    with (folder / _LOCK).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _limit_stop_seconds(stop_seconds: float, *, saving_seconds: float) -> None:
    """Bound torchrun's wait between telling its ranks to end and killing them. Where one has failed, the others are
    told to end at once, by SIGQUIT: with it, none can save.

    Note: 30 s are fixed where a rank failed, and before torch 2.12 everywhere. A second signal during that wait would
    make torchrun abandon its ranks, so signals are ignored meanwhile. torchrun gives no signal where a rank has failed.
    """
    from torch.distributed.elastic.multiprocessing import PContext

    close = getattr(PContext.close, "__wrapped__", PContext.close)  # of a process that has run ranks before

    @functools.wraps(close)
    def close_soon(self: PContext, death_sig: signal.Signals | None = None, timeout: float = 30) -> None:
        handlers = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            seconds = saving_seconds if death_sig == signal.SIGTERM else stop_seconds
            close(self, death_sig or AT_ONCE, math.ceil(seconds))
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    PContext.close = close_soon  # type: ignore[method-assign]
