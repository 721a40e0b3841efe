"""The price of reading stores that memory cannot hold, and the plans that it leads to."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
from laws import STATIC, Case, configuration
from ranks import RankPool

from pipetransformer.cache import disk_reads
from pipetransformer.process.world import World
from pipetransformer.run import events
from pipetransformer.trainer import Trainer


def priced(world: World, available: int, folder: str) -> tuple[float, int]:
    """Nanoseconds for a byte of 100 with so much free memory, where a disk takes 8 for each; and how often it is
    timed."""
    with (
        mock.patch.object(disk_reads, "available_host_memory", lambda: available),
        mock.patch.object(disk_reads, "_timed_ns_per_byte", return_value=8.0) as timed,
    ):
        return disk_reads.disk_ns(100, Path(folder), world=world), timed.call_count


@pytest.mark.parametrize(("available", "price"), [(1000, 0.0), (100, 0.0), (75, 2.0), (0, 8.0)])
def test_what_memory_cannot_hold_is_read_anew(available: int, price: float, ranks: RankPool, tmp_path: Path) -> None:
    """Two ranks share the disk, which the first one times, if at all."""
    assert ranks.run(2, priced, available, str(tmp_path)) == [(2 * price, int(price > 0)), (2 * price, 0)]


def test_a_disk_is_timed_and_keeps_nothing(tmp_path: Path) -> None:
    with mock.patch.object(disk_reads, "_NUM_READS", 8):
        assert 0.001 < disk_reads._timed_ns_per_byte(tmp_path / "made") < 1e4
    assert not list((tmp_path / "made").iterdir())
    with pytest.raises(OSError, match="proc"):
        disk_reads._timed_ns_per_byte(Path("/proc/none"))


def no_disk(world: World) -> float:
    with mock.patch.object(disk_reads, "available_host_memory", lambda: 0):
        return disk_reads.disk_ns(100, Path("/proc/none"), world=world)


def test_a_folder_that_cannot_be_written_has_no_price(ranks: RankPool) -> None:
    assert ranks.run(1, no_disk) == [0.0]


def cached_of(world: World, folder: str, ns_per_byte: float, *overrides: str) -> set[int | None]:
    """The boundaries of the cache under all plans of a run that freezes four blocks at step 4, with next to no memory
    and a disk of this speed."""
    plans: list[int | None] = []

    def note(event: events.Event) -> None:
        if isinstance(event, events.Moved):
            plans.append(event.plan.cached)

    own = ("freeze.policy=static", "freeze.max_frozen=4", "freeze.warmup=4 steps", "freeze.guard=false", *overrides)
    settings = [*Case("vit", world.size, STATIC[1]).overrides(""), *own, f"run.dir={folder}", "run.id=x"]
    with (
        mock.patch.object(disk_reads, "available_host_memory", lambda: 0),
        mock.patch.object(disk_reads, "_timed_ns_per_byte", lambda _: ns_per_byte),
    ):
        Trainer(configuration("vit", settings), world, listeners=[note]).run()
    return set(plans)


def test_a_run_computes_what_a_slow_disk_would_give_later(ranks: RankPool, tmp_path: Path) -> None:
    (slow,) = ranks.run(1, cached_of, str(tmp_path / "slow"), 1e9)
    (fast,) = ranks.run(1, cached_of, str(tmp_path / "fast"), 0.0)
    (unused,) = ranks.run(1, cached_of, str(tmp_path / "unused"), 1e9, "cache.disk_budget=null")
    assert slow == {None} and fast == {4}
    assert unused == {4}, "without a disk budget all lies in memory"
