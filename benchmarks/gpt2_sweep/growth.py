"""The bytes that a piece of work adds at its peak to those of all tensors of a process, or of its GPUs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence

import torch
from torch import nn

from pipetransformer.adapter import LiveBytes
from pipetransformer.process.device import synchronize

__all__ = ["peak_growth"]


def peak_growth(
    work: Callable[[], None], *, partitions: Sequence[nn.Module], devices: Sequence[torch.device]
) -> list[int]:
    """Runs ``work``; by device, the most bytes above what was there before.

    A GPU: what torch's allocator gave out. The CPU, which has no such count, all together: tensors that are alive, made
    by operators of this thread or, in whatever thread, of ``partitions``; not what operators use inside themselves.
    """
    gc.collect()
    if devices[0].type == "cpu":
        alive = LiveBytes()

        def begin(*_: object) -> None:  # Note: a mode belongs to a thread; this enters it in whichever runs a partition
            alive.__enter__()

        def end(*_: object) -> None:
            alive.__exit__(None, None, None)

        handles = [part.register_forward_pre_hook(begin) for part in partitions]
        handles += [part.register_forward_hook(end, always_call=True) for part in partitions]
        with alive:
            work()
        for handle in handles:
            handle.remove()
        return [alive.peak]
    for device in devices:
        synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    before = [torch.cuda.memory_allocated(device) for device in devices]
    work()
    for device in devices:
        synchronize(device)
    return [torch.cuda.max_memory_allocated(device) - least for device, least in zip(devices, before)]
