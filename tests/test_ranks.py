"""The pool answers in order of rank, tells who failed and why, and works again afterwards."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from ranks import RankPool

from pipetransformer.process.world import World


def _sum_of_ranks(world: World, plus: float) -> tuple[int, float]:
    total = torch.tensor(world.rank + plus)
    dist.all_reduce(total)
    return world.rank, total.item()


def _last_rank_fails(world: World, how: str) -> None:
    if world.rank == world.size - 1:
        if how == "raises":
            raise ValueError("on purpose")
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "hangs":
            time.sleep(1000)
    dist.barrier()


def _pid(world: World) -> int:
    return os.getpid()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_results_come_in_order_of_rank(ranks: RankPool, world_size: int) -> None:
    total = sum(range(world_size)) + 0.5 * world_size
    assert ranks.run(world_size, _sum_of_ranks, 0.5) == [(rank, total) for rank in range(world_size)]


def test_a_rank_that_raises_frees_its_peers_and_costs_no_worker(ranks: RankPool) -> None:
    before = ranks.run(4, _pid)
    begin = time.monotonic()
    with pytest.raises(AssertionError, match=r"rank 2 of 3 ---\n(?s:.*)ValueError: on purpose"):
        ranks.run(3, _last_rank_fails, "raises")
    assert time.monotonic() - begin < 8
    assert ranks.run(4, _pid) == before


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("dies", r"rank 1 of 2 ---\ndied with exit code -9"),
        pytest.param("hangs", "(?s)it stood at.*_last_rank_fails", marks=pytest.mark.full),
    ],
)
def test_a_rank_that_dies_or_hangs_is_told_and_replaced(ranks: RankPool, how: str, told: str) -> None:
    with pytest.raises(AssertionError, match=told):
        ranks.run(2, _last_rank_fails, how, timeout=6)
    assert len(set(ranks.run(2, _pid))) == 2
