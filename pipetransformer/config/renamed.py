"""Keys that had another name once: files and command lines that say it go on working."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipetransformer.errors import UserError

RENAMED: Mapping[str, str] = {"pipe.checkpoint": "pipe.recompute"}


def with_new_names(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The same values under their new names, and by new name the old one that was given.

    Raises:
        UserError: if one value is given under both.
    """
    renamed, given = dict(values), dict[str, str]()
    for old, new in RENAMED.items():
        section, name = old.split(".")
        there = renamed.get(section)
        if not (isinstance(there, dict) and name in there):
            continue
        new_name = new.rpartition(".")[2]
        if new_name in there:
            raise _both(old, new)
        renamed[section] = {new_name if key == name else key: value for key, value in there.items()}
        given[new] = old
    return renamed, given


def new_keys(overrides: Mapping[str, object]) -> dict[str, object]:
    """Dotted keys with their values, under their new names. Raises UserError if one is given under both."""
    for old, new in RENAMED.items():
        if old in overrides and new in overrides:
            raise _both(old, new)
    return {RENAMED.get(key, key): value for key, value in overrides.items()}


def _both(old: str, new: str) -> UserError:
    return UserError(f"{old}: is called {new} now, and both are given; leave {old} out")
