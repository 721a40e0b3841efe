"""The bytes that torch's CUDA allocator takes from a device to serve tensors: its policy, without the device.

What the originals call memory is what this allocator had taken (``torch.cuda.max_memory_reserved``), not what was alive
in tensors. Sizes and rules are those of c10/cuda/CUDACachingAllocator.cpp at its defaults, of one stream; nothing is
given back to the device, as no limit is met.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

__all__ = ["Block", "CachingAllocator"]

MIB = 2**20
_ROUNDING = 512
_SMALL = MIB  # up to this, a tensor lies in a segment of small ones
_SMALL_SEGMENT, _LARGE_SEGMENT = 2 * MIB, 20 * MIB
_OWN_SEGMENT = 10 * MIB  # from this on, a segment is made for the tensor alone
_OWN_ROUNDING = 2 * MIB


@dataclass(slots=True, eq=False)
class Block:
    """A part of a segment, between its neighbours in it."""

    size: int
    address: int
    pool: list[tuple[int, int, Block]]
    is_free: bool = True
    before: Block | None = None
    behind: Block | None = None

    @property
    def entry(self) -> tuple[int, int, Block]:
        return (self.size, self.address, self)


class CachingAllocator:
    """Attributes: reserved: bytes of all segments, which only grow."""

    def __init__(self) -> None:
        self.reserved = 0
        # Free blocks by size, then address: the smallest that is large enough is taken.
        self._small: list[tuple[int, int, Block]] = []
        self._large: list[tuple[int, int, Block]] = []

    def take(self, num_bytes: int) -> Block | None:
        """Serves a tensor; None for an empty one."""
        if not num_bytes:
            return None
        size = -(-num_bytes // _ROUNDING) * _ROUNDING
        pool = self._small if size <= _SMALL else self._large
        at = bisect_left(pool, (size,))
        block = pool.pop(at)[2] if at < len(pool) else self._segment(size, pool)
        left = block.size - size
        if left >= _ROUNDING if pool is self._small else left > _SMALL:
            rest = Block(left, block.address + size, pool, before=block, behind=block.behind)
            if block.behind is not None:
                block.behind.before = rest
            block.size, block.behind = size, rest
            insort(pool, rest.entry)
        block.is_free = False
        return block

    def give(self, block: Block | None) -> None:
        """Frees a tensor's block; free neighbours become one with it."""
        if block is None:
            return
        for other in (block.before, block.behind):
            if other is not None and other.is_free:
                other.pool.remove(other.entry)
                first, second = (other, block) if other is block.before else (block, other)
                first.size += second.size
                first.behind = second.behind
                if second.behind is not None:
                    second.behind.before = first
                block = first
        block.is_free = True
        insort(block.pool, block.entry)

    def _segment(self, size: int, pool: list[tuple[int, int, Block]]) -> Block:
        if pool is self._small:
            taken = _SMALL_SEGMENT
        elif size < _OWN_SEGMENT:
            taken = _LARGE_SEGMENT
        else:
            taken = -(-size // _OWN_ROUNDING) * _OWN_ROUNDING
        address = self.reserved
        self.reserved += taken
        return Block(taken, address, pool)
