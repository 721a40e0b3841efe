"""The activation store: one ragged, memory-mapped array in shared host memory, one slot a sample.

    rows    [sum of tokens + 1, width]   sample i owns rows[offsets[i] : offsets[i + 1]]; the last row stays zero
    stamps  [num_samples] uint8          the boundary (in blocks) whose activations a slot holds; 0 for none

A slot is read only where its stamp is the wanted boundary: torn, stale and foreign entries are misses. An advance from
boundary a to b overwrites in place, each slot by the one rank that read it: stamp 0, rows, stamp b. So one store serves
every boundary in turn and the memory is that of one.

The memory has no name (``memfd``): it ends with its last rank, however that dies. Neighbours on the node open it
through the leader's descriptor.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pipetransformer.errors import UserError

__all__ = ["ActivationStore", "StoreLayout"]


@dataclass(frozen=True, slots=True)
class StoreLayout:
    """Where everything lies.

    Attributes:
        num_tokens: rows of each sample that has a slot [slots]. width: numbers a row. dtype: as stored.
        slots: slot of each sample [num_samples], -1 for a sample of another node; None where slots are the samples.
        positions: what every sample is read at, where they are all alike (images); None for each text's padded length.
    """

    num_tokens: np.ndarray
    width: int
    dtype: torch.dtype
    positions: int | None = None
    slots: np.ndarray | None = None

    @property
    def num_rows(self) -> int:
        return int(self.num_tokens.sum())

    @property
    def row_bytes(self) -> int:
        return self.width * self.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        """Bytes to reserve: rows, the zero row, stamps."""
        return (self.num_rows + 1) * self.row_bytes + len(self.num_tokens)


class ActivationStore:
    """A node's store as one rank sees it. Make it with ``reserve`` on one rank, ``open`` on the others."""

    def __init__(self, descriptor: int, layout: StoreLayout) -> None:
        self.layout = layout
        self.descriptor = descriptor
        memory = mmap.mmap(descriptor, layout.num_bytes)
        num_values = (layout.num_rows + 1) * layout.width
        self._rows = torch.frombuffer(memory, dtype=layout.dtype, count=num_values).view(-1, layout.width)
        stamps = num_values * layout.dtype.itemsize
        self._stamps = torch.empty(0, dtype=torch.uint8)  # on a node that has no sample of the split
        if len(layout.num_tokens):
            self._stamps = torch.frombuffer(memory, dtype=torch.uint8, offset=stamps)
        tokens = torch.from_numpy(layout.num_tokens.astype(np.int64))
        self._starts = torch.cumsum(tokens, dim=0) - tokens
        self._tokens = tokens
        self._slot_of = None if layout.slots is None else torch.from_numpy(layout.slots)

    def _slots(self, ids: np.ndarray) -> Tensor:
        index = torch.from_numpy(ids)
        return index if self._slot_of is None else self._slot_of[index]

    @classmethod
    def reserve(cls, layout: StoreLayout) -> ActivationStore:
        """Takes the whole space now, zeroed.

        Raises:
            OSError: if the machine does not have it. (A sparse file would end the job with SIGBUS at some later write.)
        """
        descriptor = os.memfd_create("pipetransformer-cache", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(descriptor, 0, layout.num_bytes)
            return cls(descriptor, layout)
        except OSError:
            os.close(descriptor)
            raise

    @classmethod
    def open(cls, address: str, layout: StoreLayout) -> ActivationStore:
        """Maps the store that a neighbour on this node reserved; ``address`` is its ``address``. Raises OSError."""
        return cls(os.open(address, os.O_RDWR | os.O_CLOEXEC), layout)

    @property
    def address(self) -> str:
        """Where processes of this node find the store while this rank lives."""
        return f"/proc/{os.getpid()}/fd/{self.descriptor}"

    def holds(self, ids: np.ndarray, boundary: int) -> np.ndarray:
        """Which of the samples can be read at ``boundary``, bool [len(ids)]."""
        assert boundary > 0, "stamp 0 is that of an empty slot"
        slots, is_here = self._slots(ids), np.zeros(len(ids), dtype=bool)
        own = (slots >= 0).numpy()
        is_here[own] = (self._stamps[slots[own]] == boundary).numpy()
        return is_here

    def clear(self) -> None:
        """Forgets everything: what the slots hold no longer belongs to the weights."""
        self._stamps.zero_()

    def read(self, ids: np.ndarray, *, length: int, out: Tensor | None = None) -> Tensor:
        """Gathers samples into [len(ids), positions, width]; positions behind a text's tokens are zero.

        Args:
            length: padded length of the samples (means nothing where the layout fixes the positions).
            out: a reused buffer of that shape and the store's type.
        """
        index = self._slots(ids)
        positions, width = self.layout.positions or length, self.layout.width
        out = torch.empty((len(ids), positions, width), dtype=self.layout.dtype) if out is None else out
        if self.layout.positions is not None:
            slots = self._rows[:-1].view(-1, positions * width)
            torch.index_select(slots, 0, index, out=out.view(len(ids), positions * width))
        else:
            torch.index_select(self._rows, 0, self._row_index(index, length).view(-1), out=out.view(-1, width))
        return out

    def write(self, ids: np.ndarray, hidden: Tensor, *, boundary: int) -> None:
        """Stores ``hidden`` [len(ids), positions, width] of distinct samples at ``boundary``."""
        index = self._slots(ids)
        self._stamps[index] = 0
        rows = self._row_index(index, hidden.shape[1])
        real = rows < self.layout.num_rows
        values = hidden.to(device="cpu", dtype=self.layout.dtype)[real]
        if self.layout.dtype == torch.float16 and not values.isfinite().all():
            raise UserError("cache.dtype: float16 cannot hold this model's activations; give bfloat16 or compute")
        self._rows[rows[real]] = values
        self._stamps[index] = boundary

    def _row_index(self, index: Tensor, length: int) -> Tensor:
        """Row of every position [len(index), length]; the zero row for padding."""
        position = torch.arange(length)
        rows = self._starts[index].unsqueeze(1) + position
        return torch.where(position < self._tokens[index].unsqueeze(1), rows, self.layout.num_rows)

    def close(self) -> None:
        """Gives this rank's descriptor and mapping back."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
            del self._rows, self._stamps
