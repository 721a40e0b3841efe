"""``main_tc.py`` with many samples set aside, a pass over them every 50 steps, and every freeze kept. The losses of
each pass go to a file.

    python -m benchmarks.guard.recorded FILE CONFIG [key=value ...]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from pipetransformer.freeze import guard
from pipetransformer.launch.entry import main
from pipetransformer.run import job

NUM_SAMPLES, EVERY = 1000, 50


def main_recorded(target: Path) -> int:
    observe, passes = guard.Guard.observe, list[dict[str, Any]]()

    def noted(self: guard.Guard, step: int, losses: Sequence[float], **given: Any) -> guard.Verdict:
        passes.append({"step": step, "moved": given["moved"], "losses": list(losses)})
        target.write_text(json.dumps(passes))
        return observe(self, step, losses, **given)

    with (
        mock.patch.object(job, "guard_size", lambda *_, **__: guard.GuardSize(EVERY, NUM_SAMPLES)),
        mock.patch.object(guard, "is_worse", lambda *_: False),
        mock.patch.object(guard.Guard, "observe", noted),
    ):
        return main("text_classification")


if __name__ == "__main__":
    sys.exit(main_recorded(Path(sys.argv.pop(1))))
