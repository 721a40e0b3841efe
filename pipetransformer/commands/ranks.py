"""Ranks of this machine that measure for a command."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from pipetransformer.commands import rank_scripts
from pipetransformer.errors import UserError
from pipetransformer.launch.node import free_port, prepare_ranks
from pipetransformer.pipe.planner.costs import Link
from pipetransformer.process import failure

Result = TypeVar("Result")
_FOLDER = Path(rank_scripts.__file__).parent
_STOP_SECONDS = 5


def local_ranks() -> int:
    """The devices of this machine: its GPUs, or else a rank for each of at most two cores."""
    import torch

    return torch.cuda.device_count() or min(2, os.cpu_count() or 1)


def run_script(name: str, arguments: Sequence[str], *, num_ranks: int, read: Callable[[Path], Result]) -> Result:
    """The RESULT of rank 0 of ``rank_scripts/NAME.py RESULT ARGUMENTS``. Raises UserError if a rank fails."""
    from pipetransformer.adapter import Rendezvous, run_ranks  # imports torch

    prepare_ranks(num_ranks)
    with tempfile.TemporaryDirectory(prefix="pipetransformer_") as folder:
        path = Path(folder) / "result.json"
        ends = run_ranks(
            _FOLDER / f"{name}.py",
            [str(path), *arguments],
            num_ranks=num_ranks,
            rendezvous=Rendezvous.on_loopback(free_port()),
            stop_seconds=_STOP_SECONDS,
            saving_seconds=_STOP_SECONDS,
        )
        if ends:
            raise UserError(failure.first_cause(ends).line)
        return read(path)


def measure_link() -> Link:
    """The link between two ranks of this machine: GPUs, or processes over loopback with fewer. Raises UserError."""
    import torch

    device = "cuda" if torch.cuda.device_count() > 1 else "cpu"
    return run_script("measure_link", [device], num_ranks=2, read=lambda path: Link(**json.loads(path.read_text())))
