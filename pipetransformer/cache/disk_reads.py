"""The price of reading stores that memory cannot hold: a share of them comes from the disk, anew in each epoch."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from random import Random
from tempfile import TemporaryFile
from time import perf_counter

from pipetransformer.process.collectives import led_by, values_of_ranks
from pipetransformer.process.control_group import available_host_memory
from pipetransformer.process.world import World

_READ_BYTES, _NUM_READS = 2**18, 256  # about a sample of a small model; 64 MB


def disk_ns(num_bytes: int, folder: Path, *, world: World) -> float:
    """Collective. Mean nanoseconds that a byte takes a rank longer to be read than from memory, on the slowest node: 0
    where memory can hold all bytes, as the kernel keeps what was read of a file while there is room.

    Where it cannot, the disk is timed: a file is written, forgotten by the kernel, and read in any order.

    Args:
        num_bytes: bytes of all stores of this node.
        folder: their folder, on the disk that they would lie on; made where it is missing.
    """

    def lead() -> float:
        missing = num_bytes - available_host_memory()
        with suppress(OSError):  # of a folder that cannot be written: then no store lies there
            return missing / num_bytes * _timed_ns_per_byte(folder) if missing > 0 else 0.0
        return 0.0

    own = led_by(world.rank - world.local_rank, lead)
    return max(values_of_ranks(own)) * world.local_size  # whose ranks share the disk


def _timed_ns_per_byte(folder: Path) -> float:
    folder.mkdir(parents=True, exist_ok=True)
    order = list(range(_NUM_READS))
    Random(0).shuffle(order)
    with TemporaryFile(dir=folder, buffering=0) as file:
        for _ in order:
            file.write(os.urandom(_READ_BYTES))  # else a disk that compresses would seem fast
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        start = perf_counter()
        for place in order:
            os.pread(file.fileno(), _READ_BYTES, place * _READ_BYTES)
        return (perf_counter() - start) / (_NUM_READS * _READ_BYTES) * 1e9
