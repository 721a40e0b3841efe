"""The notebook runs from its top, in a folder of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from test_launch import ROOT

NOTEBOOK = ROOT / "docs" / "own_module.ipynb"


def cells(path: Path) -> list[str]:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4 and all(cell.get("outputs", []) == [] for cell in notebook["cells"])
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]


def test_its_cells_are_python() -> None:
    for cell in cells(NOTEBOOK):
        compile(cell, NOTEBOOK.name, "exec")


@pytest.mark.full
def test_it_runs_from_its_top(tmp_path: Path) -> None:
    (tmp_path / "cells.py").write_text("\n\n".join(cells(NOTEBOOK)), encoding="utf-8")
    done = subprocess.run([sys.executable, "cells.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "3 blocks are frozen" in done.stdout and "'accuracy'" in done.stdout
    (report,) = tmp_path.glob("runs/*/report.html")
    assert report.stat().st_size > 10_000
