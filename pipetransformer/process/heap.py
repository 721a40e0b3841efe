"""The heap of this process: what a step frees stays for the next one, until the job enters another plan.

glibc gives large blocks back to the system as soon as they are free, and each step then pays for every page anew: the
kernel zeroes it at its first touch. Other C libraries are left as they are.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4  # malloc.h
_NEVER = -1  # of a threshold for trimming
_SETTING = "MALLOC_MMAP_THRESHOLD_"
_PAD = 2**26  # bytes that the heap grows by at least


def keep_freed_memory() -> None:
    """From now on, freed blocks of any size stay with this process; not where the user has set malloc to map blocks."""
    tune = _function("mallopt")
    if tune is not None and _SETTING not in os.environ:
        tune(_MMAP_MAX, 0)
        tune(_TRIM_THRESHOLD, _NEVER)
        tune(_TOP_PAD, _PAD)


def release_freed_memory() -> None:
    """Gives free pages back to the system."""
    trim = _function("malloc_trim")
    if trim is not None:
        trim(0)


@cache
def _function(name: str) -> Callable[..., int] | None:
    try:
        found: Callable[..., int] = getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError, TypeError):  # another C library, or none that can be asked
        return None
    return found
