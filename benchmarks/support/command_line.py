"""The benchmarks' command lines: a parser whose help is the script's docstring, and the place of results."""

from __future__ import annotations

import argparse
import math
from functools import partial
from pathlib import Path
from time import monotonic

from benchmarks.support.measure import RESULTS, started_at
from pipetransformer.errors import UserError, check_folder
from pipetransformer.launch.arguments import Parser, count

__all__ = ["add_minutes", "add_output", "bench_parser", "deadline", "keep_whole", "refuse_without_effect"]


def bench_parser(name: str, *, description: str | None) -> Parser:
    """Args: name: as in ``pipetransformer bench NAME``."""
    started_at()  # now: a later commit is not the code that runs
    formatter, plain = argparse.RawDescriptionHelpFormatter, (description or "").replace("``", "")
    return Parser(description=plain, prog=f"pipetransformer bench {name}", formatter_class=formatter)


def add_minutes(parser: Parser, *, what: str) -> None:
    """The argument ``--minutes``, for ``deadline``. Args: what: what is kept when it ends, as "run"."""
    of_time = f"begin no {what} after so long (0: none, but tell what is kept)"
    parser.add_argument("--minutes", type=partial(count, least=0), default=None, help=of_time)


def deadline(arguments: argparse.Namespace) -> float:
    """The ``monotonic`` second that ``--minutes`` ends at; infinity without it."""
    return math.inf if arguments.minutes is None else monotonic() + 60 * arguments.minutes


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


def keep_whole(parser: Parser, arguments: argparse.Namespace, *picks: str) -> None:
    """Refuses to replace a committed table by a part of it.

    Args:
        picks: names of the arguments that pick rows.

    Raises:
        UserError: if one of them is given, and no folder for what it picks.
    """
    given = [f"--{name}" for name in picks if getattr(arguments, name) != parser.get_default(name)]
    if given and arguments.output.resolve() == RESULTS.resolve():
        raise UserError(f"--output: {', '.join(given)} would replace the whole table by a part; give a folder for it")


def refuse_without_effect(parser: Parser, arguments: argparse.Namespace, *names: str, where: str) -> None:
    """Raises UserError if one of these arguments is given, which nothing reads ``where``."""
    for name in names:
        if getattr(arguments, name) != parser.get_default(name):
            raise UserError(f"--{name.replace('_', '-')}: it has no effect with {where}; leave it out")


def _writable_folder(text: str) -> Path:
    """Raises UserError."""
    folder = Path(text)
    check_folder(folder, key="--output")
    return folder
