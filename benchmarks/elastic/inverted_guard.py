"""``main_tc.py`` with the guard's decision inverted: what freezing makes worse is kept, and all else undone. A planted
fault: a table that cannot tell it from the guard says nothing of the guard.

    python -m benchmarks.elastic.inverted_guard CONFIG [key=value ...]
"""

from __future__ import annotations

import sys
from unittest import mock

from pipetransformer.freeze import guard
from pipetransformer.launch.entry import main

if __name__ == "__main__":
    is_worse = guard.is_worse
    with mock.patch.object(guard, "is_worse", lambda *given: not is_worse(*given)):
        sys.exit(main("text_classification"))
