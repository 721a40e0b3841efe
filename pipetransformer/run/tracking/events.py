"""``events.jsonl``: every decision, transition and evaluation of a run, one JSON object per line."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python

from pipetransformer.errors import UserError, writing


class EventLog:
    """Appends events to ``path``.

    Each event is with the kernel before ``write`` returns, so that a killed process loses none. A resumed run appends
    to its old file. A half-written last line is cut off first, because it would spoil the next event. An event that the
    disk has no room for is lost, and the next one is tried: a log is no reason to end a job.

    Attributes:
        num_lost: number of events that could not be written.
        reason: why the last of these could not.

    Raises:
        UserError: if the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.num_lost, self.reason = 0, ""
        with writing(path):
            _mend_last_line(path)
            self._file = path.open("ab", buffering=0)

    def write(self, kind: str, /, **fields: Any) -> None:
        """Appends ``{"event": kind, "time": seconds since 1970, **fields}``."""
        assert not {"event", "time"} & fields.keys(), fields
        event = {"event": kind, "time": time.time(), **to_plain(fields)}
        line, before = (json.dumps(event, allow_nan=False) + "\n").encode("ascii"), 0
        try:
            before = self._file.tell()
            if self._file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self.num_lost, self.reason = self.num_lost + 1, error.strerror or str(error)
            with contextlib.suppress(OSError):  # of a half-written one
                os.ftruncate(self._file.fileno(), before)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def to_plain(value: Any) -> Any:
    """``value`` as plain JSON: dataclasses become objects, arrays and tensors become lists, their scalars numbers.

    JSON has no NaN and no infinity. They become the strings ``NaN``, ``Infinity`` and ``-Infinity``, which ``float``
    can read.

    Raises:
        TypeError: for any other type.
    """
    return json.loads(json.dumps(to_jsonable_python(value, fallback=_other)), parse_constant=str)


def _other(value: Any) -> Any:
    """Of numpy's and torch's arrays and scalars, and of mappings and ranges."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, range):
        return list(value)
    raise TypeError(f"{type(value).__name__} has no plain form")


def read_events(path: Path) -> list[dict[str, Any]]:
    """All events of ``path``, in order. A half-written last line, left by a killed process, is skipped.

    Raises:
        UserError: if the file cannot be read, or another line is not an event; it names the line.
    """
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); give the events.jsonl of a run") from None
    events = []
    for number, line in enumerate(lines, start=1):
        event = _parsed(line)
        if event is not None:
            events.append(event)
        elif number < len(lines):
            raise UserError(f'{path}:{number}: not an event; each line must be one JSON object with an "event" key')
    return events


def _parsed(line: bytes) -> dict[str, Any] | None:
    """The event of a line; None if it is not a whole event."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and isinstance(event.get("event"), str) else None


def _mend_last_line(path: Path) -> None:
    """Ends the file of a killed process with a newline: after a whole last line, or in place of a half-written one."""
    if not path.exists():
        return
    content = path.read_bytes()
    last_start = content.rfind(b"\n") + 1
    if last_start == len(content):
        return
    if _parsed(content[last_start:]) is not None:
        with path.open("ab") as file:
            file.write(b"\n")
    else:
        os.truncate(path, last_start)
