"""The parser of all command lines: a mistake is one line that names the argument and the usage."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from pipetransformer.errors import UserError


class Parser(argparse.ArgumentParser):
    """argparse with UserError in place of a printout and an exit; overrides may stand behind options too.

    Note: argparse takes positional arguments up to the first option, and asks commands' parsers by this method alone.
    """

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        found, rest = super().parse_known_args(args, namespace)
        if hasattr(found, "overrides"):
            found.overrides = [*found.overrides, *(text for text in rest if not text.startswith("-"))]
            rest = [text for text in rest if text.startswith("-") and text != "--"]
        if rest:
            self.error(f"{rest[0]} is not known")
        return found, rest

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; {' '.join(self.format_usage().split())}")


def count(text: str) -> int:
    """A whole number of at least 1."""
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not allowed; give a whole number of at least 1")
    return int(text)
