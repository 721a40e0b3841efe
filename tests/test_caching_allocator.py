"""torch's CUDA allocator by hand: segments, best fits, splits, and neighbours that become one."""

from __future__ import annotations

import random
import sys

from laws import REPOSITORY

sys.path.insert(0, str(REPOSITORY))

from benchmarks.support.caching_allocator import MIB, CachingAllocator


def test_small_tensors_share_two_megabytes() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.take(1000) for _ in range(2048)]  # 1,024 bytes each
    assert allocator.reserved == 2 * MIB
    allocator.take(1)
    assert allocator.reserved == 4 * MIB
    for block in blocks:
        allocator.give(block)
    allocator.take(MIB)  # all 2,048 are one block again
    assert allocator.reserved == 4 * MIB


def test_large_tensors_share_twenty_or_have_their_own() -> None:
    allocator = CachingAllocator()
    first = allocator.take(6 * MIB)
    assert allocator.reserved == 20 * MIB
    allocator.take(13 * MIB)  # of the 14 left; no more than 1 remains, which is not split off
    assert allocator.reserved == 20 * MIB
    allocator.give(first)
    allocator.take(11 * MIB)
    assert allocator.reserved == 32 * MIB, "rounded up to 2 MiB"
    allocator.take(5 * MIB)
    assert allocator.reserved == 32 * MIB, "what was free serves"


def test_a_hole_that_is_too_small_serves_nobody() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.take(12 * MIB) for _ in range(4)]
    for block in blocks[::2]:
        allocator.give(block)
    allocator.take(24 * MIB)  # 24 are free, in two segments
    assert allocator.reserved == (4 * 12 + 24) * MIB


def test_nothing_is_lost_or_lent_twice() -> None:
    random.seed(0)
    allocator, held = CachingAllocator(), []
    for _ in range(3000):
        if held and random.random() < 0.5:
            allocator.give(held.pop(random.randrange(len(held))))
        else:
            block = allocator.take(random.choice([0, 1, 700, 2**18, 3 * MIB, 15 * MIB]))
            held.append(block)
        spans = sorted((b.address, b.address + b.size) for b in held if b is not None)
        assert all(stop <= start for (_, stop), (start, _) in zip(spans, spans[1:]))
    for block in held:
        allocator.give(block)
    free = sum(size for pool in (allocator._small, allocator._large) for size, _, _ in pool)
    assert free == allocator.reserved
