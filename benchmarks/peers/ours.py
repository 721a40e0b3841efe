"""The same epoch by this project's trainer, under torchrun or alone; writes its figures.

python -m benchmarks.peers.ours CONFIG RESULT [key=value ...]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from time import perf_counter

from pipetransformer.config import load_config
from pipetransformer.launch.entry import run_guarded


def main(config_path: str, result: str, overrides: list[str]) -> None:
    from pipetransformer.process.device import peak_memory_bytes
    from pipetransformer.process.world import close_world, init_world
    from pipetransformer.run import events
    from pipetransformer.trainer import Trainer

    config = load_config(config_path, overrides)
    world = init_world(timeout_seconds=config.run.timeout)
    times: list[float] = []
    found: dict[str, object] = {}

    def listen(event: events.Event) -> None:
        if isinstance(event, (events.TrainingStarts, events.Stepped)):
            times.append(perf_counter())
        elif isinstance(event, events.Evaluated):
            found["accuracy"] = event.metrics.get("accuracy")
        elif isinstance(event, events.TrainingEnds):
            found["peak_bytes"] = peak_memory_bytes(world.device)

    trainer = Trainer(config, world, listeners=[listen])
    trainer.run()
    if world.rank == 0:
        steps = [behind - before for before, behind in zip(times, times[1:])]
        samples = len(trainer.job.datasets["train"]) * config.train.epochs
        Path(result).write_text(json.dumps({**found, "steps": steps, "samples": samples}))
    close_world()


if __name__ == "__main__":
    sys.exit(run_guarded(lambda: main(sys.argv[1], sys.argv[2], sys.argv[3:])))
