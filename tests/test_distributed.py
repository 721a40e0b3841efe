"""What one rank does for others: they wait for it however long it takes, and hear of its mistakes."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch.distributed as dist
from ranks import RankPool

from pipetransformer.errors import UserError
from pipetransformer.process.collectives import led_by
from pipetransformer.process.world import World


def led(world: World, seconds: float, how: str) -> str:
    """Ranks 0 and 2 lead two ranks each, in a group whose collectives may take two seconds."""
    group = dist.group.WORLD
    assert group is not None
    group._get_backend(world.device)._set_default_timeout(timedelta(seconds=2))
    leader = world.rank - world.rank % 2

    def action() -> str:
        time.sleep(seconds)
        if how == "mistake" and world.rank == 2:
            raise UserError("data.path: nothing there")
        return f"by {world.rank}"

    try:
        return led_by(leader, action)
    except UserError as error:
        return str(error)


@pytest.mark.parametrize("seconds", [0.0, 5.0])
def test_followers_wait_longer_than_a_collective_may_take(seconds: float, ranks: RankPool) -> None:
    assert ranks.run(4, led, seconds, "well") == ["by 0", "by 0", "by 2", "by 2"]


def test_a_leaders_mistake_reaches_every_rank(ranks: RankPool) -> None:
    assert ranks.run(4, led, 0.0, "mistake") == ["data.path: nothing there"] * 4
