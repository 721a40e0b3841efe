"""Links are measured by real sends, inside a node and between nodes, and the planner uses each for what crosses it."""

from __future__ import annotations

import signal
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch.distributed as dist
from laws import REPOSITORY, STATIC, Case, configuration
from ranks import RankPool

from pipetransformer.commands.ranks import measure_link
from pipetransformer.data import alone, epoch_batches
from pipetransformer.pipe.measure.links import between_seconds, send_seconds
from pipetransformer.pipe.measure.profile import measure_profile
from pipetransformer.pipe.measure.workload import Workload
from pipetransformer.pipe.planner.costs import JobCosts, Link
from pipetransformer.process.world import World
from pipetransformer.run.job import build_job
from pipetransformer.simulation.analytic import costs_of
from pipetransformer.simulation.schema import load_simulation

NONE = (0.0, 0.0)


def in_node(world: World, local_size: int) -> World:
    """This rank where the host plays nodes of ``local_size`` ranks."""
    return replace(world, local_rank=world.rank % local_size, local_size=local_size)


def measured_links(world: World, local_size: int) -> dict[str, tuple[tuple[float, float], set[int]]]:
    """Of both kinds of link: (what was measured, the ranks that this one sent to)."""
    told, send = {}, dist.send
    for name, measure in (("inside", send_seconds), ("between", between_seconds)):
        peers = set[int]()

        def noting(buffer: Any, peer: int, peers: set[int] = peers) -> None:
            peers.add(peer)
            send(buffer, peer)

        dist.send = noting
        try:
            told[name] = (measure(in_node(world, local_size)), peers)
        finally:
            dist.send = send
    return told


@pytest.mark.parametrize(
    ("world_size", "local_size", "inside", "between"),
    [
        (4, 2, [{1}, {0}, {3}, {2}], [{2}, set(), {0}, set()]),
        (3, 3, [{1}, {0}, set()], [set()] * 3),
        (3, 1, [set()] * 3, [{1}, {0}, set()]),
    ],
)
def test_sends_stay_in_a_node_or_cross_nodes(
    world_size: int, local_size: int, inside: list[set[int]], between: list[set[int]], ranks: RankPool
) -> None:
    answers = ranks.run(world_size, measured_links, local_size)
    for name, expected in (("inside", inside), ("between", between)):
        assert [answer[name][1] for answer in answers] == expected, name
        for figures, peers in (answer[name] for answer in answers):
            assert (figures[0] > 0) if peers else figures == NONE


def profiled(world: World, local_size: int, folder: str) -> JobCosts:
    """What a job on such nodes measures before training."""
    import os

    os.environ["PIPETRANSFORMER_CACHE"] = folder
    world = in_node(world, local_size)
    config = configuration("vit", Case("vit", world.size, STATIC[1], precision="float32").overrides(""))
    job = build_job(config, world, lead=alone)
    batches = epoch_batches(
        job.datasets["train"].lengths, batch_size=32, seed=0, epoch=0, num_nodes=world.num_nodes
    )  # fmt: skip
    workload = Workload.of(batches, config, num_ranks=world.size, local_size=1)
    return measure_profile(job.chain, job.datasets["train"], workload=workload, config=config, world=world).job


@pytest.mark.parametrize(("local_size", "has_between"), [(2, True), (4, False)])
def test_a_job_gives_the_planner_both_links(local_size: int, has_between: bool, ranks: RankPool, tmp_path: Any) -> None:
    first, *others = ranks.run(4, profiled, local_size, str(tmp_path))
    assert all(other == first for other in others)
    assert first.send.latency_ns > 0
    assert (first.between is not None and first.between.latency_ns > 0) == has_between


def test_two_ranks_of_this_machine_measure_their_link() -> None:
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    handlers = list(map(signal.getsignal, numbers))
    link = measure_link()
    assert list(map(signal.getsignal, numbers)) == handlers  # torchrun leaves its own
    assert link.latency_ns > 0
    # Loopback moves 0.1 to 100 GB/s; a figure in other units would be a thousand times off.
    assert 0.01 < link.ns_per_byte < 10


def two_nodes() -> JobCosts:
    """Of four ranks each. Rings take 2 ns a byte where they have their links for themselves."""
    costs = costs_of(load_simulation(REPOSITORY / "config" / "simulation_1024.yaml"))
    return replace(costs, num_ranks=8, reduction=Link(7, 2.0 * 7 / 8), between=Link(5, 3.0))


def test_gradients_of_all_stages_share_the_link_between_nodes() -> None:
    """Two nodes of four ranks: pp rings of 8 / pp ranks each cross the same link, whatever is faster inside."""
    job = two_nodes()
    num_bytes = 10**6
    for pp in (1, 2, 4):
        dp = 8 // pp
        expected = 7 + pp * num_bytes * 2 * (dp - 1) / dp * 3.0
        assert job.reduction_ns(num_bytes, num_replicas=dp) == pytest.approx(expected, abs=1)
    fast = replace(job, between=Link(5, 0.01))  # the rings themselves are what takes time
    assert fast.reduction_ns(num_bytes, num_replicas=8) == replace(job, between=None).reduction_ns(
        num_bytes, num_replicas=8
    )


def test_a_larger_job_has_longer_rings_over_the_same_links() -> None:
    job = two_nodes()
    assert job.for_ranks(8) is job
    sums = [job.for_ranks(size).reduction_ns(10**6, num_replicas=size // 4) for size in (8, 16, 64)]
    # Four rings each: only the share 2 (d - 1) / d of the bytes grows.
    assert all(a < b < 2 * a for a, b in pairwise(sums))
    alone = replace(job, between=None)
    assert alone.for_ranks(64).reduction_ns(10**6, num_replicas=8) == alone.reduction_ns(10**6, num_replicas=8)
