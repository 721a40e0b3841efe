"""The ranks' agreement to end early: about once a second, all ask each other whether one was told to."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import torch
import torch.distributed as dist

_SECONDS, _MOST_STEPS = 1.0, 1000  # between two questions


class Pulse:
    """All ranks ask behind the same steps: so many apart as take the slowest rank about a second.

    Args:
        is_told: tells whether this rank was told to end.

    Attributes:
        ends: whether the ranks have agreed to end.
    """

    def __init__(self, is_told: Callable[[], bool]) -> None:
        self._is_told, self.ends = is_told, False
        self._every = self._left = 1
        self._since = perf_counter()

    def beat(self) -> bool:
        """Collective, behind every step. Whether the job ends here."""
        self._left -= 1
        if self._left:
            return False
        now = perf_counter()
        told = torch.tensor([float(self._is_told()), (now - self._since) / self._every])
        if dist.get_world_size() > 1:
            dist.all_reduce(told, op=dist.ReduceOp.MAX)
        self.ends, seconds = bool(told[0]), float(told[1])
        self._every = self._left = max(1, min(_MOST_STEPS, int(_SECONDS / max(seconds, 1e-6))))
        self._since = now
        return self.ends
