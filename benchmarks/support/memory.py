"""What a piece of work adds at its peak to the bytes of all tensors of a process, or of its GPUs."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipetransformer.distributed import synchronize

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
        held = {p.untyped_storage()._cdata for part in partitions for p in part.parameters()}
        alive = _Alive(held)
        handles = [part.register_forward_pre_hook(alive.begin) for part in partitions]
        handles += [part.register_forward_hook(alive.end, always_call=True) for part in partitions]
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


class _Alive(TorchDispatchMode):
    """Counts storages from the operator that made them to their end.

    Note: a mode belongs to a thread; hooks enter it in whichever runs a partition. A storage's Python object lives as
    long as the storage, so that a weak reference tells of its end.

    Args:
        held: storages that do not count.
    """

    def __init__(self, held: set[int]) -> None:
        super().__init__()
        self._held = held
        self._bytes: dict[int, int] = {}
        self._now = 0
        self.peak = 0

    def begin(self, *_: object) -> None:
        self.__enter__()

    def end(self, *_: object) -> None:
        self.__exit__(None, None, None)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                self._see(tensor.untyped_storage())
        return made

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._held or key in self._bytes:
            return
        self._bytes[key] = storage.nbytes()
        self._now += storage.nbytes()
        self.peak = max(self.peak, self._now)
        weakref.finalize(storage, self._forget, key).atexit = False

    def _forget(self, key: int) -> None:
        self._now -= self._bytes.pop(key)
