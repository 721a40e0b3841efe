"""Faults at a place and a moment of a run: ``fail_at(rank=1, step=7, phase="backward", how="kill")``.

It gives a function that a rank calls before it trains, and that a process can be sent.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args
from unittest import mock

from pipetransformer.process.whereabouts import HERE, Phase, Whereabouts

How = Literal["raise", "kill", "stop", "hang", "sigterm", "slow disk", "full disk", "out of memory"]
HOWS: tuple[How, ...] = get_args(How)
BESIDE: tuple[Phase, ...] = ("checkpoint write", "checkpoint publish")
"""The phases of a thread beside training."""
WRITING: tuple[Phase, ...] = ("checkpoint write", "checkpoint publish", "model save")
"""The phases that write to the run's folder."""
SLOW = 4.0  # seconds of a slow disk's write


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault that happens once.

    Attributes:
        rank: the rank that it happens to.
        step: number of steps done at the earliest.
        phase: the phase at whose beginning it happens; what concerns the disk lasts to its end.
        how: its kind.
    """

    rank: int
    step: int
    phase: Phase
    how: How

    def __call__(self, rank: int) -> None:
        """Lies in wait on ``rank``."""
        if self.how == "sigterm":  # ranks ask each other behind every step
            from pipetransformer.run import pulse

            pulse._SECONDS = 0.0
        if rank == self.rank:
            HERE.listener = _Ambush(self)


def fail_at(*, rank: int, step: int, phase: Phase, how: How) -> Fault:
    assert phase in get_args(Phase) and how in HOWS, (phase, how)
    return Fault(rank, step, phase, how)


class _Ambush:
    def __init__(self, fault: Fault) -> None:
        self._fault, self._is_over = fault, False
        self._disk = contextlib.ExitStack()

    def __call__(self, here: Whereabouts) -> None:
        fault = self._fault
        if here.is_beside != (fault.phase in BESIDE):
            return
        if here.phase != fault.phase:
            self._disk.close()
        elif not self._is_over and here.step >= fault.step:
            self._is_over = True
            _HAPPENS[fault.how](self._disk)


def _raise(disk: contextlib.ExitStack) -> None:
    raise RuntimeError("planted")


def _signal(number: signal.Signals, disk: contextlib.ExitStack) -> None:
    os.kill(os.getpid(), number)


def _hang(disk: contextlib.ExitStack) -> None:
    while True:
        time.sleep(0.1)


def _out_of_memory(disk: contextlib.ExitStack) -> None:
    import torch

    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")


def _disk(disk: contextlib.ExitStack, *, before: Callable[[contextlib.ExitStack], None]) -> None:
    """Calls ``before`` at the end of each write of a checkpoint, which is where a disk tells that it is full, and at
    that of a model."""
    from pipetransformer.run import saved_model

    for place, name in ((os, "fsync"), (saved_model, "_give_usual_permissions")):
        usual: Callable[..., object] = getattr(place, name)

        def later(*args: object, usual: Callable[..., object] = usual) -> object:
            if threading.current_thread() is not threading.main_thread():  # as all of these writes
                before(disk)
            return usual(*args)

        disk.enter_context(mock.patch.object(place, name, later))


def _waits(disk: contextlib.ExitStack) -> None:
    time.sleep(SLOW)


def _no_room(disk: contextlib.ExitStack) -> None:
    disk.close()  # a phase that fails has no other end
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


_HAPPENS: dict[How, Callable[[contextlib.ExitStack], None]] = {
    "raise": _raise,
    "kill": partial(_signal, signal.SIGKILL),
    "stop": partial(_signal, signal.SIGSTOP),
    "sigterm": partial(_signal, signal.SIGTERM),
    "hang": _hang,
    "slow disk": partial(_disk, before=_waits),
    "full disk": partial(_disk, before=_no_room),
    "out of memory": _out_of_memory,
}
