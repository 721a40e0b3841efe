"""torchgpipe beside ours: one way to build it, and as many threads as our ranks have where its devices are the CPU.

Note: torchgpipe 0.0.7 has one worker thread for each distinct device, and "cpu" is one however often it is named. On
``["cpu", "cpu"]`` its partitions therefore follow one another, and only threads inside operators use a second core.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec

import torch
from torch import nn

from pipetransformer.errors import UserError

__all__ = ["build_gpipe", "require_torchgpipe", "threads"]


def require_torchgpipe() -> None:
    """Raises UserError where it is not installed."""
    if find_spec("torchgpipe") is None:
        raise UserError('torchgpipe is not installed; run pip install -e ".[bench]"')


def build_gpipe(
    layers: nn.Sequential,
    *,
    balance: Sequence[int],
    devices: Sequence[torch.device | str],
    num_microbatches: int,
    checkpoint: str = "never",
) -> nn.Module:
    """A GPipe that shares the parameters of ``layers`` and moves them to ``devices``.

    Args:
        balance: layers of each partition.
        checkpoint: "never", "except_last" (its default) or "always".
    """
    from torchgpipe import GPipe

    gpipe: nn.Module = GPipe(
        layers, balance=list(balance), devices=list(devices), chunks=num_microbatches, checkpoint=checkpoint
    )
    return gpipe


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Inside operators of this process, and of the workers that torchgpipe starts meanwhile."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
