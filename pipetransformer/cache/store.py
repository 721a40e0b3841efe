"""The activation store: one ragged, memory-mapped array in shared host memory, with one slot per sample.

    rows    [sum of tokens + 1, width]   sample i owns rows[offsets[i] : offsets[i + 1]]; the last row is always zero
    stamps  [num_samples] uint8          the boundary (in blocks) of the activations in a slot; 0 for an empty slot

A slot is read only if its stamp is the wanted boundary. Every other slot (half-written, old, empty) is a miss.

An advance from boundary a to b overwrites the slots in place. The rank that read a slot also writes it: first stamp 0,
then the rows, then stamp b. So one store serves all boundaries, one after the other, with the memory of one.

The memory has no name (``memfd``): the kernel frees it with the end of its last rank, also after a crash. The other
ranks of the node open it through the descriptor of the rank that reserved it.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pipetransformer.errors import UserError


@dataclass(frozen=True, slots=True)
class StoreLayout:
    """The sizes and places of everything in a store.

    Attributes:
        num_tokens: number of rows of each slot [slots].
        width: numbers in a row.
        dtype: type of the stored numbers.
        positions: number of positions of every slot, where all have the same (images); None for texts, which are
            padded to a length at each read.
        slots: slot of each sample [num_samples], -1 for a sample of another node; None where sample i has slot i.
    """

    num_tokens: np.ndarray
    width: int
    dtype: torch.dtype
    positions: int | None = None
    slots: np.ndarray | None = None

    @property
    def num_rows(self) -> int:
        """Number of rows of all slots, without the zero row."""
        return int(self.num_tokens.sum())

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.width * self.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole store: rows, the zero row, stamps."""
        return (self.num_rows + 1) * self.row_bytes + len(self.num_tokens)


class ActivationStore:
    """One rank's view of its node's store, made with ``reserve`` on one rank and with ``open`` on the others.

    Args:
        descriptor: open file descriptor of the memory; the store owns it.
    """

    def __init__(self, descriptor: int, layout: StoreLayout) -> None:
        self.layout = layout
        self.descriptor = descriptor
        memory = mmap.mmap(descriptor, layout.num_bytes)
        num_values = (layout.num_rows + 1) * layout.width
        self._rows = torch.frombuffer(memory, dtype=layout.dtype, count=num_values).view(-1, layout.width)
        stamps = num_values * layout.dtype.itemsize
        self._stamps = torch.empty(0, dtype=torch.uint8)  # for a node without samples of the split
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
        """Takes the whole memory at once, filled with zeros.

        Raises:
            OSError: if the machine has too little memory. A sparse file would end the job with SIGBUS at a later write.
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
        """Maps the store that another rank of this node has reserved.

        Args:
            address: the ``address`` of that rank's store.

        Raises:
            OSError: if the store cannot be opened or mapped.
        """
        return cls(os.open(address, os.O_RDWR | os.O_CLOEXEC), layout)

    @property
    def address(self) -> str:
        """Path of the store for other processes of this node, valid while this rank keeps it open."""
        return f"/proc/{os.getpid()}/fd/{self.descriptor}"

    def holds(self, ids: np.ndarray, boundary: int) -> np.ndarray:
        """Whether each sample can be read at ``boundary`` (in blocks, above 0), bool [len(ids)]."""
        assert boundary > 0, "stamp 0 is that of an empty slot"
        slots, is_here = self._slots(ids), np.zeros(len(ids), dtype=bool)
        own = (slots >= 0).numpy()
        is_here[own] = (self._stamps[slots[own]] == boundary).numpy()
        return is_here

    def clear(self) -> None:
        """Empties all slots, for activations that no longer match the weights."""
        self._stamps.zero_()

    def read(self, ids: np.ndarray, *, positions: int, out: Tensor | None = None) -> Tensor:
        """Gathers the first positions of samples into [len(ids), positions, width], in the store's type.

        Positions behind the tokens of a text are zero.

        Args:
            ids: numbers of the samples [rows]; all must be in the store.
            positions: the number of positions: a text's padded length, an image's own, or 1 where one row is stored.
            out: a buffer of the result's shape and type, to be filled; None for a new one.
        """
        index, width = self._slots(ids), self.layout.width
        out = torch.empty((len(ids), positions, width), dtype=self.layout.dtype) if out is None else out
        if positions == self.layout.positions:
            torch.index_select(self._whole_slots(), 0, index, out=out.view(len(ids), positions * width))
        else:
            torch.index_select(self._rows, 0, self._row_index(index, positions).view(-1), out=out.view(-1, width))
        return out

    def write(self, ids: np.ndarray, hidden: Tensor, *, boundary: int) -> None:
        """Stores activations of samples at ``boundary``.

        Args:
            ids: numbers of the samples [rows], each at most once.
            hidden: activations [rows, positions, width].
            boundary: the boundary of the activations, in blocks.

        Raises:
            UserError: if the store has the type float16 and a value is too large for it.
        """
        index = self._slots(ids)
        self._stamps[index] = 0
        values = hidden.to(device="cpu", dtype=self.layout.dtype)
        if self.layout.positions == hidden.shape[1]:
            self._whole_slots().index_copy_(0, index, values.reshape(len(ids), -1))
        else:
            rows = self._row_index(index, hidden.shape[1])
            real = rows < self.layout.num_rows
            values = values[real]
            self._rows.index_copy_(0, rows[real], values)
        if self.layout.dtype == torch.float16 and not values.isfinite().all():
            raise UserError("cache.dtype: float16 cannot hold this model's activations; give bfloat16 or compute")
        self._stamps[index] = boundary

    def _whole_slots(self) -> Tensor:
        """Slots of one size each [slots, positions x width]."""
        assert self.layout.positions is not None
        return self._rows[:-1].view(-1, self.layout.positions * self.layout.width)

    def _row_index(self, index: Tensor, length: int) -> Tensor:
        """The row of every position [len(index), length]; the zero row for padding."""
        position = torch.arange(length)
        rows = self._starts[index].unsqueeze(1) + position
        return torch.where(position < self._tokens[index].unsqueeze(1), rows, self.layout.num_rows)

    def close(self) -> None:
        """Closes the descriptor and the mapping of this rank. May be called twice."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
            del self._rows, self._stamps
