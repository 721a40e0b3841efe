"""What the command lines share: a mistake is one line that names the argument and the usage."""

from __future__ import annotations

import argparse
from typing import NoReturn

from pipetransformer.errors import UserError

__all__ = ["Parser", "count"]


class Parser(argparse.ArgumentParser):
    """Raises UserError where argparse would print and exit."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; {' '.join(self.format_usage().split())}")


def count(text: str) -> int:
    """A whole number of at least 1."""
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not allowed; give a whole number of at least 1")
    return int(text)
