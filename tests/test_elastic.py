"""The table of freezing beside not freezing: tasks and their rows, cells that are kept, times to one target, what is
missing."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from tiny import tiny_bert
from transformers import AutoModel

import benchmarks.elastic.__main__ as elastic
from benchmarks.elastic import cells as cells_module
from benchmarks.elastic import pooled
from benchmarks.elastic.cells import CODE, Cell, Figures, code_digest
from benchmarks.elastic.pooled import write_pooled
from benchmarks.elastic.redrawn import redraw
from benchmarks.elastic.same_code import confirm, same_codes
from benchmarks.elastic.tasks import (
    BASELINE,
    DEFAULT,
    DEFAULT_TUNED,
    INVERTED,
    OTHER_LAYOUT,
    PEER,
    PLANTED,
    REDRAWN,
    REPLICAS,
    ROWS,
    TOO_DEEP,
    TOO_SOON,
    TOO_SOON_INVERTED,
    TUNED,
    Task,
    pictures,
    questions,
    texts,
)
from benchmarks.support.kept import KeptRows
from pipetransformer.config import load_config
from pipetransformer.errors import UserError
from pipetransformer.freeze import Signals, build_policy, guard

ROW = {row.name: row for row in ROWS}
TODAY = frozenset(map(code_digest, CODE))
Plans = tuple[tuple[int, int, int | None], ...]


def of_today(row: str) -> frozenset[str]:
    return TODAY


def figures(*curve: tuple[float, float], plans: Plans = ((0, 0, None),)) -> Figures:
    last = curve[-1][0]
    return Figures(curve, train_s=last, wall_s=last + 5, floor_s=0.9 * last, plans=plans, steps=12)


SLOW = replace(figures((10.0, 0.80), (20.0, 0.85), (30.0, 0.86)), loss=0.5)
FAST = figures((4.0, 0.80), (8.0, 0.857), (12.0, 0.859), plans=((0, 0, None), (5, 2, None), (9, 2, 2), (11, 4, 2)))
FAST = replace(FAST, loss=0.48)
MISS = figures((4.0, 0.70), (8.0, 0.75))


@pytest.fixture
def task(tmp_path: Path) -> Task:
    model = tmp_path / "tiny-model"
    model.mkdir()
    return texts(tmp_path / "SST-2", model, num_blocks=12)


def split(folder: Path, *, weights: str = "w", timm: Path | None = None) -> Task:
    """The task of pictures, its files in ``folder``."""
    return pictures(folder / "pictures", folder / "model", about="A ViT.", origin=(weights, "p"), timm=timm)


def cells_of(task: Task, *names: str, seeds: int = 2) -> list[Cell]:
    return [Cell(task, ROW[name], seed, 2, "float32") for seed in range(seeds) for name in names]


def test_a_cell_has_the_recipe_and_its_own_settings(task: Task) -> None:
    def of(name: str) -> tuple[str, ...]:
        return Cell(task, ROW[name], 3, 2, "bfloat16").settings

    assert {"train.lr=5e-5", "train.seed=3", "train.precision=bfloat16"} <= set(of(BASELINE))
    assert "freeze.policy=none" in of(BASELINE) and "freeze.policy=none" not in of(DEFAULT)
    layouts = [set(of(name)) for name in (BASELINE, OTHER_LAYOUT)]
    assert layouts[0] ^ layouts[1] == {REPLICAS, "pipe.initial_length=2"}, "both static layouts of two ranks"
    for name in (TUNED, DEFAULT_TUNED):
        assert of(name).index("train.lr=1e-4") > of(name).index("train.lr=5e-5"), "what is tuned comes last"
        assert task.epochs_of(ROW[name]) == 2 and ("freeze.policy=none" in of(name)) == (name == TUNED)
    assert task.epochs_of(ROW[DEFAULT]) == task.epochs == 3
    assert "freeze.max_frozen=6" in of("policy static, half")
    assert set(of(PEER)) == set(of(BASELINE)), "the peer has the same recipe"


def test_faults_are_planted_in_the_longer_runs(tmp_path: Path) -> None:
    data, model = tmp_path / "SST-2", tmp_path / "model"
    six, task = (texts(data, model, num_blocks=blocks, num_phrases=8000) for blocks in (6, 12))
    of_six = [BASELINE, PEER, DEFAULT, INVERTED, TOO_SOON, TOO_SOON_INVERTED]
    assert [row.name for row in elastic.rows_of(six, None)] == of_six
    guarded, inverted = (next(row for row in PLANTED if row.name == name) for name in (TOO_SOON, TOO_SOON_INVERTED))
    soon = load_config(six.config, Cell(six, guarded, 0, 2, "float32").settings)
    assert (soon.freeze.policy, soon.freeze.guard) == ("schedule", True)
    assert guarded.overrides == inverted.overrides and guarded.script is None and inverted.script is not None
    rows = {row.name: Cell(task, row, 0, 2, "float32").settings for row in elastic.rows_of(task, None)}
    assert list(rows) == [BASELINE, PEER, DEFAULT, REDRAWN, TOO_DEEP]
    redrawn = (f"model.name={tmp_path}/redrawn", REPLICAS, "train.seed=0", "train.precision=float32")
    assert rows[REDRAWN][-4:] == redrawn
    deep = load_config(task.config, rows[TOO_DEEP])
    assert (deep.freeze.policy, deep.freeze.max_frozen, deep.freeze.guard) == ("static", 11, True)
    assert str(deep.train.eval_every) == "180 steps"


def test_half_of_the_blocks_are_redrawn(tmp_path: Path) -> None:
    tiny_bert(tmp_path / "bert", layers=4)
    redraw(tmp_path / "bert", tmp_path / "redrawn", num_blocks=2)
    old, new = (AutoModel.from_pretrained(tmp_path / name).state_dict() for name in ("bert", "redrawn"))
    matrices = [name for name in old if name.endswith("query.weight")]
    assert [torch.equal(old[name], new[name]) for name in matrices] == [False, False, True, True]
    assert all(torch.equal(old[name], new[name]) for name in old if "encoder" not in name)


def test_an_inverted_guard_keeps_what_it_should_undo() -> None:
    """As it is run: the module's own lines, on a job that does nothing but judge."""
    from benchmarks.elastic import inverted_guard

    judged: list[bool] = []
    source = Path(inverted_guard.__file__).read_text()
    told = mock.patch("pipetransformer.launch.entry.main", lambda task: judged.append(guard.is_worse(2.0, 1.0, 0.1)))
    with told, pytest.raises(SystemExit):
        exec(compile(source, "inverted_guard.py", "exec"), {"__name__": "__main__"})
    assert judged == [False] and guard.is_worse(2.0, 1.0, 0.1) and not guard.is_worse(1.05, 1.0, 0.1)


