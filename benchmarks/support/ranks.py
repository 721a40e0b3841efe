"""Benchmarks of several ranks: the script starts itself again under torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

__all__ = ["is_rank", "launch", "slowest"]


def is_rank() -> bool:
    """Whether this process is one that ``launch`` started."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def launch(script: str | Path, *, num_ranks: int, num_threads: int = 1) -> None:
    """Runs ``script`` with this process's own arguments on ranks of this machine; exits with torchrun's status if any
    failed.

    Costs that jobs keep are measured now, not read from an earlier run: the ranks have an empty cache folder.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "OMP_NUM_THREADS": str(num_threads), "PIPETRANSFORMER_CACHE": cache}
        ended = subprocess.run([*command, str(script), *sys.argv[1:]], env=environment)
    if ended.returncode:
        sys.exit(ended.returncode)


def slowest(seconds: float) -> float:
    """The most that any rank took; collective."""
    figure = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(figure, op=dist.ReduceOp.MAX)
    return float(figure)
