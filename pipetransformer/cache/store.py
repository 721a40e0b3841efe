"""The activation store: memory-mapped arrays in shared host memory, with one slot per sample.

    region of each length  [samples, positions, width]   the slots of all samples of one padded length
    rows                   [slots, width]                one row of each sample, where the last block leaves no other
    stamps                 [slots] uint8                 the boundary (in blocks) of the activations in a slot; 0 for an
                                                         empty slot

All samples of a batch have one padded length, so that a batch is read and written by whole slots of one region.
A slot is read only if its stamp is the wanted boundary. Every other slot (half-written, old, empty) is a miss.

An advance from boundary a to b overwrites the slots in place. The rank that read a slot also writes it: first stamp 0,
then the rows, then stamp b. So one store serves all boundaries, one after the other, with the memory of one.

The memory has no name (``memfd``): the kernel frees it with the end of its last rank, also after a crash. The other
ranks of the node open it through the descriptor of the rank that reserved it. A store that memory cannot hold, or that
later runs find, is a file with a name, in a folder with a lock (``cache/kept.py``).
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pipetransformer.cache.codec import encode, stored_width
from pipetransformer.errors import UserError


@dataclass(frozen=True, slots=True)
class StoreLayout:
    """The sizes and places of everything in a store.

    Attributes:
        positions: number of positions of each slot [slots]: of a text its padded length, of a picture its tokens.
        width: numbers at a position, as they are computed.
        dtype: type of the stored numbers (``cache/codec.py``).
        has_rows: whether one row of each sample may be stored alone: they lie together, and are read much faster so.
        slots: slot of each sample [num_samples], -1 for a sample of another node; None where sample i has slot i.
    """

    positions: np.ndarray
    width: int
    dtype: torch.dtype
    has_rows: bool = False
    slots: np.ndarray | None = None

    @property
    def position_bytes(self) -> int:
        """Bytes of one position."""
        return self.stored_width * self.dtype.itemsize

    @property
    def stored_width(self) -> int:
        """Stored numbers of one position."""
        return stored_width(self.width, self.dtype)

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole store: regions, rows and stamps."""
        num_slots = len(self.positions)
        return (int(self.positions.sum()) + num_slots * self.has_rows) * self.position_bytes + num_slots


# So that a file larger than the memory can be mapped: nothing is written to it. Python names it from 3.11 on.
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


