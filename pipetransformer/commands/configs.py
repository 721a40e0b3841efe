"""List the configurations that are shipped, or print one, or all keys with their meaning."""

from __future__ import annotations

import argparse
from pathlib import Path

from pipetransformer.config.shipped import NO_FREEZE, found_config, shipped
from pipetransformer.errors import UserError

EXAMPLES = """examples:
  pipetransformer configs
  pipetransformer configs digits > mine.yaml     a copy to change
  pipetransformer configs --keys train           the keys of a section"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", nargs="?", help="print this one")
    parser.add_argument("--keys", metavar="SECTION", nargs="?", const="", help="print all keys, or those of a section")


def run(arguments: argparse.Namespace) -> None:
    if arguments.keys is not None:
        _print_keys(arguments.keys)
    elif arguments.name is not None:
        print(found_config(arguments.name).read_text(encoding="utf-8"), end="")
    else:
        files = shipped()
        width = max(map(len, files))
        print("\n".join(f"{name:{width}}  {_about(path)}" for name, path in files.items()))


def _about(path: Path) -> str:
    """The first sentence of the comment at its top."""
    lines = path.read_text(encoding="utf-8").splitlines()
    head = [line.lstrip("# ") for line in lines[: next((n for n, line in enumerate(lines) if line[:1] != "#"), 0)]]
    about = " ".join(head).partition(". ")[0].rstrip(".") or path.name
    return f"{about}; without freezing" if path.stem.endswith(NO_FREEZE) else about


def _print_keys(section: str) -> None:
    from pipetransformer.config.schema import Config
    from pipetransformer.config.words import keys_of

    keys = [each for each in keys_of(Config) if not section or each[0].partition(".")[0] == section]
    if not keys:
        raise UserError(f"--keys: {section} is no section; give one of {', '.join(Config.model_fields)}")
    width = max(len(key) for key, _ in keys)
    print("\n".join(f"{key:{width}}  {meaning}" for key, meaning in keys))
