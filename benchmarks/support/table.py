"""A benchmark's table as three files: CSV for programs, text for people, a picture; the environment beside them."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from rich.console import Console

from pipetransformer.commands.tables import make_table
from support.measure import RESULTS, save

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
    """Prints the table and writes ``FOLDER/NAME.csv``, ``.txt``, ``.png`` and ``.json`` (rows and environment).

    Args:
        name: as in ``pipetransformer bench NAME``.
        rows: one of them a line; columns are the keys of the first row, None is shown as "-".
        notes: lines beneath the table: what a reader must know to read it right.
        draw: fills the empty figure.

    Returns the path of the text.
    """
    columns = list(rows[0])
    text = text_of(columns, rows, title=title, notes=notes)
    print(text)
    base: Path = save(name, rows, folder=folder).with_suffix("")
    with base.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
    base.with_suffix(".txt").write_text(text)
    figure = plt.figure(figsize=(10, 6), layout="constrained")
    draw(figure)
    figure.suptitle(title)
    figure.savefig(base.with_suffix(".png"), dpi=120)
    plt.close(figure)
    print(f"written to {base}.csv, .txt, .png and .json")
    return base.with_suffix(".txt")


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
