"""The table of freezing beside not freezing: cells that are kept, times to one target, what is missing."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

import benchmarks.elastic.__main__ as elastic
from benchmarks.elastic.cells import Cell, Figures
from benchmarks.elastic.tasks import BASELINE, DEFAULT, PEER, ROWS, TUNED, Task, texts
from benchmarks.support.kept import KeptRows
from pipetransformer.errors import UserError

ROW = {row.name: row for row in ROWS}


def figures(*curve: tuple[float, float], frozen: tuple[tuple[int, int], ...] = ((0, 0),)) -> Figures:
    return Figures(curve, train_s=curve[-1][0], wall_s=curve[-1][0] + 5, floor_s=0.9 * curve[-1][0], frozen=frozen)


SLOW = figures((10.0, 0.80), (20.0, 0.85), (30.0, 0.86))
FAST = figures((4.0, 0.80), (8.0, 0.857), (12.0, 0.859), frozen=((0, 0), (5, 2), (9, 2), (11, 4)))
MISS = figures((4.0, 0.70), (8.0, 0.75))


@pytest.fixture
def task(tmp_path: Path) -> Task:
    model = tmp_path / "tiny-model"
    model.mkdir()
    return texts(tmp_path / "SST-2", model, num_blocks=12)


def cells_of(task: Task, *names: str, seeds: int = 2) -> list[Cell]:
    return [Cell(task, ROW[name], seed, 2, "float32") for seed in range(seeds) for name in names]


def test_a_cell_has_the_recipe_and_its_own_settings(task: Task) -> None:
    def of(name: str) -> tuple[str, ...]:
        return Cell(task, ROW[name], 3, 2, "bfloat16").settings

    assert {"train.lr=5e-5", "train.seed=3", "train.precision=bfloat16"} <= set(of(BASELINE))
    assert "freeze.policy=none" in of(BASELINE) and "freeze.policy=none" not in of(DEFAULT)
    assert of(TUNED).index("train.lr=1e-4") > of(TUNED).index("train.lr=5e-5"), "what is tuned comes last"
    assert "freeze.max_frozen=6" in of("policy static, half")
    assert set(of(PEER)) == set(of(BASELINE)), "the peer has the same recipe"


def test_a_cell_that_was_measured_is_not_measured_again(
    task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[str] = []

    def run(cell: Cell) -> Figures:
        measured.append(cell.name)
        return SLOW if cell.row.name == BASELINE else FAST

    monkeypatch.setattr(Cell, "_ours", run)
    cells, path = cells_of(task, BASELINE, DEFAULT), tmp_path / "runs.json"
    assert elastic.measured(cells, kept=KeptRows(path), stop=-math.inf) == {}
    first = elastic.measured(cells[:3], kept=KeptRows(path), stop=math.inf)
    found = elastic.measured(cells, kept=KeptRows(path), stop=math.inf)
    assert measured == [cell.name for cell in cells], "each once, row by row of one seed"
    assert {cell: found[cell] for cell in first} == first and found[cells[1]] == FAST
    other = Cell(task, ROW[BASELINE], 0, 1, "float32")
    assert other.found(KeptRows(path)) is None, "other ranks are another cell"


def test_the_table_tells_times_to_one_target_and_what_is_missing(task: Task, tmp_path: Path) -> None:
    cells = cells_of(task, BASELINE, DEFAULT, "freeze only")
    found = {cells[0]: SLOW, cells[3]: SLOW, cells[1]: FAST, cells[4]: FAST, cells[2]: MISS}
    elastic.tell(task, cells, found, folder=tmp_path)
    written = json.loads((tmp_path / f"elastic-{task.name}.json").read_text())
    rows = {row["row"]: row for row in written["rows"]}
    assert rows[BASELINE]["final"] == pytest.approx(0.86) and rows[BASELINE]["±"] == pytest.approx(0)
    assert rows[BASELINE]["to target s"] == 30, "0.857: the second evaluation, 0.85, does not reach it"
    default = rows[DEFAULT]
    assert default["to target s"] == 8 and default["to target, x no freeze"] == 30 / 8
    assert default["x no freeze"] == 30 / 12 and default["reached"] == "2 of 2"
    assert default["to target, x tuned"] is None, "no tuned run is there"
    assert default["frozen blocks at step"] == "2 at 5, 4 at 11"
    missed = rows["freeze only"]
    assert (missed["to target s"], missed["reached"], missed["±"]) == (None, "0 of 1", None)
    assert any("freeze only, seed 1" in note for note in written["notes"])
    assert (tmp_path / f"elastic-{task.name}.png").exists()


def test_the_interval_of_a_mean() -> None:
    assert elastic.half_interval([1.0, 2.0, 3.0]) == pytest.approx(4.303 * 1 / math.sqrt(3), rel=1e-3)
    assert elastic.half_interval([1.0]) is None


def test_without_a_baseline_there_is_no_target(task: Task, tmp_path: Path) -> None:
    cells = cells_of(task, BASELINE, DEFAULT)
    with pytest.raises(UserError, match="--minutes: no run of 'no freeze' has ended"):
        elastic.tell(task, cells, {cells[1]: FAST}, folder=tmp_path)
