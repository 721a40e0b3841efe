"""Ranks that live for one measurement: what one leaves behind, or dies of, is no matter of the next one's.

``support.ranks.as_ranks`` starts a whole script again. Here the script stays, and asks for new ranks again and again:
a rank that runs out of memory can only be ended, and its peers, which wait for it, with it. Each ``run`` is one job of
torchrun (``rank.py``), in whose folder lie, as JSON, the argument and what every rank answers:

    argument.json  ->  0.json, 1.json, ...    or K.out_of_memory, where rank K had not enough
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from pydantic import TypeAdapter

from benchmarks.support.ranks import import_path
from pipetransformer.adapter import Rendezvous, run_ranks
from pipetransformer.errors import UserError
from pipetransformer.launch.node import free_port
from pipetransformer.process.failure import RankEnd, first_cause
from pipetransformer.process.world import World

__all__ = ["FreshRanks", "OutOfMemory", "types_of"]

Argument = TypeVar("Argument")
Result = TypeVar("Result")
_SCRIPT = Path(__file__).parent / "rank.py"
_STOP_SECONDS = 5
_ENDED_BY_LAUNCHER = tuple(each for number in (signal.SIGTERM, signal.SIGQUIT) for each in (-number, 128 + number))


class OutOfMemory(Exception):
    """Some rank had not the memory that the measurement takes."""


@dataclass(frozen=True, slots=True)
class FreshRanks:
    """New processes of this machine for every ``run``; made by ``FreshRanks.ready``."""

    _timeout_seconds: float

    @classmethod
    @contextmanager
    def ready(cls, *, timeout_seconds: float = 600.0) -> Iterator[FreshRanks]:
        """One thread a rank. Costs and data that jobs keep are in a folder that goes with it.

        Args:
            timeout_seconds: what one ``run`` may take, from the start of its ranks on.
        """
        before = dict(os.environ)
        with tempfile.TemporaryDirectory() as cache:
            # Without the threshold the C library keeps what is freed, more or less of it from run to run.
            own = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "32768", "PIPETRANSFORMER_CACHE": cache}
            os.environ.update(own | import_path())
            try:
                yield cls(timeout_seconds)
            finally:
                os.environ.clear()
                os.environ.update(before)

    def run(self, function: Callable[[World, Argument], Result], argument: Argument, *, num_ranks: int) -> list[Result]:
        """``function(world, argument)`` on ``num_ranks`` ranks; the results in order of rank.

        Args:
            function: at the top of a module that is not the script; its type hints say how JSON is read.

        Raises:
            OutOfMemory: if any rank had not enough.
            UserError: as a rank raised it.
            RuntimeError: with the traceback of the first rank that failed otherwise, or at the timeout.
        """
        given, returned = types_of(function)
        with tempfile.TemporaryDirectory(prefix="pipetransformer_") as name:
            folder = Path(name)
            (folder / "argument.json").write_bytes(given.dump_json(argument))
            ends = run_ranks(
                _SCRIPT,
                [name, f"{function.__module__}:{function.__qualname__}", str(self._timeout_seconds)],
                num_ranks=num_ranks,
                rendezvous=Rendezvous.on_loopback(free_port()),
                stop_seconds=_STOP_SECONDS,
                saving_seconds=_STOP_SECONDS,
            )
            if ends:
                # A peer of a rank that ran out of memory fails too, perhaps before that rank has told.
                raise OutOfMemory if any(folder.glob("*.out_of_memory")) else _error_of(ends)
            return [returned.validate_json((folder / f"{rank}.json").read_bytes()) for rank in range(num_ranks)]


def types_of(function: Callable[[World, Any], Any]) -> tuple[TypeAdapter[Any], TypeAdapter[Any]]:
    """Of its argument and of its result."""
    _, given, returned = get_type_hints(function).values()
    return TypeAdapter(given), TypeAdapter(returned)


def _error_of(ends: Mapping[int, RankEnd]) -> Exception:
    own = [end for end in ends.values() if not _followed(end)]
    if own and all(end.report is None and end.exit_code == -signal.SIGKILL for end in own):
        return OutOfMemory()  # what the kernel does where the machine's memory is spent
    cause = first_cause(ends)
    if any(end.report is cause for end in ends.values()) and not cause.details:
        return UserError(cause.line.partition(": ")[2])  # behind the rank's number
    return RuntimeError(f"{cause.line}\n{cause.details}")


def _followed(end: RankEnd) -> bool:
    """Whether a rank ended because another one had."""
    if end.report is None:
        return end.exit_code in _ENDED_BY_LAUNCHER
    return end.report.followed or end.report.ended_by > 0
