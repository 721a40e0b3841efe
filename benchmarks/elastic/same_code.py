"""Code by which cells learn the same: runs of one count for the other.

A change of the package that no cell goes through must not make hours of cells missing. ``--confirm`` measures cells
again that older code has measured; where each learns the same, to the bit, that code counts as today's for their rows
from then on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.elastic.cells import CODE, Cell, Figures, code_digest
from benchmarks.support.kept import KeptRows
from pipetransformer.errors import UserError

__all__ = ["confirm", "same_codes"]

_NAME = "elastic-same-code.json"


def same_codes(folder: Path, row: str, *, task: str) -> frozenset[str]:
    """Digests of the code that counts as today's for a task's cells of a row, its own among them, by what is noted in
    ``folder`` of that task and row: another one may go through what changed.
    """
    path, found = folder / _NAME, set(map(code_digest, CODE))
    notes = json.loads(path.read_text(encoding="ascii"))["rows"] if path.is_file() else []
    for note in reversed(notes):  # the last one was noted by the latest code
        if note["newer"] in found and note["task"] == task and row in note["rows"]:
            found.add(note["older"])
    return frozenset(found)


def confirm(cells: Sequence[Cell], *, kept: KeptRows, folder: Path) -> None:
    """Measures each cell that older code has measured on this processor, and notes that this code counts as today's for
    their rows.

    Raises:
        UserError: there is no such cell, they are of different code, one is another's (ours, or a peer's), or one
            learns something else today.
    """
    task = cells[0].task.name
    known = {cell.row.name: same_codes(folder, cell.row.name, task=task) for cell in cells}
    older = [
        (cell, figures, code)
        for cell in cells
        for figures, code in cell.of_any_code(kept)
        if code not in known[cell.row.name]
    ]
    codes, newer = {code for _, _, code in older}, {cell.code for cell, _, _ in older}
    if len(codes) != 1 or len(newer) != 1:
        found = f"cells of {len(codes)} older codes, to be measured by {len(newer)}"
        raise UserError(f"--confirm: {found}; name --rows and --seeds of one, and no peer beside others")
    for cell, before, _ in older:
        today = cell.run()
        if today.cpu != before.cpu or today.start != before.start:
            raise UserError(f"--confirm: {cell.name} was measured on {before.cpu}; only the same processor can tell")
        if _learned(today) != _learned(before):
            remedy = "run it alone, as load can change the layout that it chooses, or measure all cells anew"
            raise UserError(f"--confirm: {cell.name} learns otherwise today; {remedy}")
        print(f"{cell.name}: the same; {today.train_s:.1f} s, {before.train_s:.1f} s before", flush=True)
    (code,), (by_today,) = codes, newer
    names, rows = [cell.name for cell, _, _ in older], sorted({cell.row.name for cell, _, _ in older})
    note: Mapping[str, object] = {"task": task, "rows": rows, "older": code, "newer": by_today, "cells": names}
    told = f"{task}, {', '.join(rows)}"
    KeptRows(folder / _NAME).keep(f"{told}: {code} counts as {by_today}", f"{told} {code} {by_today}", note)


def _learned(figures: Figures) -> object:
    return [metric for _, metric in figures.curve], figures.loss, figures.plans
