"""The console command ``pipetransformer``: questions about plans, partitions and caches, answered without training."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from pipetransformer.commands import bench, cache, partition, plan, simulate
from pipetransformer.launch.arguments import Parser
from pipetransformer.launch.entry import run_guarded

__all__ = ["main"]

_COMMANDS = {"plan": plan, "simulate": simulate, "partition": partition, "cache": cache, "bench": bench}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code: 0, 2 for a user's mistake, 1 for any other failure."""
    return run_guarded(lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: Sequence[str]) -> None:
    parser = Parser(prog="pipetransformer", description=__doc__)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=Parser)
    for name, module in _COMMANDS.items():
        description = (module.__doc__ or "").splitlines()[0]
        module.add_arguments(commands.add_parser(name, help=description, description=description))
    arguments = parser.parse_args(argv)
    arguments.call = argv
    _COMMANDS[arguments.command].run(arguments)
