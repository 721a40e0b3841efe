"""Scripts of a cell, in processes of their own: ranks of one thread each."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from benchmarks.support.ranks import import_path
from pipetransformer.errors import UserError

__all__ = ["launch"]


def launch(arguments: Sequence[str], *, ranks: int, name: str) -> str:
    """Runs ``python ARGUMENTS``, under torchrun where there are several ranks; returns all that was printed.

    Raises:
        UserError: beginning with ``name``, where it fails.
    """
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    variables = {**os.environ, **import_path(), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    ended = subprocess.run([*launcher, *arguments], env=variables, capture_output=True, text=True)
    if ended.returncode:
        raise UserError(f"{name} failed: {(ended.stderr or ended.stdout).strip()[-2000:]}")
    return ended.stdout + ended.stderr