class ActivationStore:
    """One rank's view of its node's store, made with ``reserve`` on one rank and with ``open`` on the others.

    Args:
        descriptor: open file descriptor of the memory; the store owns it.
        is_private: whether this process alone sees its own writes; they do not change the file.
    """

    def __init__(self, descriptor: int, layout: StoreLayout, *, is_private: bool = False) -> None:
        self.layout = layout
        self.descriptor = descriptor
        positions, num_slots = layout.positions, len(layout.positions)
        self._regions: dict[int, Tensor] = {}
        self._starts: dict[int, int] = {}  # number of the first slot of a region, counted over all regions
        self._rows: Tensor | None = None
        self._stamps = np.empty(0, dtype=np.uint8)  # for a node without samples of the split
        self._places = np.empty(num_slots, dtype=np.int64)  # number of each slot, counted over all regions
        offset = start = 0
        if num_slots:
            memory = mmap.mmap(
                descriptor,
                layout.num_bytes,
                flags=mmap.MAP_PRIVATE | _NO_RESERVE if is_private else mmap.MAP_SHARED,
                prot=mmap.PROT_READ | mmap.PROT_WRITE,
            )
            for length in map(int, np.unique(positions)):
                members = np.flatnonzero(positions == length)
                self._places[members] = np.arange(start, start + len(members))
                numbers = len(members) * length * layout.stored_width
                region = torch.frombuffer(memory, dtype=layout.dtype, count=numbers, offset=offset)
                self._regions[length] = region.view(len(members), length, layout.stored_width)
                self._starts[length] = start
                offset, start = offset + region.nbytes, start + len(members)
            if layout.has_rows:
                rows = torch.frombuffer(
                    memory, dtype=layout.dtype, count=num_slots * layout.stored_width, offset=offset
                )
                self._rows = rows.view(num_slots, 1, layout.stored_width)
                offset += rows.nbytes
            self._stamps = np.frombuffer(memory, dtype=np.uint8, offset=offset)

    def _slots(self, ids: np.ndarray) -> np.ndarray:
        return ids if self.layout.slots is None else self.layout.slots[ids]

    @classmethod
    def reserve(cls, layout: StoreLayout, *, place: Path | None = None) -> ActivationStore:
        """Takes the whole memory at once, filled with zeros.

        Args:
            place: a new file; None for memory of the host.

        Raises:
            OSError: if there is too little memory. A sparse file would end the job with SIGBUS at a later write.
        """
        if place is None:
            descriptor = os.memfd_create("pipetransformer-cache", os.MFD_CLOEXEC)
        else:
            descriptor = os.open(place, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            os.posix_fallocate(descriptor, 0, max(layout.num_bytes, 1))
            return cls(descriptor, layout)
        except OSError:
            os.close(descriptor)
            raise

    @classmethod
    def open(cls, address: str, layout: StoreLayout) -> ActivationStore:
        """Maps the store that another rank of this node has reserved.

        Args:
            address: the ``address`` of that rank's store, or the path of its file.

        Raises:
            OSError: if the store cannot be opened or mapped.
        """
        return cls(os.open(address, os.O_RDWR | os.O_CLOEXEC), layout)

    @classmethod
    def find(cls, path: str, layout: StoreLayout) -> ActivationStore:
        """Maps a complete store that other jobs may have open too. Raises OSError where that cannot be done."""
        return cls(os.open(path, os.O_RDONLY | os.O_CLOEXEC), layout, is_private=True)

    @property
    def address(self) -> str:
        """Path of the store for other processes of this node, valid while this rank keeps it open."""
        return f"/proc/{os.getpid()}/fd/{self.descriptor}"

    def holds(self, ids: np.ndarray, boundary: int) -> np.ndarray:
        """Whether each sample can be read at ``boundary`` (in blocks, above 0), bool [len(ids)]."""
        assert boundary > 0, "stamp 0 is that of an empty slot"
        slots = self._slots(ids)
        if not len(self._stamps):
            return np.zeros(len(ids), dtype=bool)
        is_here: np.ndarray = (self._stamps[slots] == boundary) & (slots >= 0)
        return is_here

    def clear(self) -> None:
        """Empties all slots, for activations that no longer match the weights."""
        self._stamps[:] = 0

    def read(self, ids: np.ndarray, *, positions: int, out: Tensor | None = None) -> Tensor:
        """Gathers the first positions of samples into [len(ids), positions, stored width], in their stored form.

        Args:
            ids: numbers of the samples [rows], all of one padded length; all must be in the store.
            positions: the number of positions: as many as the slots have, or 1 where one row is stored.
            out: a buffer of the result's shape and type, to be filled; None for a new one.

        Raises:
            LookupError: if a sample has another padded length.
        """
        region, places = self._runs(*self.region(ids, positions=positions))
        if isinstance(places, slice):
            return region[places].clone() if out is None else out.copy_(region[places])
        return torch.index_select(region, 0, places) if out is None else torch.index_select(region, 0, places, out=out)

    def write(self, ids: np.ndarray, hidden: Tensor, *, boundary: int) -> None:
        """Stores activations of samples at ``boundary``.

        Args:
            ids: numbers of the samples [rows], each at most once, all of one padded length.
            hidden: activations [rows, positions, width].
            boundary: the boundary of the activations, in blocks.

        Raises:
            UserError: if the store has the type float16 and a value is too large for it.
            LookupError: if a sample has another padded length.
        """
        slots = self._slots(ids)
        self._stamps[slots] = 0
        region, places = self._runs(*self.region(ids, positions=hidden.shape[1]))
        if hidden.shape != (len(ids), region.shape[1], self.layout.width):  # else it would be broadcast
            raise RuntimeError(f"shape {tuple(hidden.shape)}")
        if isinstance(places, slice):  # as an advance pass writes
            is_whole = self.layout.dtype == torch.int8
            values = region[places].copy_(encode(hidden, torch.int8) if is_whole else hidden)
        else:
            values = encode(hidden, self.layout.dtype)
            region.index_copy_(0, places, values)
        if self.layout.dtype == torch.float16 and not values.isfinite().all():
            raise UserError("cache.dtype: float16 cannot hold this model's activations; give bfloat16 or compute")
        self._stamps[slots] = boundary

    def region(self, ids: np.ndarray, *, positions: int) -> tuple[Tensor, np.ndarray]:
        """The place of so many positions of these samples: a region [samples, positions, stored width], which other
        processes may be writing, and numbers in it [len(ids)].

        The lengths of the slots are not looked up, which would cost more than the rest: a sample of another region has
        a number outside of this one.
        """
        slots = self._slots(ids)
        if positions == 1 and self._rows is not None:
            return self._rows, slots
        region = self._regions[positions]
        if len(self._regions) == 1:  # Note: then places are the slots' own numbers
            return region, slots
        return region, self._places[slots] - self._starts[positions]

    @staticmethod
    def _runs(region: Tensor, places: np.ndarray) -> tuple[Tensor, Tensor | slice]:
        """``places`` as a slice where they follow one another, which is copied at the speed of the memory."""
        is_run = len(places) and places[0] >= 0 and places[-1] - places[0] == len(places) - 1
        if is_run and places[-1] < len(region) and (np.diff(places) == 1).all():
            return region, slice(int(places[0]), int(places[-1]) + 1)
        return region, torch.from_numpy(places)

    def close(self) -> None:
        """Closes the descriptor and the mapping of this rank. May be called twice."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
            del self._regions, self._rows, self._stamps
