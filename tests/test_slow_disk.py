"""A slow disk ends no job: a rank waits as long as it takes for what another writes or reads."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from laws import STATIC, Case, Weights, configuration, final_weights
from ranks import RankPool
from test_distributed import hurry
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from pipetransformer.models import timm_model
from pipetransformer.process.world import World
from pipetransformer.run import events
from pipetransformer.run import writing as checkpoint_writing
from pipetransformer.run.checksums import damage_of, files_of
from pipetransformer.trainer import Trainer

SLOW = 2.6  # seconds, where a collective may take 2


def slowed(world: World, folder: str, slow_rank: int | None) -> Weights | None:
    """The final weights of a run in which this rank's disk is slow in all that it writes for others to go on."""
    pause = SLOW if world.rank == slow_rank else 0.0

    def slow(action):  # type: ignore[no-untyped-def]
        def later(*args, **kwargs):  # type: ignore[no-untyped-def]
            time.sleep(pause)
            return action(*args, **kwargs)

        return later

    def note(event: events.Event) -> None:
        if isinstance(event, events.TrainingStarts):  # set-up may take longer on a busy machine
            hurry(world)
            trainer.checkpoints.writer._world = replace(world, timeout=timedelta(seconds=2))

    settings = (f"run.dir={folder}", f"run.id=slow{slow_rank}", "train.epochs=1", "checkpoint.every=1 epoch")
    overrides = [*Case("vit", world.size, STATIC[2]).overrides(""), *settings]
    with (
        mock.patch.object(timm_model, "write_weights", slow(timm_model.write_weights)),
        mock.patch.object(FileSystemWriter, "write_data", slow(FileSystemWriter.write_data)),
        mock.patch.object(checkpoint_writing, "write_digests", slow(checkpoint_writing.write_digests)),
    ):
        trainer = Trainer(configuration("vit", overrides), world, listeners=[note])
        trainer.run()
    return final_weights(trainer)


@pytest.mark.parametrize("slow_rank", [0, 1])
def test_a_slow_disk_ends_no_job(slow_rank: int, ranks: RankPool, tmp_path: Path) -> None:
    usual = ranks.run(2, slowed, str(tmp_path), None)[0]
    found = ranks.run(2, slowed, str(tmp_path), slow_rank)[0]
    assert usual is not None and found is not None and all(np.array_equal(usual[name], found[name]) for name in usual)
    left = tmp_path / f"slow{slow_rank}"
    assert (left / "model" / "final" / "model.safetensors").is_file()
    assert damage_of(next((left / "checkpoints").iterdir()), files_of(next((left / "checkpoints").iterdir()))[0]) == ""
