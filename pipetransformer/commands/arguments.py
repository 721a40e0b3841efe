"""Types of command-line arguments."""

from __future__ import annotations

import argparse

__all__ = ["count"]


def count(text: str) -> int:
    """A whole number of at least 1."""
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not allowed; give a whole number of at least 1")
    return int(text)
