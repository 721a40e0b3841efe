"""Ranks are killed at random instants, and the runs end as if nothing had been; the whole of it is a benchmark."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.soak.attempts import Soak, Tally

KILLS = {"digits": 18, "text": 12}


@pytest.mark.parametrize("task", ["text", pytest.param("digits", marks=pytest.mark.full)])
def test_killed_runs_end_with_the_same_bits(task: str, tmp_path: Path) -> None:
    soak, tally = Soak(task, tmp_path, seed=1), Tally()
    while (left := KILLS[task] - tally.kills) > 0:
        soak.run(tally, most_kills=min(9, left))
    assert tally.runs >= 2 and tally.restart
