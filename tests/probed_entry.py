"""An entry that trains and does one thing beside it: ``probed_entry.py CONFIG HOW [key=value ...]``, see below."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from time import sleep
from typing import TYPE_CHECKING

from pipetransformer.config import load_config
from pipetransformer.launch.entry import run_guarded

if TYPE_CHECKING:
    from torch import Tensor

    from pipetransformer.data import Batch
    from pipetransformer.engine import Engine
    from pipetransformer.engine.step import Probe
    from pipetransformer.trainer import Trainer


def say_when_it_calibrates(trainer: Callable[[], Trainer]) -> None:
    from pipetransformer.pipe.measure import static_layouts

    time_steps = static_layouts.time_steps

    def telling(engine: Engine, batch: Batch, *, num_steps: int) -> float:
        here = trainer()
        Path(here.config.run.dir, f"calibrating_{here.world.rank}").touch()
        return time_steps(engine, batch, num_steps=100 * num_steps)  # long enough to be seen from outside

    static_layouts.time_steps = telling


def save_slowly(trainer: Callable[[], Trainer]) -> None:
    """A model's folder stands half written long enough to be seen from outside."""
    from pipetransformer.run import saved_model

    give_usual_permissions = saved_model._give_usual_permissions

    def slow(folder: Path) -> None:
        sleep(0.5)
        give_usual_permissions(folder)

    saved_model._give_usual_permissions = slow


def raise_on_rank_1_at_step_5(trainer: Callable[[], Trainer]) -> Probe:
    def probe(step: int, gradients: Mapping[str, Tensor]) -> None:
        if step == 5 and trainer().world.rank == 1:
            raise ValueError("the cause\nand its details")

    return probe


def train_only(trainer: Callable[[], Trainer]) -> None:
    return None


def main(config_path: str, how: str, *overrides: str) -> None:
    from pipetransformer.process.world import close_world, init_world
    from pipetransformer.trainer import Trainer

    config = load_config(config_path, overrides)
    world = init_world(timeout_seconds=config.run.timeout)
    timed = how == say_when_it_calibrates.__name__
    trainer = Trainer(config, world, probe=globals()[how](lambda: trainer), timed=timed)
    trainer.run()
    close_world()


if __name__ == "__main__":
    sys.exit(run_guarded(lambda: main(*sys.argv[1:])))
