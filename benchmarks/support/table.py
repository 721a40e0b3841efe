"""A benchmark's table: printed for people, kept as JSON with the environment beside it, and drawn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from rich.console import Console

from benchmarks.support.measure import RESULTS, save
from pipetransformer.commands.tables import make_table

__all__ = ["Row", "write_table"]

Row = Mapping[str, str | int | float | None]


def write_table(
    name: str,
    rows: Sequence[Row],
    *,
    title: str,
    notes: Sequence[str] = (),
    draw: Callable[[Figure], None],
    folder: Path = RESULTS,
) -> Path:
    """Prints the table and writes ``FOLDER/NAME.json`` (title, environment, rows, notes) and ``.png``.

    Args:
        name: as in ``pipetransformer bench NAME``.
        rows: one of them a line; columns are the keys of the first row, None is shown as "-".
        notes: lines beneath the table: what a reader must know to read it right.
        draw: fills the empty figure.

    Returns the path of the JSON.
    """
    print(text_of(list(rows[0]), rows, title=title, notes=notes))
    path: Path = save(name, rows, title=title, notes=notes, folder=folder)
    figure = plt.figure(figsize=(10, 6), layout="constrained")
    draw(figure)
    figure.suptitle(title)
    figure.savefig(path.with_suffix(".png"), dpi=120)
    plt.close(figure)
    print(f"written to {path} and .png")
    return path


def text_of(columns: Sequence[str], rows: Sequence[Row], *, title: str, notes: Sequence[str]) -> str:
    left = [column for column in columns if any(isinstance(row[column], str) for row in rows)]
    table = make_table(columns, [[_cell(row[column]) for column in columns] for row in rows], left=left)
    console = Console(highlight=False, width=400, record=True, file=None, quiet=False)
    with console.capture() as captured:
        console.print(table)
    body = "\n".join(line.rstrip() for line in captured.get().splitlines())
    return "\n".join([title, "", body, *(["", *notes] if notes else [])]) + "\n"


def _cell(value: str | int | float | None) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else value
