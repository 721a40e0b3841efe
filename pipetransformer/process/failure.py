"""The way of a rank's failure to the user: written by the rank, read by the launcher, shown as one last line.

A rank that fails leaves a report in torchelastic's error file. Ranks die in a row: the one with the mistake, then those
that waited for it. The launcher gathers all ends and ``first_cause`` tells which came first.
"""

from __future__ import annotations

import json
import linecache
import re
import signal
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import time as now
from types import TracebackType

from pipetransformer.config.secrets import masked
from pipetransformer.errors import UserError
from pipetransformer.process import shutdown
from pipetransformer.process.shutdown import AT_ONCE
from pipetransformer.process.whereabouts import HERE

_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, AT_ONCE)
_INTERRUPTED = frozenset({code for number in _ENDING for code in (-number, 128 + number)})
NO_ANSWER = "no answer within run.timeout"
_WAITING = re.compile(r"\.wait\(|\bdist\.|all_reduce|all_gather|barrier|broadcast|\brecv|\bsend")


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed rank's report of itself.

    Attributes:
        line: the cause, one line.
        details: the traceback; empty for a user's mistake.
        followed: whether it is only the consequence of another rank's end.
        time: seconds since the epoch.
        ended_by: the signal that ended it; 0 for none.
        place: where it was then, in words.
        waits: whether it waited for other ranks then.
    """

    line: str
    details: str
    followed: bool
    time: float
    ended_by: int = 0
    place: str = ""
    waits: bool = False


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


def describe(error: Exception, *, followed: bool, silent: Sequence[int] = ()) -> Failure:
    """The report of a rank that an exception ends.

    Args:
        silent: the nodes for which it has waited in vain, where any are known.
    """
    if silent:
        nodes = f"node{'s' if len(silent) > 1 else ''} {', '.join(map(str, silent))}"
        return Failure(f"{NO_ANSWER} from {nodes} ({HERE}): it stands still, or the link is gone", "", True, now())
    is_mistake = isinstance(_root(error), UserError)
    details = "" if is_mistake else masked("".join(traceback.format_exception(error)))
    where = "" if is_mistake or followed or not (here := str(HERE)) else f" ({here})"
    return Failure(line=f"{masked(cause_line(error))}{where}", details=details, followed=followed, time=now())


def interrupted(number: signal.Signals, *, trace: TracebackType | None = None, outcome: str = "") -> Failure:
    """The report of a rank that a signal ends.

    Args:
        trace: the way of the exception that the signal's handler raised; None where it could not, because the main
            thread sits in a call.
        outcome: what was done before the end, in words.
    """
    file, number_of_line = _spot_of_main_thread() if trace is None else _spot_of(trace)
    code = linecache.getline(file, number_of_line)
    place = ", ".join(filter(None, (str(HERE), f"{Path(file).name}:{number_of_line}")))
    line = f"ended by {number.name}{f'; {outcome}' if outcome else f' ({HERE})' if str(HERE) else ''}"
    return Failure(line, "", False, now(), int(number), place, waits=bool(_WAITING.search(code)))


def _spot_of(trace: TracebackType) -> tuple[str, int]:
    """File and line of the code that a signal interrupted."""
    spots = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(trace)]
    return next((spot for spot in reversed(spots) if spot[0] != shutdown.__file__), spots[0])


def _spot_of_main_thread() -> tuple[str, int]:
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    return frame.f_code.co_filename, frame.f_lineno


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
        "interrupted": {"ended_by": report.ended_by, "place": report.place, "waits": report.waits},
    }
    try:
        path.write_text(json.dumps({"message": {"message": line, "extraInfo": extra}}))
    except OSError:  # a full disk, which may well be the cause
        print(f"{report.details}{line}", file=sys.stderr, flush=True)


def read_report(message: object) -> Failure | None:
    """The report in the ``message`` of an error file; None where the file is not by ``write_report``."""
    match message:
        case {
            "message": str(line),
            "extraInfo": {"details": details, "followed": followed, "time": time, "interrupted": dict(interruption)},
        }:
            return Failure(line, details, followed, time, **interruption)
    return None


def first_cause(ends: Mapping[int, RankEnd]) -> Failure:
    """The report of the rank whose end brought down the others, made up for a rank that could not write one."""
    rank = min(ends, key=lambda rank: (_precedence(ends[rank]), _time(ends[rank]), rank))
    end = ends[rank]
    names_nodes = end.report is not None and f"{NO_ANSWER} from node" in end.report.line
    if _waited(end) and not names_nodes and (silent := _silent(ends)):
        first = ends[silent[0]].report
        assert first is not None
        names = f"rank {silent[0]}" if len(silent) == 1 else f"ranks {', '.join(map(str, silent))}"
        return replace(first, line=f"{names}: {NO_ANSWER}; it was at {first.place}")
    if end.report is not None:
        return end.report
    line = _exit_line(end.exit_code)
    if end.exit_code == -signal.SIGKILL and any(_waited(other) for other in ends.values()):
        line = "it did not answer within run.timeout, nor end when it was told to: it hung, or was stopped"
    return Failure(f"rank {rank}: {line}", "", False, end.time)


def _silent(ends: Mapping[int, RankEnd]) -> list[int]:
    """Of ranks that the launcher had to end while others had waited in vain, those that did not wait themselves, or all
    where none can be told from the others."""
    ended = {rank: end.report for rank, end in ends.items() if end.report and end.report.ended_by == AT_ONCE}
    return [rank for rank, report in ended.items() if not report.waits] or list(ended)


def _waited(end: RankEnd) -> bool:
    """Whether a rank ended because another one did not answer."""
    return end.report is not None and end.report.followed and is_timeout(end.report.line)


def is_timeout(text: str) -> bool:
    """Whether the message of a collective says that a rank did not answer."""
    return "timed out" in text.lower() or NO_ANSWER in text


def _precedence(end: RankEnd) -> int:
    """0 for a rank with a cause of its own, 1 for one that lost a peer or was told to end, 2 for one that the launcher
    ended."""
    report = end.report
    if report is None:
        return 2 if end.exit_code in _INTERRUPTED else 0
    if report.ended_by:
        return 2 if report.ended_by == AT_ONCE else 1
    return 1 if report.followed else 0


def _time(end: RankEnd) -> float:
    return end.report.time if end.report is not None else end.time


def _exit_line(exit_code: int) -> str:
    number = -exit_code if exit_code < 0 else exit_code - 128
    if number not in {int(known) for known in signal.Signals}:
        return f"ended with exit code {exit_code}"
    hint = " (out of memory?)" if number == signal.SIGKILL else ""
    return f"ended by {signal.Signals(number).name}{hint}"
