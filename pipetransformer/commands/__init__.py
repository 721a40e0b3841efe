"""Train a transformer elastically, freeze-aware; look at runs, predict with them, and ask for plans before training."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Sequence
from importlib import import_module, metadata
from pathlib import Path
from types import ModuleType

from pipetransformer.launch.arguments import Parser
from pipetransformer.launch.entry import run_guarded

__all__ = ["main"]

_COMMANDS = (
    *("train", "predict", "evaluate", "report", "sweep", "export", "configs", "doctor"),
    *("plan", "simulate", "partition", "cache", "bench", "completion"),
)
_HEAVY = ("plan", "simulate", "partition", "cache")
"""Their modules import torch: a shell would wait for seconds."""
_COMPLETES = "_ARGCOMPLETE"
_EXAMPLES = """examples:
  pipetransformer train digits                         a shipped configuration, by its name
  pipetransformer train sst2 data.path=SST-2 --ranks 2
  pipetransformer train mine.yaml train.epochs=3 run.id=first
  pipetransformer predict runs/first test.csv > predictions.csv
  pipetransformer COMMAND --help"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code: 0, 2 for a user's mistake, 1 for any other failure."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] == "train":  # its ranks are processes of their own, and end as the launcher says
        return run_train(arguments[1:])
    return run_guarded(lambda: _run(arguments))


def run_train(argv: Sequence[str]) -> int:
    from pipetransformer.commands import train

    exit_code = [0]

    def body() -> None:
        parser = Parser(prog="pipetransformer train")
        _describe(parser, train)
        exit_code[0] = train.run(parser.parse_args(argv))

    return run_guarded(body) or exit_code[0]


def _run(argv: Sequence[str]) -> None:
    """Imports the module of the command that is meant, and no other: most import torch, which takes seconds."""
    if _COMPLETES in os.environ:  # the shell asks, without arguments
        words = os.environ.get("COMP_LINE", "").split()[1:2]
        argv = [word for word in words if word not in _HEAVY]
    parser = Parser(prog="pipetransformer", description=__doc__, epilog=_EXAMPLES)
    parser.add_argument("--version", action="version", version=f"pipetransformer {metadata.version('pipetransformer')}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=Parser)
    modules, parsers = dict[str, ModuleType](), list[Parser]()
    for name in _COMMANDS:
        command = commands.add_parser(name, help=_first_line(name))
        parsers.append(command)
        if argv and argv[0] == name:
            modules[name] = module = import_module(f"pipetransformer.commands.{name}")
            _describe(command, module)
    if _COMPLETES in os.environ:
        _complete(parser, parsers)
    arguments = parser.parse_args(argv)
    arguments.call = argv
    try:
        modules[arguments.command].run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # behind ``| head``, which has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complete(parser: Parser, commands: Sequence[Parser]) -> None:
    """Tells the shell what may follow, and ends the process."""
    import argcomplete

    completers = {"config": _config_names, "overrides": _settings}
    for argument in (argument for command in commands for argument in command._actions):
        if argument.dest in completers:
            argument.completer = completers[argument.dest]  # type: ignore[attr-defined]
    argcomplete.autocomplete(parser)


def _config_names(prefix: str, **_: object) -> list[str]:
    from argcomplete.completers import FilesCompleter

    from pipetransformer.config.shipped import shipped

    return [*shipped(), *FilesCompleter(("yaml", "yml"))(prefix)]


def _settings(prefix: str, **_: object) -> list[str]:
    from pipetransformer.config.schema import Config
    from pipetransformer.config.words import keys_of

    return [f"{key}=" for key, _ in keys_of(Config)]


def _describe(parser: Parser, module: ModuleType) -> None:
    parser.description = (module.__doc__ or "").strip()
    parser.epilog = getattr(module, "EXAMPLES", None)
    module.add_arguments(parser)


def _first_line(name: str) -> str:
    """Of a module's docstring, without importing it."""
    path = Path(__file__).with_name(f"{name}.py")
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").splitlines()[0]
