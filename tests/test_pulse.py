"""Ranks agree to end behind the same step, whoever is told, and ask each other about once a second."""

from __future__ import annotations

from unittest import mock

import torch.distributed as dist
from ranks import RankPool

from pipetransformer.process.world import World
from pipetransformer.run import pulse
from pipetransformer.run.pulse import Pulse

STEP = {0: 0.3, 1: 0.1}  # seconds of a step, by rank


def beats(world: World, told_at: int) -> tuple[list[int], int | None]:
    """Steps behind which this rank asks, and the one at which it ends. Rank 1 is told during step ``told_at``."""
    clock, asked, step = [0.0], list[int](), 0
    with mock.patch.object(pulse, "perf_counter", lambda: clock[0]):
        job = Pulse(lambda: world.rank == 1 and step >= told_at)
        reduce = dist.all_reduce

        def noting(*args: object, **kwargs: object) -> object:
            asked.append(step)
            return reduce(*args, **kwargs)

        with mock.patch.object(dist, "all_reduce", noting):
            for step in range(1, 30):
                clock[0] += STEP[world.rank]
                if job.beat():
                    return asked, step
    return asked, None


def test_all_end_behind_the_same_step(ranks: RankPool) -> None:
    asked = [1, 4, 7, 10, 13, 16, 19, 22, 25, 28]  # three steps of the slower rank take a second
    assert ranks.run(2, beats, 100) == [(asked, None)] * 2
    assert ranks.run(2, beats, 11) == [(asked[:5], 13)] * 2
