"""List or delete the activations that runs have left on disk for later runs.

They are taken by a run whose first blocks are frozen from its first step, if model, data and everything else that they
depend on are the same. They lie in the user's cache folder; $PIPETRANSFORMER_CACHE names another.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from time import localtime, strftime

from pipetransformer.cache.kept import Entry, KeptStores, stores_folder
from pipetransformer.commands.tables import make_console, make_table
from pipetransformer.errors import UserError

_DAY = 86400.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("list", "clear"), help="list them, or delete those that no run has open")
    parser.add_argument("--unused-for", type=_days, metavar="DAYS", help="clear only what no run took for so many days")


def _days(text: str) -> float:
    try:
        days = float(text)
    except ValueError:
        days = math.nan
    if not days >= 0 or math.isinf(days):
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; give a number of days, such as 7")
    return days


def run(arguments: argparse.Namespace) -> None:
    try:
        _act(KeptStores(stores_folder()), arguments)
    except OSError as error:
        raise UserError(
            f"cache: {stores_folder()}: {os.strerror(error.errno or 0)}; see who may write there"
        ) from error


def _act(stores: KeptStores, arguments: argparse.Namespace) -> None:
    """Raises OSError for a folder that cannot be read or written."""
    console = make_console()
    if arguments.action == "list":
        if arguments.unused_for is not None:
            raise UserError("--unused-for: has no effect on list; give it to clear")
        entries = stores.entries()
        if entries:
            console.print(make_table(_TITLES, map(_row, entries), left=("model", "data", "samples")))
        console.print(f"{_counted(entries)} in {stores_folder()}")
        return
    deleted, in_use = stores.clear(unused_for=_DAY * (arguments.unused_for or 0.0))
    console.print(f"deleted {_counted(deleted)}" + (f"; a run has {_counted(in_use)} open" if in_use else ""))


_TITLES = ("model", "data", "blocks", "samples", "MB", "last used", "open")


def _row(entry: Entry) -> Sequence[str]:
    about = entry.about
    samples = about.get("samples", {})
    return (
        str(about.get("model", "?")),
        str(about.get("data", "?")),
        str(about.get("boundary", "?")),
        ", ".join(f"{count} {split}" for split, count in samples.items()) if isinstance(samples, dict) else "?",
        f"{entry.num_bytes / 1e6:.1f}",
        strftime("%Y-%m-%d %H:%M", localtime(entry.used)),
        "yes" if entry.in_use else "",
    )


def _counted(entries: Sequence[Entry]) -> str:
    name = "entry" if len(entries) == 1 else "entries"
    return f"{len(entries)} {name} of {sum(entry.num_bytes for entry in entries) / 1e6:.1f} MB"
