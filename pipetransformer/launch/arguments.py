"""The parser of all command lines: a mistake is one line that names the argument and the usage."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from pipetransformer.errors import UserError


class Parser(argparse.ArgumentParser):
    """argparse with UserError in place of a printout and an exit; overrides may stand behind options too, and texts
    keep their lines.

    Note: argparse takes positional arguments up to the first option, and asks commands' parsers by this method alone.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": argparse.RawDescriptionHelpFormatter, **options})

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        found, rest = super().parse_known_args(args, namespace)
        if hasattr(found, "overrides"):
            found.overrides = [*found.overrides, *(text for text in rest if not text.startswith("-"))]
            rest = [text for text in rest if text.startswith("-") and text != "--"]
        if rest:
            key, value = meant(rest[0], *rest[1:2])
            self.error(f"{rest[0]} is not known" + (f"; settings are key=value: {key}={value}" if key else ""))
        return found, rest

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; {' '.join(self.format_usage().split())}")


def meant(option: str, following: str = "") -> tuple[str, str]:
    """The key of a setting that stands as an option, as ``--epochs 3``, and its value; empty where there is none."""
    from pipetransformer.config.foreign import ours

    name, _, value = option.lstrip("-").partition("=")
    key = ours(name)
    return (key, value or (following if following and not following.startswith("-") else "VALUE")) if key else ("", "")


def count(text: str, *, least: int = 1, most: int | None = None) -> int:
    """A whole number of at least ``least``."""
    if not (text.isascii() and text.isdigit()) or int(text) < least or (most is not None and int(text) > most):
        allowed = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise argparse.ArgumentTypeError(f"{text} is not allowed; give a whole number {allowed}")
    return int(text)
