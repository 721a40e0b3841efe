"""Registries: what a key of the configuration may name, and classes told as ``package.module:Class`` text.

A registry knows its entries without importing what they stand for: ``resolve`` does that when one is used.
"""

from __future__ import annotations

import difflib
import importlib
import json
import re
from collections.abc import Mapping
from typing import Any, TypeVar

from pipetransformer.errors import UserError

Entry = TypeVar("Entry")
CLASS_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)


class Registry(dict[str, Entry]):
    """Entries by name, in the order in which they are listed.

    Args:
        key: the configuration's key that names one of them.
        also: ``package.module:Class`` where the key takes such text, too; none if empty.
    """

    def __init__(self, entries: Mapping[str, Entry], *, key: str, also: str = "") -> None:
        super().__init__(entries)
        self.key = key
        self._also = also

    @property
    def allowed(self) -> str:
        """Words for what the key takes."""
        return f"one of {', '.join(self)}" + (f", or {self._also}" if self._also else "")

    def near(self, given: object) -> str:
        """A hint at the name that was probably meant, to end a message with; empty where there is none."""
        near = difflib.get_close_matches(given.lower(), self, n=1) if isinstance(given, str) else []
        return f"; did you mean {near[0]}?" if near else ""

    def known(self, name: str) -> str:
        """``name``, if the key takes it. Raises ValueError."""
        if name not in self and not (self._also and CLASS_PATH.fullmatch(name)):
            raise ValueError
        return name

    def __missing__(self, name: str) -> Entry:
        """Raises UserError."""
        raise UserError(f"{self.key}: {json.dumps(name)} is not allowed; give {self.allowed}{self.near(name)}")


def resolve(path: str) -> Any:
    """The class that ``package.module:Class`` names.

    Raises:
        ImportError: there is no such module.
        AttributeError: it has no such class.
        Exception: whatever else importing it raises.
    """
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