def test_recipes_are_chosen_by_other_data_and_seeds(tmp_path: Path) -> None:
    task = texts(tmp_path, tmp_path / "minilm", num_blocks=6, tunes=True)
    rows = elastic.rows_of(task, None)
    recipes = [row for row in rows if row.name.startswith("lr ")]
    assert rows[0].name == BASELINE and len(recipes) == 6 and len(rows) == 12
    assert [row.name for row in recipes[:2]] == [f"lr 1e-4, epochs {epochs}" for epochs in (1, 2)]
    config = load_config(task.config, Cell(task, recipes[-1], 100, 2, "float32").settings)
    assert (config.train.lr, config.train.epochs, config.freeze.policy) == (4e-4, 2, "none")
    assert config.data.path == str(tmp_path / "100"), "sentences and phrases drawn by the seed"
    assert task.margin == 0.003, "a recipe is tuned for the time to a target"
    other, larger = (texts(tmp_path, tmp_path / "minilm", num_blocks=6, num_phrases=n) for n in (2000, 8000))
    assert len({task.name, other.name, larger.name, *(t.origin for t in (task, other, larger))}) == 6
    longer = texts(tmp_path, tmp_path / "e5", num_blocks=12, num_phrases=6000, tunes=True)
    assert longer.name == "sst2-e5-6000-tuning"
    assert {"frozen 2 at 1, 10 at 0.05", "frozen 4 at 0.5, 10 at 0.05"} <= {*longer.row_names}
    about = dict(about="A ViT.", origin=("w", "p"), timm=None, tunes=True)
    names = [row.name for row in elastic.rows_of(pictures(tmp_path, tmp_path / "vit", **about), None)]
    assert (names[0], names[1], names[4]) == (BASELINE, "lr 5e-4, epochs 4", "lr 1e-3, epochs 6") and len(names) == 11


