"""Where this rank is in the job: told where it ends early, and the place at which tests have it fail."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Literal

Phase = Literal[
    "set-up",
    "measuring",
    "forward",
    "backward",
    "reduction",
    "optimizer",
    "transition",
    "cache advance",
    "evaluation",
    "checkpoint write",
    "checkpoint publish",
    "model save",
]


class Whereabouts:
    """The present phase of this process, which a rank enters some times in a step, at the cost of an assignment.

    Attributes:
        step: number of steps done.
        phase: what it does; None before a job has begun.
        is_beside: whether this is the place of a thread beside the main one.
        listener: called at every entry; None for none.
    """

    __slots__ = ("is_beside", "listener", "phase", "step")

    def __init__(self, step: int = 0, *, is_beside: bool = False) -> None:
        self.step, self.is_beside = step, is_beside
        self.phase: Phase | None = None
        self.listener: Callable[[Whereabouts], None] | None = None

    def enter(self, phase: Phase | None) -> None:
        self.phase = phase
        if self.listener is not None:
            self.listener(self)

    def beside(self) -> Whereabouts:
        """Those of a thread that works beside the main one, on what was there now; its entries are heard too."""
        place = Whereabouts(self.step, is_beside=True)
        place.listener = self.listener
        return place

    def __str__(self) -> str:
        """Empty before a job has begun. The host is told where there are several."""
        if self.phase is None:
            return ""
        has_hosts = os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE")
        return f"step {self.step}, {self.phase}{f', on {socket.gethostname()}' if has_hosts else ''}"


HERE = Whereabouts()
"""That of this process."""
