"""The compute floor by hand: two ranks, three units of 1, 2 and 3 ms forward for 2 rows, backward twice that."""

from __future__ import annotations

import pytest

from pipetransformer.floor import ComputeFloor
from pipetransformer.pipe.costs import UnitCosts

MS = 10**6


def floor() -> ComputeFloor:
    """A full step of 8 samples takes 60 ms at the length 16, the only one that was timed; 1 MB of memcpy takes 1 ms."""
    costs = UnitCosts(
        rows=2, length=16, forward_ns=(MS, 2 * MS, 3 * MS), backward_ns=(2 * MS, 4 * MS, 6 * MS),
        activation_bytes=(0, 0, 0), boundary_bytes=(0, 0, 0), prefix_ns=(MS, 2 * MS, 3 * MS),
    )  # fmt: skip
    return ComputeFloor(
        step_seconds={16: 0.06}, costs={16: costs}, timed_samples=8, world_size=2, memcpy_bytes_per_second=1e9
    )


@pytest.mark.parametrize(
    ("num_samples", "first_active", "enters", "read_bytes", "milliseconds"),
    [
        (8, 0, 0, 0, 60.0),  # nothing frozen
        (4, 0, 0, 0, 30.0),  # half a batch
        (8, 2, 2, 0, 30.0),  # the last unit is half of the work; the prefix is not computed
        (8, 2, 0, 0, 30.0 + 6.0),  # 3 ms for 2 rows of the prefix, 8 rows, 2 ranks
        (8, 2, 1, 0, 30.0 + 4.0),  # entered behind the stem
        (8, 2, 2, 10**6, 30.0 + 0.5),  # each rank copies half
    ],
)
def test_a_step(num_samples: int, first_active: int, enters: int, read_bytes: int, milliseconds: float) -> None:
    total = floor()
    total.add_step(length=16, num_samples=num_samples, first_active=first_active, enters=enters, read_bytes=read_bytes)
    assert total.seconds * 1000 == pytest.approx(milliseconds)


@pytest.mark.parametrize(("first", "stop", "milliseconds"), [(0, 3, 600.0), (0, 1, 100.0), (1, 2, 200.0), (2, 2, 0.0)])
def test_an_advance_of_400_samples(first: int, stop: int, milliseconds: float) -> None:
    total = floor()
    total.add_advance(length=16, num_samples=400, first=first, stop=stop)
    assert total.seconds * 1000 == pytest.approx(milliseconds)


def test_it_adds_up() -> None:
    total = floor()
    for _ in range(3):
        total.add_step(length=16, num_samples=8, first_active=0, enters=0, read_bytes=0)
    total.add_advance(length=16, num_samples=400, first=0, stop=3)
    assert total.seconds == pytest.approx(3 * 0.06 + 0.6)


def test_a_length_that_was_not_timed_adds_nothing() -> None:
    total = floor()
    total.add_step(length=32, num_samples=8, first_active=0, enters=0, read_bytes=0)
    total.add_advance(length=32, num_samples=8, first=0, stop=3)
    assert total.seconds == 0.0