def test_each_seed_of_a_tuning_gets_data_of_its_own(tmp_path: Path) -> None:
    tiny_bert(tmp_path / "bert", layers=6)
    call = ["--sst2", str(tmp_path), "--model", str(tmp_path / "bert"), "--seeds", "2"]
    for more, expected in (
        (["--tune"], [("100", "tuned", 100, 2000), ("101", "tuned", 101, 2000)]),
        (["--tune", "--phrases", "6000"], [("100", "tuned", 100, 6000), ("101", "tuned", 101, 6000)]),
        (["--tune", "--first-seed", "7"], [("107", "tuned", 107, 2000), ("108", "tuned", 108, 2000)]),
        ([], [("SST-2", "judged", 0, 2000)]),
    ):
        with mock.patch.object(elastic, "hold_out") as written:
            arguments = elastic.make_parser().parse_args([*call, *more])
            elastic.make_task("sst2", arguments, precision="float32", scratch=tmp_path)
        calls = [(each.args[1].name, each.kwargs) for each in written.mock_calls]
        told = [(name, given["part"], given.get("seed", 0), given["num_train"]) for name, given in calls]
        assert told == expected


def test_a_run_of_ours_tells_its_last_loss(task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(arguments: Sequence[str], **_: object) -> None:
        (folder,) = [each.removeprefix("run.dir=") for each in arguments if each.startswith("run.dir=")]
        (Path(folder) / "cell").mkdir()
        summary = {"train_s": 2.0, "wall_s": 3.0, "compute_floor_s": 1.0, "steps": 4}
        (Path(folder) / "cell" / "summary.json").write_text(json.dumps(summary))
        told: list[dict[str, object]] = [
            {"event": "evaluation", "train_s": step, "metrics": {"accuracy": 0.5, "loss": 1 / step}} for step in (1, 2)
        ]
        told += [{"event": "guard", "seconds": 0.25}] * 2
        (Path(folder) / "cell" / "events.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in told))

    monkeypatch.setattr(cells_module, "launch", write)
    found = Cell(task, ROW[DEFAULT], 0, 2, "float32").measure(KeptRows(tmp_path / "runs.json"))
    assert (found.loss, found.final, found.train_s, found.guard_s) == (0.5, 0.5, 2.0, 0.5)


def test_ways_to_freeze_are_tried_by_a_ladder(tmp_path: Path) -> None:
    """So many blocks from each share of the learning rates' sum on."""
    task = texts(tmp_path, tmp_path / "e5", num_blocks=12, tunes=True)
    (row,) = [row for row in elastic.rows_of(task, None) if row.name == "frozen 4 at 1, 6 at 0.5, 10 at 0.05"]
    config = load_config(task.config, Cell(task, row, 100, 2, "float32").settings)
    policy = build_policy(config.freeze, num_blocks=12)
    assert policy is not None and not config.freeze.guard and row.seeds == 8
    shares = (1.0, 0.5, 0.45, 0.2, 0.05, 0.0)
    assert [policy.decide(Signals(0, 0, to_come=share)) for share in shares] == [4, 6, 6, 6, 10, 10]


def test_a_cell_that_was_measured_is_not_measured_again(
    task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[str] = []

    def run(cell: Cell) -> Figures:
        measured.append(cell.name)
        return SLOW if cell.row.name == BASELINE else FAST

    monkeypatch.setattr(Cell, "_ours", run)
    cells, path = cells_of(task, BASELINE, DEFAULT), tmp_path / "runs.json"
    assert elastic.measured(cells, kept=KeptRows(path), stop=-math.inf, codes=of_today) == {}
    first = elastic.measured(cells[:3], kept=KeptRows(path), stop=math.inf, codes=of_today)
    found = elastic.measured(cells, kept=KeptRows(path), stop=math.inf, codes=of_today)
    assert measured == [cell.name for cell in cells], "each once, row by row of one seed"
    assert {cell: found[cell] for cell in first} == first and found[cells[1]] == FAST
    other = Cell(task, ROW[BASELINE], 0, 1, "float32")
    assert other.found(KeptRows(path), codes=TODAY) is None, "other ranks are another cell"


def test_the_peer_runs_with_freed_memory_kept(task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ours does for itself."""
    found: dict[str, str | None] = {}

    def run(cell: Cell) -> Figures:
        found[cell.row.name] = os.environ.get("MALLOC_TRIM_THRESHOLD_")
        return SLOW

    monkeypatch.delenv("MALLOC_TRIM_THRESHOLD_", raising=False)
    monkeypatch.setattr(Cell, "_ours", run)
    monkeypatch.setattr(Cell, "_trainer", run)
    cells, kept = cells_of(task, BASELINE, PEER, seeds=1), KeptRows(tmp_path / "runs.json")
    elastic.measured(cells, kept=kept, stop=math.inf, codes=of_today)
    assert found == {BASELINE: None, PEER: str(2**62)} and PEER.endswith("freed memory kept")


def test_a_peer_s_cells_depend_on_the_code_that_the_peer_goes_through(
    task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, peer = cells_of(task, BASELINE, PEER, seeds=1)
    (timms,) = cells_of(split(tmp_path, timm=tmp_path / "train.py"), PEER, seeds=1)
    assert [cell.code for cell in (ours, peer, timms)] == [code_digest(who) for who in ("ours", "Trainer", "timm")]
    patterns = [" ".join(CODE[who]) for who in ("ours", "Trainer", "timm")]
    assert [("pipetransformer/**/*.py" in own, "hf_trainer" in own, "timm_train" in own) for own in patterns] == [
        *((True, False, False), (False, True, False), (False, False, True)),
    ]
    kept = KeptRows(tmp_path / "runs.json")
    monkeypatch.setattr(Cell, "run", lambda cell: SLOW)
    elastic.measured([ours, peer], kept=kept, stop=math.inf, codes=of_today)
    rows = json.loads((tmp_path / "runs.json").read_text())["rows"]
    assert [row["code"] for row in rows] == [ours.code, peer.code]
    for cell in (ours, peer):
        kept.keep(cell.name, cell.key, {**asdict(SLOW), "code": "older"})
    with pytest.raises(UserError, match="and no peer beside others"):
        confirm([ours, peer], kept=kept, folder=tmp_path)


def test_code_by_which_cells_learn_the_same_counts_as_today_s(
    task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the last bit of what they learn; seconds may differ."""
    cells, kept, now = cells_of(task, BASELINE, DEFAULT, seeds=1), KeptRows(tmp_path / "runs.json"), [SLOW, FAST]
    for cell, learned in zip(cells, now):
        kept.keep(cell.name, cell.key, {**asdict(learned), "code": "older"})
    assert elastic.measured(cells, kept=kept, stop=-math.inf, codes=partial(same_codes, tmp_path, task=task.name)) == {}
    otherwise = replace(FAST, curve=((4.0, 0.80), (8.0, 0.857), (12.0, 0.8590001)))
    answers = iter([SLOW, otherwise, replace(SLOW, cpu="another"), replace(SLOW, train_s=99.0), FAST])
    monkeypatch.setattr(Cell, "run", lambda cell: next(answers))
    for complaint in ("default, seed 0 learns otherwise.* run it alone.* or measure all", "only the same processor"):
        with pytest.raises(UserError, match=complaint):
            confirm(cells, kept=kept, folder=tmp_path)
    confirm(cells, kept=kept, folder=tmp_path)
    assert same_codes(tmp_path, DEFAULT, task=task.name) == TODAY | {"older"}
    for row, other in ((DEFAULT, "another"), (TUNED, task.name)):
        assert same_codes(tmp_path, row, task=other) == TODAY, "it may go through what changed"
    found = elastic.measured(cells, kept=kept, stop=-math.inf, codes=partial(same_codes, tmp_path, task=task.name))
    assert list(found.values()) == now, "those that were measured first"
    with pytest.raises(UserError, match="cells of 0 older codes"):
        confirm(cells, kept=kept, folder=tmp_path)


def test_the_table_tells_times_to_one_target_and_what_is_missing(task: Task, tmp_path: Path) -> None:
    cells = cells_of(task, BASELINE, DEFAULT, "schedule, freeze only")
    found = {cells[0]: SLOW, cells[3]: SLOW, cells[1]: FAST, cells[4]: FAST, cells[2]: MISS}
    elastic.tell(task, cells, found, folder=tmp_path)
    written = json.loads((tmp_path / f"elastic-{task.name}.json").read_text())
    rows = {row["row"]: row for row in written["rows"]}
    assert rows[BASELINE]["final"] == pytest.approx(0.86) and rows[BASELINE]["±"] == pytest.approx(0)
    assert rows[BASELINE]["to target s"] == 30, "0.857: the second evaluation, 0.85, does not reach it"
    default = rows[DEFAULT]
    assert default["to target s"] == 8 and default["to target, x no freeze"] == "3.75 [3.75 .. 3.75]"
    assert default["x no freeze"] == "2.50 [2.50 .. 2.50]" and default["reached"] == "2 of 2"
    assert default["to target, x tuned"] is None, "no tuned run is there"
    assert default["frozen blocks at step"] == "2 at 5, 4 at 11"
    other = replace(FAST, plans=((0, 0, None), (5, 2, None)))
    assert elastic.frozen_over_time([FAST, other, FAST]) == "2 at 5, 4 at 11 (2 of 3)"
    assert default["less no freeze"] == pytest.approx(-0.001) and default["± of it"] == pytest.approx(0, abs=1e-9)
    # 5 steps in full, 4 and 2 of 10 blocks, once with the forward of 2 more, 1 of 8 and 2 more; one pass over 2 blocks.
    cost = 3 / 12 * (5 + 4 * (10 + 2 / 3) / 12 + 2 * 10 / 12 + (8 + 2 / 3) / 12) + 2 / 36
    assert default["bound"] == pytest.approx(3 / cost) and rows[BASELINE]["bound"] == pytest.approx(1)
    assert default["loss less"] == pytest.approx(-0.02) and default["± of that"] == pytest.approx(0, abs=1e-9)
    assert rows[BASELINE]["loss less"] is None and rows["schedule, freeze only"]["loss less"] is None, "none is known"
    missed = rows["schedule, freeze only"]
    assert (missed["to target s"], missed["reached"], missed["±"]) == (None, "0 of 1", None)
    assert any("schedule, freeze only, seed 1" in note for note in written["notes"])
    assert (tmp_path / f"elastic-{task.name}.png").exists()


def test_a_bound_counts_the_epochs_of_its_row(task: Task, tmp_path: Path) -> None:
    """One pass over the blocks of the cache is a larger part of fewer epochs."""
    cells = cells_of(task, BASELINE, DEFAULT_TUNED, seeds=1)
    elastic.tell(task, cells, dict(zip(cells, (SLOW, FAST))), folder=tmp_path)
    _, tuned = json.loads((tmp_path / f"elastic-{task.name}.json").read_text())["rows"]
    cost = 2 / 12 * (5 + 4 * (10 + 2 / 3) / 12 + 2 * 10 / 12 + (8 + 2 / 3) / 12) + 2 / 36
    assert tuned["bound"] == pytest.approx(2 / cost)


def test_runs_of_a_machine_without_bfloat16_lie_beside_the_others(
    task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Cell, "run", lambda cell: SLOW)
    monkeypatch.setattr(elastic, "make_task", lambda *_, **__: task)
    of_task = ["--sst2", "SST-2", "--model", "minilm", "--rows", BASELINE, "--seeds", "1"]
    monkeypatch.setattr(sys, "argv", ["elastic", *of_task, "--output", str(tmp_path)])
    for has in (True, False):
        monkeypatch.setattr(elastic, "has_bfloat16", lambda _, has=has: has)
        elastic.main()
    runs = sorted(path.name for path in tmp_path.glob("*-runs.json"))
    assert runs == [f"elastic-{task.name}-float32-runs.json", f"elastic-{task.name}-runs.json"]


def test_a_seed_alone_and_the_table_of_what_is_kept(
    task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[int] = []

    def run(cell: Cell) -> Figures:
        measured.append(cell.seed)
        return SLOW

    monkeypatch.setattr(Cell, "run", run)
    monkeypatch.setattr(elastic, "make_task", lambda *_, **__: task)
    own = ["elastic", "--sst2", "SST-2", "--model", "minilm", "--rows", BASELINE, "--output", str(tmp_path)]
    for more in (["--seeds", "1", "--first-seed", "2"], ["--seeds", "3", "--minutes", "0"]):
        monkeypatch.setattr(sys, "argv", [*own, *more])
        elastic.main()
    assert measured == [2]
    (table,) = (path for path in tmp_path.glob("*.json") if not path.name.endswith("-runs.json"))
    told = json.loads(table.read_text())
    missing = [note for note in told["notes"] if note.startswith("Missing: ")]
    assert told["rows"][0]["seeds"] == 1 and [each[-7:] for each in missing[0].split(";")] == [" seed 0", "seed 1."]


def test_a_ratio_is_of_one_seed_on_one_processor() -> None:
    theirs = {0: replace(SLOW, train_s=30.0), 1: replace(SLOW, train_s=40.0), 2: replace(SLOW, train_s=90.0)}
    ours = {0: replace(FAST, train_s=10.0), 1: replace(FAST, train_s=20.0), 2: replace(FAST, cpu="another")}
    ours[3] = FAST
    assert elastic.ratios(theirs, ours, "train_s") == "2.50 [2.00 .. 3.00]"
    assert elastic.ratios({}, ours, "train_s") is None
    assert len(elastic.pairs_of(theirs, ours)) == 3, "accuracies are compared"
    assert elastic.pairs_of(theirs, {0: replace(FAST, start="others")}) == [], "but not of other weights"
    assert elastic.target_ratios(theirs, ours, target=0.857) == "3.75 [3.75 .. 3.75]"
    assert elastic.target_ratios(theirs, {**ours, 1: MISS, 2: MISS}, target=0.857) is None, "half of ours miss it"


def test_the_interval_of_a_mean() -> None:
    assert elastic.half_interval([1.0, 2.0, 3.0]) == pytest.approx(4.303 * 1 / math.sqrt(3), rel=1e-3)
    assert elastic.half_interval([1.0]) is None


def test_tasks_are_judged_together_by_pairs_of_a_seed(tmp_path: Path) -> None:
    finals = {"a": {BASELINE: [0.8, 0.9], DEFAULT: [0.79, 0.91], PEER: [0.1, 0.2], "policy paper": [0.1]}}
    finals["b"] = {BASELINE: [0.5, 0.6, 0.7], DEFAULT: [0.49, 0.57, 0.68]}
    for task, rows in finals.items():
        kept = KeptRows(tmp_path / f"elastic-{task}-runs.json")
        for name, own in rows.items():
            for seed, final in enumerate(own):
                row = {"curve": [[1.0, 0.2], [2.0, final]], "start": "", "code": code_digest()}
                kept.keep(f"{task}, {name}, seed {seed}", f"{name} {seed}", row)
        kept.keep(f"{task}, {DEFAULT}, seed 9", "9", {"curve": [[1.0, 0.0]], "start": "", "code": "older"})
        kept.keep(f"{task}, {BASELINE}, seed 9", "8", {"curve": [[1.0, 0.9]], "start": "", "code": code_digest()})
    write_pooled(["a", "b"], folder=tmp_path)
    (row,) = json.loads((tmp_path / "elastic-pooled.json").read_text())["rows"]
    assert (row["row"], row["pairs"], row["as good"]) == (DEFAULT, 5, "yes")
    assert row["points"] == pytest.approx(-1.2) and row["a"] == pytest.approx(0) and row["b"] == pytest.approx(-2)
    # Student's t of 4 degrees of freedom; the deviations from -1.2 are 0.2, 2.2, 0.2, -1.8 and -0.8.
    assert row["±"] == pytest.approx(2.1318 * math.sqrt((0.04 + 4.84 + 0.04 + 3.24 + 0.64) / 4 / 5), rel=1e-4)
    another = mock.patch.object(pooled, "same_codes", lambda folder, row, task: frozenset({"another"}))
    with another, pytest.raises(UserError, match="today's code"):
        write_pooled(["a", "b"], folder=tmp_path)
    with pytest.raises(UserError, match="^--pool: .*elastic-c-runs.json does not hold the runs of c; measure it first"):
        write_pooled(["a", "c"], folder=tmp_path)


def test_without_a_baseline_there_is_no_target(task: Task, tmp_path: Path) -> None:
    cells = cells_of(task, BASELINE, DEFAULT)
    with pytest.raises(UserError, match="--minutes: no run of 'no freeze' has ended"):
        elastic.tell(task, cells, {cells[1]: FAST}, folder=tmp_path)


# ---- tasks -----------------------------------------------------------------------------------------------------------


def test_two_tasks_have_all_rows(tmp_path: Path) -> None:
    few = {BASELINE, OTHER_LAYOUT, TUNED, PEER, DEFAULT, DEFAULT_TUNED, "default, no cache", "policy static, half"}
    script = tmp_path / "train.py"
    assert set(split(tmp_path, timm=script).row_names) == few
    assert set(split(tmp_path).row_names) == few - {PEER} and "--timm-train" in split(tmp_path).about
    for num_blocks in (6, 12):
        assert set(texts(tmp_path, tmp_path / "model", num_blocks=num_blocks).row_names) == set(ROW)
    asked = questions(tmp_path, tmp_path / "e5", num_blocks=12)
    assert set(asked.row_names) == few - {OTHER_LAYOUT, TUNED, DEFAULT_TUNED, "default, no cache"}


def test_every_row_is_a_configuration(tmp_path: Path) -> None:
    tasks = (
        split(tmp_path),
        texts(tmp_path, tmp_path / "e5", num_blocks=12),
        questions(tmp_path, tmp_path / "e5", num_blocks=12),
    )
    for task in tasks:
        for name in task.row_names:
            config = load_config(task.config, Cell(task, ROW[name], 1, 2, "float32").settings)
            assert (config.train.seed, config.checkpoint.every) == (1, None)
            assert name != "policy static, half" or config.freeze.max_frozen == 6


def test_timm_and_ours_have_one_schedule(tmp_path: Path) -> None:
    """Its script evaluates behind epochs alone, and falls along a cosine from the first step on."""
    task = split(tmp_path)
    config = load_config(task.config, Cell(task, ROW[BASELINE], 0, 2, "float32").settings)
    assert str(config.train.eval_every) == "1 epoch" and config.data.augment == "none"
    assert (config.train.lr_schedule, config.train.warmup_ratio, config.train.optimizer) == ("cosine", 0, "adamw")


def test_models_of_other_sizes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="^--model: .*bert has 4 blocks; give an encoder of 6 or 12$"):
        texts(tmp_path, tmp_path / "bert", num_blocks=4)


def test_a_cell_depends_on_content_and_not_on_places(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("one")

    def key(name: str, task: Task) -> str:
        return Cell(task, ROW[name], 0, 2, "float32").key

    first, elsewhere = (split(tmp_path / name, timm=script) for name in "ab")
    assert key(BASELINE, first) == key(BASELINE, elsewhere)
    assert key(BASELINE, first) != key(BASELINE, split(tmp_path / "a", weights="v", timm=script))
    assert key(BASELINE, first) == key(BASELINE, replace(first, start="of another processor"))
    assert key(BASELINE, first) == key(BASELINE, split(tmp_path / "a")), "only the peer is timm's"
    assert key(BASELINE, first) != key(BASELINE, replace(first, overrides=(*first.overrides, "train.lr=1")))
    before = key(PEER, first)
    script.write_text("another")
    assert key(PEER, first) != before


def test_timm_s_script_is_the_peer_of_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, given = tmp_path / "train.py", list[str]()
    script.touch()

    def launch(arguments: Sequence[str], *, ranks: int, name: str, variables: Mapping[str, str]) -> str:
        given.extend(arguments)
        assert variables == {"TIMM_FUSED_ATTN": "0"}
        output = Path(arguments[arguments.index("--output") + 1]) / "run"
        output.mkdir(parents=True)
        (output / "summary.csv").write_text("epoch,eval_top1\n0,50.0\n1,75.0\n")
        return "".join(f"Train: {n} [ 9/10 (100%)]  Time: 2.0s, 1/s  (2.000s, 1/s)\n" for n in range(2))

    monkeypatch.setattr(cells_module, "launch", launch)
    monkeypatch.setattr(cells_module, "faster_attention", lambda config, *, ranks: {"TIMM_FUSED_ATTN": "0"})
    monkeypatch.setattr(cells_module, "write_class_folders", lambda config, folder: None)
    monkeypatch.setattr(cells_module, "arguments_of", lambda config, *, output, **_: ["--output", str(output)])
    cell = Cell(split(tmp_path, timm=script), ROW[PEER], 0, 2, "float32")
    found = cell.measure(KeptRows(tmp_path / "runs.json"))
    assert given[1] == str(script) and found.curve == ((20.0, 0.5), (40.0, 0.75)) and found.train_s == 40
    assert cell.found(KeptRows(tmp_path / "runs.json"), codes=TODAY) == found


def test_without_a_margin_there_is_no_target(tmp_path: Path) -> None:
    task = questions(tmp_path, tmp_path / "e5", num_blocks=12)
    cells = cells_of(task, BASELINE, DEFAULT, seeds=1)
    elastic.tell(task, cells, {cells[0]: SLOW, cells[1]: FAST}, folder=tmp_path)
    written = json.loads((tmp_path / f"elastic-{task.name}.json").read_text())
    told = written["rows"][1]
    assert (told["x no freeze"], told["to target s"], told["reached"], told["to target, x no freeze"]) == (
        *("2.50 [2.50 .. 2.50]", None, None, None),
    )
    assert written["notes"][0].startswith("No target.")
    with pytest.raises(UserError, match="^--minutes: no run has ended; give more"):
        elastic.tell(task, cells, {}, folder=tmp_path)


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ([], "--sst2: missing; give one of --sst2, --cifar100 and --squad"),
        (["--sst2", ".", "--cifar100", "."], "--cifar100: cannot go with --sst2; give one of"),
        (["--squad", "."], "--model: missing; give --squad the folder of a saved encoder"),
        (["--squad", ".", "--tune"], "--tune: it has no effect with --squad; leave it out"),
        (
            ["--cifar100", ".", "--tune", "--timm-train", "."],
            "--timm-train: it has no effect with --tune; leave it out",
        ),
        (["--cifar100", ".", "--model", "."], "--model: it has no effect with --cifar100; leave it out"),
        (["--cifar100", ".", "--timm-train", "nowhere.py"], "--timm-train: nowhere.py is no file; give timm's"),
        (
            ["--cifar100", ".", "--rows", PEER],
            "--rows: 'the peer, freed memory kept' of --cifar100 is timm's",
        ),
        (["--sst2", ".", "--model", ".", "--timm-train", "x"], "--timm-train: it has no effect with --sst2; leave"),
        (["--sst2", ".", "--model", ".", "--rows", DEFAULT], "--rows: 'no freeze' sets the target; add it, what is"),
    ],
)
def test_options_that_do_not_fit_are_refused(given: list[str], line: str, tmp_path: Path) -> None:
    parser = elastic.make_parser()
    with pytest.raises(UserError) as caught:
        elastic.chosen_task(parser, parser.parse_args([*given, "--output", str(tmp_path)]))
    assert str(caught.value).startswith(line) and "\n" not in str(caught.value)


def test_rows_that_need_no_target_need_no_baseline() -> None:
    parser = elastic.make_parser()
    for given in (["--sst2", ".", "--confirm"], ["--squad", "."]):
        chosen = elastic.chosen_task(parser, parser.parse_args([*given, "--model", ".", "--rows", DEFAULT]))
        assert f"--{chosen}" == given[0]


def test_a_row_that_a_task_has_not_is_refused(tmp_path: Path) -> None:
    task = questions(tmp_path, tmp_path / "e5", num_blocks=12)
    assert [row.name for row in elastic.rows_of(task, None)] == [name for name in ROW if name in task.row_names]
    assert [row.name for row in elastic.rows_of(task, [DEFAULT, BASELINE])] == [BASELINE, DEFAULT]
    with pytest.raises(UserError, match="^--rows: questions-e5 has no '. AutoDP'; give some of 'no freeze', "):
        elastic.rows_of(task, ["+ AutoDP"])
