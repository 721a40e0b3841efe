"""RESULT WORLD_SIZE LOCAL_SIZE CONFIG [key=value ...]: measures the costs of a job of that size on these ranks."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from pipetransformer.config import load_config
from pipetransformer.launch.entry import run_guarded


def main(path: Path, num_ranks: int, local_size: int, config_path: str, overrides: list[str]) -> None:
    from pipetransformer.pipe.measure.profile import measure_profile
    from pipetransformer.pipe.measure.profile_file import save_profile
    from pipetransformer.pipe.measure.workload import Workload
    from pipetransformer.process.collectives import led_by
    from pipetransformer.process.world import close_world, init_world
    from pipetransformer.run.job import build_job

    config = load_config(config_path, overrides)
    world = init_world(timeout_seconds=config.run.timeout)
    job = build_job(config, world, lead=partial(led_by, world.rank - world.local_rank))
    workload = Workload.of(job.train_batches(0), config, num_ranks=num_ranks, local_size=local_size)
    profile = measure_profile(job.chain, job.datasets["train"], workload=workload, config=job.config, world=world)
    if world.rank == 0:
        save_profile(profile, path)
    close_world()


if __name__ == "__main__":
    result, world_size, node_size, file, *changes = sys.argv[1:]
    sys.exit(run_guarded(lambda: main(Path(result), int(world_size), int(node_size), file, changes)))
