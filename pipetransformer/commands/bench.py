"""Run one of the project's benchmarks; they lie in benchmarks/ of the source, and write to benchmarks/results/.

Note: they are not installed. Their ``import benchmarks`` finds them because the source is in front of their path.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from pathlib import Path

from pipetransformer.errors import UserError

_FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--stale", action="store_true", help="list the results whose code has changed since")
    parser.add_argument("name", metavar="NAME", help="one of them; without it, their list", nargs="?")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its own arguments; --help shows them")


def run(arguments: argparse.Namespace) -> None:
    scripts = {path.parent.name.replace("_", "-"): path for path in sorted(_FOLDER.glob("*/__main__.py"))}
    if not scripts:
        raise UserError("bench: the benchmarks are not installed with the package; run it from a clone of the project")
    if arguments.stale:
        if arguments.name is not None:
            raise UserError(f"bench --stale: it lists all results; leave {arguments.name} out")
        _start(_FOLDER / "support" / "stale.py")
        return
    if arguments.name is None:
        width = max(map(len, scripts))
        print("\n".join(f"{name:{width}}  {_summary(path)}" for name, path in scripts.items()))
        return
    if arguments.name not in scripts:
        near = difflib.get_close_matches(arguments.name, scripts, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(f"bench: {arguments.name!r} is not a benchmark{hint} (known: {', '.join(scripts)})")
    _start(scripts[arguments.name], *arguments.arguments)


def _start(script: Path, *arguments: str) -> None:
    """Becomes the script, so that a signal that ends the command ends the benchmark. Does not return."""
    path = os.pathsep.join(filter(None, [str(_FOLDER.parent), os.environ.get("PYTHONPATH")]))
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, str(script), *arguments], {**os.environ, "PYTHONPATH": path})


def _summary(script: Path) -> str:
    """First line of its docstring."""
    return script.read_text().partition('"""')[2].partition("\n")[0]
