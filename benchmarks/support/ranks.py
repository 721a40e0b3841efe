"""Benchmarks of several ranks: the script starts itself again under torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from pipetransformer.errors import UserError
from pipetransformer.process.world import World, close_world, init_world

__all__ = ["as_ranks", "import_path", "is_rank"]

_MARK = "PIPETRANSFORMER_BENCHMARK_RANK"
_TIMEOUT_SECONDS = 600  # of a collective


def is_rank() -> bool:
    """Whether ``as_ranks`` started this process. Raises UserError under another's torchrun, whose ranks have the user's
    own cache folder."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return False
    if _MARK not in os.environ:
        raise UserError("torchrun: a benchmark starts its ranks itself; run its script alone")
    return True


def import_path() -> dict[str, str]:
    """The variable with which another Python finds what this one does."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def as_ranks(script: str | Path, body: Callable[[World], None], *, num_ranks: int) -> None:
    """Runs ``body`` if this process is a rank, or else ``script`` with this process's own arguments on ranks of this
    machine, one thread each; exits with torchrun's status if any failed.

    Costs that jobs keep are measured now, not read from an earlier run: the ranks have an empty cache folder.
    """
    if is_rank():
        world = init_world(timeout_seconds=_TIMEOUT_SECONDS)
        torch.set_num_threads(1)
        body(world)
        close_world()
        return
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    with tempfile.TemporaryDirectory() as cache:
        own = {"OMP_NUM_THREADS": "1", "PIPETRANSFORMER_CACHE": cache, _MARK: "1"}
        environment = {**os.environ, **import_path(), **own}
        ended = subprocess.run([*command, str(script), *sys.argv[1:]], env=environment)
    if ended.returncode:
        sys.exit(ended.returncode)
