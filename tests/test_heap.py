"""Freed memory stays with a rank between steps, and goes back to the system when it enters another plan."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_BYTES = 2**28
_SCRIPT = f"""
import ctypes, psutil
from pipetransformer.process.heap import keep_freed_memory, release_freed_memory
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
keep_freed_memory()
resident = lambda: psutil.Process().memory_info().rss
def step():
    blocks = [libc.malloc({_BYTES} // 4) for _ in range(4)]
    for block in blocks:
        ctypes.memset(block, 1, {_BYTES} // 4)
    for block in reversed(blocks):
        libc.free(block)
step()
kept = resident()
release_freed_memory()
print(kept - resident())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="malloc of glibc")
@pytest.mark.parametrize(("setting", "keeps"), [({}, True), ({"MALLOC_MMAP_THRESHOLD_": "32768"}, False)])
def test_what_a_step_frees_stays_until_it_is_released(setting: dict[str, str], keeps: bool) -> None:
    """A user who sets malloc to map large blocks has each of them given back at once."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MALLOC_")} | setting
    ended = subprocess.run(
        [sys.executable, "-c", _SCRIPT], env=environment, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    released = int(ended.stdout)
    assert (released > 0.9 * _BYTES) if keeps else (released < 0.1 * _BYTES)
