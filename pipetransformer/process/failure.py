"""The way of a rank's failure to the user: written by the rank, read by the launcher, shown as one last line.

A rank that fails leaves a report in torchelastic's error file. Ranks die in a row: the one with the mistake, then those
that waited for it. The launcher gathers all ends and ``first_cause`` tells which came first.
"""

from __future__ import annotations

import json
import signal
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from time import time as now

from pipetransformer.errors import UserError

_INTERRUPTED = frozenset({-signal.SIGTERM, -signal.SIGINT, 128 + signal.SIGTERM, 128 + signal.SIGINT})


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed rank's report of itself.

    Attributes:
        line: the cause, one line.
        details: the traceback; empty for a user's mistake.
        followed: whether it is only the consequence of another rank's end.
        time: seconds since the epoch.
    """

    line: str
    details: str
    followed: bool
    time: float


@dataclass(frozen=True, slots=True)
class RankEnd:
    """The end of one rank, as its launcher saw it.

    Attributes:
        exit_code: negative for a signal.
        time: seconds since the epoch.
        report: the rank's own report; None where it left none.
    """

    exit_code: int
    time: float
    report: Failure | None


def describe(error: Exception, *, followed: bool) -> Failure:
    details = "" if isinstance(_root(error), UserError) else "".join(traceback.format_exception(error))
    return Failure(line=cause_line(error), details=details, followed=followed, time=now())


def cause_line(error: BaseException) -> str:
    """The cause in one line, without a traceback. The root of a chain of errors speaks for them."""
    root = _root(error)
    lines = str(root).strip().splitlines()
    if isinstance(root, UserError):
        return " ".join(lines)
    return f"{type(root).__name__}: {lines[0]}" if lines else type(root).__name__


def _root(error: BaseException) -> BaseException:
    while error.__cause__ is not None and not isinstance(error, UserError):
        error = error.__cause__
    return error


def write_report(path: Path, *, rank: int, report: Failure) -> None:
    """Write the report where ``path`` (torchelastic's error file) says, in the form that plain torchrun shows too."""
    line = f"rank {rank}: {report.line}"
    extra = {
        "py_callstack": report.details or line,
        "timestamp": str(int(report.time)),
        "details": report.details,
        "followed": report.followed,
        "time": report.time,
    }
    try:
        path.write_text(json.dumps({"message": {"message": line, "extraInfo": extra}}))
    except OSError:  # a full disk, which may well be the cause
        print(f"{report.details}{line}", file=sys.stderr, flush=True)


def read_report(message: object) -> Failure | None:
    """The report in the ``message`` of an error file; None where the file is not by ``write_report``."""
    match message:
        case {"message": str(line), "extraInfo": {"details": details, "followed": followed, "time": time}}:
            return Failure(line=line, details=details, followed=followed, time=time)
    return None


def first_cause(ends: Mapping[int, RankEnd]) -> Failure:
    """The report of the rank whose end brought down the others, made up for a rank that could not write one."""
    rank = min(ends, key=lambda rank: (_precedence(ends[rank]), _time(ends[rank]), rank))
    end = ends[rank]
    if end.report is not None:
        return end.report
    line = _exit_line(end.exit_code)
    if end.exit_code == -signal.SIGKILL and any(_waited(other) for other in ends.values()):
        line = "it did not answer within run.timeout, nor end when it was told to: it hung, or was stopped"
    return Failure(f"rank {rank}: {line}", "", False, end.time)


def _waited(end: RankEnd) -> bool:
    """Whether a rank ended because another one did not answer."""
    return end.report is not None and end.report.followed and is_timeout(end.report.line)


def is_timeout(text: str) -> bool:
    """Whether the message of a collective says that a rank did not answer."""
    return "timed out" in text.lower()


def _precedence(end: RankEnd) -> int:
    """0 for a rank with a cause of its own, 1 for one that lost a peer, 2 for one that the launcher ended."""
    if end.report is not None:
        return 1 if end.report.followed else 0
    return 2 if end.exit_code in _INTERRUPTED else 0


def _time(end: RankEnd) -> float:
    return end.report.time if end.report is not None else end.time


def _exit_line(exit_code: int) -> str:
    number = -exit_code if exit_code < 0 else exit_code - 128
    if number not in {int(known) for known in signal.Signals}:
        return f"ended with exit code {exit_code}"
    hint = " (out of memory?)" if number == signal.SIGKILL else ""
    return f"ended by {signal.Signals(number).name}{hint}"
