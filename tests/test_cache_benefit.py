"""The benchmark of the cache beside no cache: its runs differ by the cache alone, and its table tells who is slower."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from benchmarks.cache_benefit import __main__ as cache_benefit
from benchmarks.cache_benefit.__main__ import CASES, Case, Pair, Plan, Timed, once, table
from benchmarks.support.kept import KeptRows
from pipetransformer.config import load_config

TEXTS, PICTURES = CASES[0], CASES[-1]


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return Plan(tmp_path / "SST-2", tmp_path / "model", 12, "float32")


def pair(cached: float, plain: float, boundary: int | None = 4) -> Pair:
    return Pair(Timed(cached, cached + 10, boundary), Timed(plain, plain + 10, None))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_settings_of_cases_are_read(plan: Plan, case: Case) -> None:
    config = load_config(case.config, plan.settings(case, seed=3))
    assert config.train.seed == 3 and config.cache.enabled and case.entry.exists()
    assert config.freeze.max_frozen in (None, 2, 6)
    assert config.cache.disk_budget is not None, "as where nothing is said"


@pytest.mark.parametrize("case", [TEXTS, PICTURES], ids=["texts", "pictures"])
def test_runs_of_a_pair_differ_by_the_cache(plan: Plan, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[bool, list[tuple[str, ...]]] = {True: [], False: []}
    cores: dict[bool, list[set[int]]] = {True: [], False: []}

    def launch(script: Sequence[str], *, ranks: int, name: str, variables: Mapping[str, str]) -> str:
        folder = Path(script[-2].removeprefix("run.dir="))
        assert variables["PIPETRANSFORMER_CACHE"].startswith(str(folder)), "nothing that another run has stored"
        is_cached = "cache.enabled=true" in script
        (folder / "one").mkdir()
        (folder / "one" / "summary.json").write_text(json.dumps({"train_s": 2.0 if is_cached else 3.0}))
        plans = [{"event": "plan", "plan": {"cached": held if is_cached else None}} for held in (2, 4)]
        (folder / "one" / "events.jsonl").write_text("\n".join(map(json.dumps, plans)))
        given[is_cached].append(tuple(each for each in script[:-2] if "cache.enabled" not in each))
        cores[is_cached].append(os.sched_getaffinity(0))
        return ""

    monkeypatch.setattr(cache_benefit, "launch", launch)
    before = os.sched_getaffinity(0)
    for seed in (0, 1):
        found = plan.measure(case, seed=seed)
        assert (found.cached.train_s, found.plain.train_s) == (2.0, 3.0)
        assert (found.cached.boundary, found.plain.boundary) == (4, None)
    assert given[True] == given[False]
    assert cores[True] == cores[False][::-1] and cores[True][0].isdisjoint(cores[False][0]), "they change cores"
    assert os.sched_getaffinity(0) == before


def test_a_pair_is_measured_once(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Plan, "measure", lambda self, case, seed: pair(2.0, 4.0))
    path = tmp_path / "pairs.json"
    assert once(plan, TEXTS, 0, kept=KeptRows(path), stop=-math.inf) is None
    first = once(plan, TEXTS, 0, kept=KeptRows(path), stop=math.inf)
    assert once(plan, TEXTS, 0, kept=KeptRows(path), stop=-math.inf) == first == pair(2.0, 4.0)
    assert once(plan, TEXTS, 1, kept=KeptRows(path), stop=-math.inf) is None


def test_ratios_are_of_one_pair() -> None:
    rows = table({"a": [pair(9.0, 10.0), pair(22.0, 20.0)], "b": [], "c": [pair(5.0, 5.0, None)]})
    assert [row["case"] for row in rows] == ["a", "c"]
    both, alone = rows
    assert (both["mean"], both["ratio"]) == (1.0, "1.000 [0.900 .. 1.100]")
    assert both["upper end"] == pytest.approx(1.0 + 6.314 * 0.1, abs=1e-3), "Student's t of one degree, 90 %"
    assert both["cached blocks"] == "4" and alone["cached blocks"] == "None" and alone["upper end"] is None
