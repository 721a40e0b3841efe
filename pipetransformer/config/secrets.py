"""Secrets, such as a hub's token: they belong in the environment, and nowhere into what a run writes. No torch."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence

_VARIABLES = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|CREDENTIAL", re.IGNORECASE)
_FEWEST = 8  # characters: a shorter one may be any word
_SHAPES = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{30,}|gh[pousr]_\w{30,}|sk-(?:proj-)?[A-Za-z0-9]{32,}|AKIA[0-9A-Z]{16})|(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"
)


def masked(text: str) -> str:
    """``text`` with asterisks in place of the secrets of this environment, of tokens by their usual shapes, and of a
    name with its password in an address."""
    for value in _of_environment():
        text = text.replace(value, "***")
    return _SHAPES.sub("***", text)


def key_of_secret(values: object, *, key: str = "") -> str | None:
    """The dotted key of the first text that holds a secret, in values of mappings and sequences; None for none."""
    if isinstance(values, str):
        return key if masked(values) != values else None
    found: Iterator[tuple[str, object]] = iter(())
    if isinstance(values, Mapping):
        found = ((f"{key}.{name}" if key else str(name), value) for name, value in values.items())
    elif isinstance(values, Sequence):
        found = ((key, value) for value in values)
    return next(filter(None, (key_of_secret(value, key=name) for name, value in found)), None)


def _of_environment() -> list[str]:
    """Longest first: one may be a part of another."""
    values = {value for name, value in os.environ.items() if _VARIABLES.search(name) and len(value) >= _FEWEST}
    return sorted((value for value in values if not os.path.exists(value)), key=len, reverse=True)
