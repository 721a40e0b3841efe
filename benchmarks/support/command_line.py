"""The benchmarks' command lines: a parser whose help is the script's docstring, and the place of results."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.support.measure import RESULTS, started_at
from pipetransformer.errors import check_folder
from pipetransformer.launch.arguments import Parser

__all__ = ["add_output", "bench_parser"]


def bench_parser(name: str, *, description: str | None) -> Parser:
    """Args: name: as in ``pipetransformer bench NAME``."""
    started_at()  # now: a later commit is not the code that runs
    formatter = argparse.RawDescriptionHelpFormatter
    return Parser(description=description, prog=f"pipetransformer bench {name}", formatter_class=formatter)


def add_output(parser: Parser) -> None:
    """The argument ``--output``, a folder that is made when the line is read: nothing is measured for one that cannot
    be written."""
    parser.add_argument(
        "--output",
        type=_writable_folder,
        default=str(RESULTS),
        metavar="FOLDER",
        help="folder of the results (default benchmarks/results)",
    )


def _writable_folder(text: str) -> Path:
    """Raises UserError."""
    folder = Path(text)
    check_folder(folder, key="--output")
    return folder
