"""RESULT DEVICE: measures the link between two ranks of this machine by real sends."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from pipetransformer.launch.entry import run_guarded


def main(path: Path, device: str) -> None:
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks for devices
    from pipetransformer.pipe.measure.links import send_seconds
    from pipetransformer.pipe.planner.costs import Link
    from pipetransformer.process.world import close_world, init_world

    world = init_world(timeout_seconds=60)
    latency, per_byte = send_seconds(world)
    if world.rank == 0:
        path.write_text(json.dumps(asdict(Link(round(latency * 1e9), per_byte * 1e9))))
    close_world()


if __name__ == "__main__":
    sys.exit(run_guarded(lambda: main(Path(sys.argv[1]), sys.argv[2])))
