"""Entries run as their users run them, one rank a process, without the seconds that importing torch takes each time.

    def test_it_ends_well(entries: EntryServer) -> None:
        assert entries.run("image_classification", CONFIG, "run.dir=/tmp/somewhere").exit_code == 0

A server imports everything once and forks a process for each run.
"""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

__all__ = ["Ended", "EntryServer"]

_PRELOADED = ["pipetransformer.trainer", "timm", "transformers.models.bert", "sklearn.datasets", "datasets"]


@dataclass(frozen=True, slots=True)
class Ended:
    """What a run leaves in the terminal. ``err`` holds the lines on stderr."""

    exit_code: int | None
    out: str
    err: tuple[str, ...]


class EntryServer:
    """The server starts with the first run and ends with this process."""

    def __init__(self) -> None:
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOADED)

    def run(self, task: str, config: Path, *overrides: str, timeout: float = 60, cwd: Path | None = None) -> Ended:
        """``main_xx.py CONFIG [key=value ...]`` for ``task``; killed if it takes longer than ``timeout`` seconds.

        Args:
            cwd: the folder that it is started from; None: this process's.
        """
        with tempfile.TemporaryDirectory() as folder:
            out, err = Path(folder) / "out", Path(folder) / "err"
            arguments = (task, [str(config), *overrides], str(out), str(err), str(cwd or Path.cwd()))
            process = self._context.Process(target=_entry, args=arguments)
            process.start()
            process.join(timeout)
            process.kill()
            process.join()
            return Ended(process.exitcode, out.read_text(), tuple(err.read_text().splitlines()))


def _entry(task: str, arguments: list[str], out: str, err: str, cwd: str) -> None:
    for descriptor, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY), descriptor)
    os.chdir(cwd)
    import torch

    from pipetransformer.launch.entry import main

    torch.set_num_threads(1)
    exit_code = main(task, arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)  # multiprocessing's own end would add lines of its own
