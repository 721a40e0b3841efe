"""Scripts of a cell, in processes of their own: ranks of one thread each."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from benchmarks.support.ranks import import_path
from pipetransformer.errors import UserError

__all__ = ["launch"]


def launch(
    arguments: Sequence[str], *, ranks: int, name: str, variables: Mapping[str, str] = MappingProxyType({})
) -> str:
    """Runs ``python ARGUMENTS``, under torchrun where there are several ranks; returns all that was printed.

    Args:
        variables: of the environment, beside those that are there.

    Raises:
        UserError: beginning with ``name``, where it fails.
    """
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    own = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    whole = {**os.environ, **import_path(), **own, **variables}
    ended = subprocess.run([*launcher, *arguments], env=whole, capture_output=True, text=True)
    if ended.returncode:
        raise UserError(f"{name} failed: {(ended.stderr or ended.stdout).strip()[-2000:]}")
    return ended.stdout + ended.stderr
