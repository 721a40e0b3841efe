"""The bytes that live in tensors."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

# Note: the only base class of a mode that sees every operation, and the way through nested values; both private.
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts, as a context, the bytes of tensors that are made inside it, each storage once.

    Note: torch keeps a storage's Python object for as long as anything in C++ holds the storage, so that one which
    autograd alone keeps counts too. What a kernel takes for itself while it runs is not seen: none, by torch's own
    profiler, in the transformers' operations on a CPU.

    Attributes:
        alive: bytes now.
        peak: the most since it was last set.

    Args:
        counts_meta: whether tensors of the meta device, which have no data, count as if they had.
    """

    def __init__(self, *, counts_meta: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive = self.peak = 0
        self._counts_meta = counts_meta
        self._known: dict[int, int] = {}  # bytes of each storage

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {part.untyped_storage()._cdata for part in _parts((args, kwargs))}
        for part in _parts(result):
            if self._counts_meta or not part.is_meta:
                storage = part.untyped_storage()
                if storage._cdata not in given:
                    self._count(storage)
        return result

    def __enter__(self) -> LiveBytes:
        super().__enter__()  # type: ignore[no-untyped-call]
        _watching.append(self)
        return self

    def __exit__(self, *raised: Any) -> None:
        _watching.remove(self)
        super().__exit__(*raised)  # type: ignore[no-untyped-call]

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known[key] = num_bytes
        self._made(key, num_bytes)
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self._freed(key, self._known.pop(key))

    def _made(self, key: int, num_bytes: int) -> None:
        self.alive += num_bytes
        self.peak = max(self.peak, self.alive)

    def _freed(self, key: int, num_bytes: int) -> None:
        self.alive -= num_bytes

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Takes note of a storage that has other memory now."""
        key, num_bytes = storage._cdata, storage.nbytes()
        if key in self._known:
            self._freed(key, self._known[key])
            self._known[key] = num_bytes
            self._made(key, num_bytes)


# Note: a storage's size changes without any operation that a mode could see, so that counters are told here. The list
# is empty but for tests and measurements.
_watching: list[LiveBytes] = []


def _parts(tree: object) -> Iterator[Tensor]:
    """The tensors with memory of their own among the leaves: of a sparse one, its indices and values."""
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor):
            yield from (leaf._indices(), leaf._values()) if leaf.is_sparse else (leaf,)


def give_memory(tensor: Tensor, *, is_wanted: bool) -> None:
    """Gives a tensor of its own storage, and all that view it, memory, uninitialised, or takes it away.

    Note: no operation of torch does this; what a graph has saved of the tensor sees the new memory too.
    """
    storage = tensor.untyped_storage()
    storage.resize_(tensor.nbytes if is_wanted else 0)
    for live in _watching:
        live.resized(storage)
