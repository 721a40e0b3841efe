"""Tables on the terminal, and in files and pipes as wide as they need to be."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

_FILE_WIDTH = 160


def make_console() -> Console:
    """A console as wide as the terminal; a file has room for whole tables."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else _FILE_WIDTH)


def make_table(titles: Sequence[str], rows: Iterable[Sequence[str]], *, left: Iterable[str] = ()) -> Table:
    """A table with numbers to the right and the columns ``left`` to the left; those may wrap."""
    texts = set(left)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for title in titles:
        table.add_column(title, justify="left" if title in texts else "right", no_wrap=title not in texts)
    for row in rows:
        table.add_row(*row)
    return table
