"""Write report.html of a run, or one page that compares several."""

from __future__ import annotations

import argparse
from pathlib import Path

from pipetransformer.run.page import read_history, write_report

EXAMPLES = """examples:
  pipetransformer report runs/1000                       runs/1000/report.html
  pipetransformer report runs/1000 runs/1001             comparison.html, here
  pipetransformer report runs/* --output all.html"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", metavar="RUN", type=Path, nargs="+", help="folders of runs")
    parser.add_argument("--output", type=Path, metavar="FILE", help="where to write; the run's folder if not given")


def run(arguments: argparse.Namespace) -> None:
    found = [read_history(path.expanduser()) for path in arguments.runs]
    usual = found[0].folder / "report.html" if len(found) == 1 else Path("comparison.html")
    path = arguments.output or usual
    write_report(found, path)
    print(path)
