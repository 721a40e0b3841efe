"""Reads ahead of the step: a thread gathers the next batches from the store into reused buffers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from pipetransformer.cache.codec import decode
from pipetransformer.cache.device_tier import DeviceTier
from pipetransformer.cache.store import ActivationStore

Item = TypeVar("Item")
Fetched = TypeVar("Fetched")
_DEPTH = 2


class BatchReader:
    """Gathers batches at one boundary. Each shape has a few buffers, used in turn.

    A batch stays valid until ``_DEPTH + 1`` further batches of its shape are read. That is longer than its step takes.

    Args:
        boundary: the boundary to read at, in blocks.
        device: the device of the step.
        dtype: the type of the step's computation.
        tier: holds a part of the store on the device; None for no such part.
    """

    def __init__(
        self,
        store: ActivationStore,
        *,
        boundary: int,
        device: torch.device,
        dtype: torch.dtype,
        tier: DeviceTier | None = None,
    ) -> None:
        self._store = store
        self._tier = tier
        self._boundary = boundary
        self._device = device
        self._dtype = dtype
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._buffers: dict[tuple[int, int], deque[Tensor]] = {}

    def read(self, ids: np.ndarray, *, positions: int) -> Tensor | None:
        """Activations [len(ids), positions, width] on the step's device, in the step's type.

        Returns None if the store lacks any of the samples.

        Args:
            ids: numbers of the samples [rows].
            positions: the number of positions to read (``ActivationStore.read``).
        """
        if not self._store.holds(ids, self._boundary).all():
            return None
        if self._stream is None:
            return decode(self._stored(ids, positions), self._dtype)
        with torch.cuda.stream(self._stream):
            moved = decode(self._stored(ids, positions), self._dtype)
        # The buffer may be filled again only after its copy. This thread waits for that; the step does not.
        self._stream.synchronize()
        moved.record_stream(torch.cuda.default_stream(self._device))
        return moved

    def _stored(self, ids: np.ndarray, positions: int) -> Tensor:
        """The samples in their stored form, on the device."""
        if self._tier is None:
            return self._from_host(ids, positions, rows=len(ids))
        held, is_held = self._tier.read(ids, positions=positions)
        if is_held.all():
            return held
        rest = self._from_host(ids[~is_held], positions, rows=len(ids))
        if not is_held.any():
            return rest
        order = np.where(is_held, np.cumsum(is_held) - 1, len(held) + np.cumsum(~is_held) - 1)
        return torch.cat([held, rest]).index_select(0, torch.from_numpy(order).to(self._device))

    def _from_host(self, ids: np.ndarray, positions: int, *, rows: int) -> Tensor:
        """Samples of a batch of so many rows."""
        buffer = self._store.read(ids, positions=positions, out=self._buffer(rows, positions)[: len(ids)])
        return buffer if self._stream is None else buffer.to(self._device, non_blocking=True)

    def _buffer(self, rows: int, positions: int) -> Tensor:
        ring = self._buffers.get((rows, positions))
        if ring is None:
            layout = self._store.layout
            shape = (rows, positions, layout.stored_width)
            pinned = self._device.type == "cuda"
            ring = deque(torch.empty(shape, dtype=layout.dtype, pin_memory=pinned) for _ in range(_DEPTH + 2))
            self._buffers[rows, positions] = ring
        ring.rotate(1)
        return ring[0]


def read_ahead(items: Sequence[Item], fetch: Callable[[Item], Fetched]) -> Generator[Fetched, None, None]:
    """Yields ``fetch(item)`` for each item, in order.

    One thread fetches a few items ahead. It ends with the iterator.
    """
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="cache-reader") as thread:
        pending: deque[Future[Fetched]] = deque()
        remaining = iter(items)
        try:
            for item in remaining:
                pending.append(thread.submit(fetch, item))
                if len(pending) > _DEPTH:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()
