"""The early end of a process: on a signal, within seconds, whatever its main thread is waiting for.

Python runs a signal's handler only between two bytecodes of the main thread, and that thread may sit for minutes inside
a collective. So a signal opens two ways out, and the faster one wins:

    handler (main thread)     raises ``Interrupted``: the usual unwinding, every ``finally`` block runs
    watcher (daemon thread)   woken in C through the wakeup descriptor; after a grace time runs the registered clean-ups
                              and ends the process

A rank whose launcher is gone treats that as a SIGQUIT, so that none outlives its job. SIGTERM alone can be ``noted``: a
scheduler gives time to save before it kills.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import select
import signal
import threading
from collections.abc import Callable, Iterator
from time import monotonic
from types import FrameType
from typing import NoReturn

GRACE_SECONDS = 4.0
AT_ONCE = signal.SIGQUIT
"""The signal of a launcher whose job has failed: nothing can be saved any more."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, AT_ONCE)
_PARENT_POLL_SECONDS = 1.0
_cleanups: list[Callable[[], None]] = []


class Interrupted(SystemExit):
    """The exception of the first signal, in the main thread. Uncaught, it ends the process with 128 + signal.

    Attributes:
        outcome: what was done before the end, in words.
        is_ours: whether the signal came to this process; else to another rank, which ends with this one.
    """

    def __init__(self, signum: int, outcome: str = "", is_ours: bool = True) -> None:
        self.signal, self.outcome, self.is_ours = signal.Signals(signum), outcome, is_ours
        self.exit_code = 128 + signum
        super().__init__(self.exit_code)

    def __reduce__(self) -> tuple[type[Interrupted], tuple[int, str, bool]]:
        """Pickling: libraries that catch everything send it to other ranks."""
        return Interrupted, (int(self.signal), self.outcome, self.is_ours)


class Signals:
    """The handler. Raises once: a second signal must not break the ``finally`` blocks that the first one set going.

    Attributes:
        interruption: the raised exception, should a library have made another of it.
        grace_seconds: longest time for the main thread to unwind.
        noting_seconds: longest time to the end after a first SIGTERM, which is only noted; None to raise it too.
        is_told: whether a SIGTERM was noted.
    """

    def __init__(self, grace_seconds: float = GRACE_SECONDS) -> None:
        self.interruption: Interrupted | None = None
        self.grace_seconds = grace_seconds
        self.noting_seconds: float | None = None
        self.is_told = False

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        if signum == signal.SIGTERM and self.noting_seconds is not None and not self.is_told:
            self.is_told = True
        elif self.interruption is None:
            self.interruption = Interrupted(signum)
            raise self.interruption


@contextlib.contextmanager
def noted(seconds: float) -> Iterator[None]:
    """Has a first SIGTERM in the block be noted and no more; the process ends ``seconds`` later at the latest."""
    handler = signal.getsignal(signal.SIGTERM)
    if not isinstance(handler, Signals):
        yield
        return
    handler.noting_seconds = seconds
    try:
        yield
    finally:
        handler.noting_seconds = None


def is_told() -> bool:
    """Whether a SIGTERM was ``noted``."""
    handler = signal.getsignal(signal.SIGTERM)
    return isinstance(handler, Signals) and handler.is_told


@contextlib.contextmanager
def cleaned_up(cleanup: Callable[[], None]) -> Iterator[None]:
    """Runs ``cleanup`` at the end of the block, or at an end of the process without unwinding.

    Note: it may run in another thread while the main thread holds any lock, so let it remove files and no more.
    """
    _cleanups.append(cleanup)
    try:
        yield
    finally:
        cleanup()
        _cleanups.remove(cleanup)


def leave(exit_code: int) -> NoReturn:
    """Run the clean-ups, end child processes, and end this one at once.

    Destructors are skipped on purpose: that of a process group waits for peers that may never answer.
    """
    for cleanup in reversed(_cleanups.copy()):
        with contextlib.suppress(Exception):
            cleanup()
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(exit_code)


@contextlib.contextmanager
def installed(
    *,
    grace_seconds: float = GRACE_SECONDS,
    parent: int | None = None,
    before_leaving: Callable[[signal.Signals], None] = lambda number: None,
) -> Iterator[Signals]:
    """Let SIGINT, SIGTERM, SIGHUP and SIGQUIT end this process as the module says. For the main thread only.

    Where ``Interrupted`` passes through, the process is ending: further signals are ignored, and the watcher stays
    until the interpreter is gone.

    Args:
        grace_seconds: longest time for the main thread to unwind.
        parent: process without which this one must not go on; None: no such process.
        before_leaving: called with the signal, in the watcher's thread, where the main thread has not unwound in time.
    """
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    stopped = threading.Event()
    # Note: what the caller has this process ignore (nohup: SIGHUP) stays ignored, here and in child processes.
    previous_handlers = {n: h for n in _SIGNALS if (h := signal.getsignal(n)) is not signal.SIG_IGN}
    handler = Signals(grace_seconds)
    for number in previous_handlers:
        signal.signal(number, handler)
    previous_descriptor = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    watcher = threading.Thread(
        target=_watch, args=(read_end, stopped, handler, parent, before_leaving), name="shutdown", daemon=True
    )
    watcher.start()
    ending = False
    try:
        yield handler
    except Interrupted:
        ending = True
        raise
    finally:
        for number, previous in previous_handlers.items():
            signal.signal(number, signal.SIG_IGN if ending else previous)
        if not ending:
            signal.set_wakeup_fd(previous_descriptor)
            stopped.set()
            os.close(write_end)


def _watch(
    read_end: int,
    stopped: threading.Event,
    handler: Signals,
    parent: int | None,
    before_leaving: Callable[[signal.Signals], None],
) -> None:
    first, until = 0, math.inf
    while not stopped.is_set():
        wait = min(_PARENT_POLL_SECONDS, max(0.0, until - monotonic()))
        ready, _, _ = select.select([read_end], [], [], wait)
        for number in os.read(read_end, 64) if ready else ():
            if number not in _SIGNALS:
                continue
            noting = handler.noting_seconds
            has_time = noting is not None and number == signal.SIGTERM and not first
            first, until = number, min(until, monotonic() + (noting if has_time and noting else handler.grace_seconds))
        if parent is not None and os.getppid() != parent:
            parent = None
            os.kill(os.getpid(), AT_ONCE)
        if monotonic() >= until and not stopped.is_set():
            with contextlib.suppress(Exception):
                before_leaving(signal.Signals(first))
            leave(128 + first)
    os.close(read_end)


def _forget_in_child() -> None:
    """Lets a forked child (a data loader's worker) die of a signal as usual and never wake its parent's watcher."""
    if isinstance(signal.getsignal(signal.SIGTERM), Signals):
        signal.set_wakeup_fd(-1)
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)


os.register_at_fork(after_in_child=_forget_in_child)
