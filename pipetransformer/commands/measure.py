"""What every rank of ``pipetransformer plan`` runs: measures a job's costs and keeps them in a file."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

from pipetransformer.cli import run_guarded
from pipetransformer.config import load_config

__all__ = ["MEASURE", "local_ranks"]

MEASURE = Path(__file__)


def local_ranks() -> int:
    """The devices of this machine: its GPUs, or else a rank for each of at most two cores."""
    import torch

    return torch.cuda.device_count() or min(2, os.cpu_count() or 1)


def main() -> int:
    path, world_size, local_size, config, *overrides = sys.argv[1:]
    return run_guarded(lambda: _measure(Path(path), int(world_size), int(local_size), config, overrides))


def _measure(path: Path, num_ranks: int, local_size: int, config_path: str, overrides: list[str]) -> None:
    from pipetransformer.data import epoch_batches
    from pipetransformer.distributed import close_world, init_world, led_by
    from pipetransformer.measure import Workload, measure_profile
    from pipetransformer.pipe.planner import divisors
    from pipetransformer.pipe.profile_file import save_profile
    from pipetransformer.setup import build_job

    config = load_config(config_path, overrides)
    train, microbatches = config.train, config.pipe.microbatches
    world = init_world(timeout_seconds=config.run.timeout)
    job = build_job(config, world, lead=partial(led_by, world.rank - world.local_rank))
    data = job.datasets["train"]
    batches = epoch_batches(
        data.lengths, batch_size=train.batch_size, seed=train.seed, epoch=0, num_nodes=world.num_nodes
    )
    workload = Workload.of(
        batches,
        global_batch_size=train.batch_size,
        num_ranks=num_ranks,
        pipeline_lengths=divisors(local_size),
        microbatches=microbatches if isinstance(microbatches, int) else None,
    )
    profile = measure_profile(job.chain, data, batches=batches, workload=workload, config=config, world=world)
    if world.rank == 0:
        save_profile(profile, path)
    close_world()


if __name__ == "__main__":
    sys.exit(main())
