"""Ranks are killed at random instants, and the runs end as if nothing had been; the whole of it is a benchmark."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.soak.attempts import Soak, Tally

IN_FULL = (("text", 12), ("digits", 18))


@pytest.mark.parametrize(
    ("task", "kills"), [("text", 4), *(pytest.param(*more, marks=pytest.mark.full) for more in IN_FULL)]
)
def test_killed_runs_end_with_the_same_bits(task: str, kills: int, tmp_path: Path) -> None:
    soak, tally = Soak(task, tmp_path, seed=1), Tally()
    while (left := kills - tally.kills) > 0:
        soak.run(tally, most_kills=min(kills // 2, left))
    assert tally.runs >= 2 and tally.restart
