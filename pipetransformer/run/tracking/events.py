"""``events.jsonl``: every decision, transition and evaluation of a run, one JSON object a line."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from pydantic_core import from_json, to_json

from pipetransformer.errors import UserError, writing

__all__ = ["EventLog", "read_events", "to_plain"]


class EventLog:
    """Appends events to ``path``; each reaches the kernel before ``write`` returns, so a killed process loses none.

    A run that is resumed appends to what is there. A line that the last process left half-written is cut off first,
    or the next event would be glued to it. Raises UserError where the disk takes no more.
    """

    def __init__(self, path: Path) -> None:
        with writing(path):
            _mend_last_line(path)
            self._file = path.open("a", encoding="ascii")

    def write(self, kind: str, /, **fields: Any) -> None:
        """Append ``{"event": kind, "time": seconds since the epoch, **fields}``."""
        assert not {"event", "time"} & fields.keys(), fields
        event = {"event": kind, "time": time.time(), **to_plain(fields)}
        line = json.dumps(event, allow_nan=False) + "\n"
        with writing(Path(self._file.name)):
            self._file.write(line)
            self._file.flush()

    def close(self) -> None:
        self._file.close()


def to_plain(value: Any) -> Any:
    """``value`` as plain JSON: dataclasses become objects, arrays and tensors lists, their scalars numbers.

    JSON has no NaN or infinity: they become the strings ``NaN``, ``Infinity`` and ``-Infinity``, which ``float`` reads
    back. Raises ValueError for anything else.
    """
    return from_json(to_json(value, inf_nan_mode="strings", fallback=_numbers))


def _numbers(value: Any) -> Any:
    """Of numpy's and torch's arrays and scalars."""
    if not hasattr(value, "tolist"):
        raise TypeError(f"{type(value).__name__} has no plain form")
    return value.tolist()


def read_events(path: Path) -> list[dict[str, Any]]:
    """All events of ``path``, in order; a last line that was torn by the death of its writer does not count.

    Raises UserError, naming the file and the line, for anything else that is no event.
    """
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); give the events.jsonl of a run") from None
    *whole, last = lines
    events = [_parsed(line, where=f"{path}:{number}") for number, line in enumerate(whole, start=1)]
    if _is_event(last):
        events.append(json.loads(last))
    return events


def _parsed(line: bytes, *, where: str) -> dict[str, Any]:
    if not _is_event(line):
        raise UserError(f'{where}: not an event; each line must be one JSON object with an "event" key')
    event: dict[str, Any] = json.loads(line)
    return event


def _is_event(line: bytes) -> bool:
    try:
        event = json.loads(line)
    except ValueError:
        return False
    return isinstance(event, dict) and isinstance(event.get("event"), str)


def _mend_last_line(path: Path) -> None:
    """End the file of a killed writer with a newline: behind its last event if that is whole, else before it."""
    if not path.exists():
        return
    content = path.read_bytes()
    last_start = content.rfind(b"\n") + 1
    if last_start == len(content):
        return
    if _is_event(content[last_start:]):
        with path.open("ab") as file:
            file.write(b"\n")
    else:
        os.truncate(path, last_start)
