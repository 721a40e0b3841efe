"""The benchmark of signals: each rule on plain numbers, a run that notes them all, and the safe depth."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from laws import REPOSITORY
from tiny import tiny_bert, tiny_sst2

from benchmarks.elastic.cells import Cell
from benchmarks.elastic.judged import is_as_good
from benchmarks.elastic.processes import launch
from benchmarks.elastic.tasks import texts
from benchmarks.signals import __main__ as signals
from benchmarks.signals import rules
from pipetransformer.errors import UserError


def test_each_rule_names_a_number_of_leading_blocks() -> None:
    assert rules.by_norm([3.0, 2.0, 0.5, 1.0]) == 2
    assert rules.by_change([1.0, 2.0, 6.0, 4.0], [1.0, 2.1, 4.0, 3.9]) == 1, "changes 0, 0.05, 0.5 and 0.03"
    assert rules.by_agreement([-0.2, 0.05, 0.5, 0.0]) == 2 and rules.by_agreement([0.0, 0.0]) == 2
    assert rules.by_plasticity([1.0, 1.0, 1.0], [0.1, 0.6, 0.1]) == 1
    # Progress for the blocks that train: 12 / 4, 12 / 3, 9 / 2, 4 / 1.
    assert rules.by_progress([0.0, 3.0, 5.0, 4.0]) == 2


def test_similarities_change_with_directions_and_not_with_sizes() -> None:
    features = np.random.default_rng(0).normal(size=(6, 4))
    assert rules.similarity_change(features * 3, features) == pytest.approx(0)
    turned = features @ np.linalg.qr(np.random.default_rng(1).normal(size=(4, 4)))[0]
    assert rules.similarity_change(turned, features) == pytest.approx(0), "all samples turn alike"
    assert rules.similarity_change(features[::-1].copy(), features) > 0.01


def test_safe_is_the_last_before_the_first_loss() -> None:
    finals = {0: [0.9, 0.8], 1: [0.88, 0.83], 2: [0.905, 0.79], 3: [0.894, 0.795], 4: [0.95, 0.85]}
    assert signals.safe_depth(finals) == 2, "2 loses a quarter of a point, 3 more than half a point; 4 lies behind it"
    assert signals.safe_depth({0: [0.9, 0.8], 1: [0.89, 0.8]}) == 0, "half a point, though two seeds tell little"
    assert signals.safe_depth({0: [0.9], 1: []}) is None


def test_a_seed_with_a_missing_run_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pair is of one seed."""

    def found(self: Cell, kept: object, *, codes: object) -> object:
        missing = self.seed == 1 and self.row.name == "static 4"
        return None if missing else mock.Mock(final=self.seed + len(self.row.name) / 100)

    monkeypatch.setattr(Cell, "found", found)
    task = texts(tmp_path, tmp_path / "e5", num_blocks=12)
    arguments: dict[str, Any] = {"kept": None, "stop": 0.0, "precision": "float32", "codes": lambda name: ()}
    finals, missing = signals.measured(task, range(3), **arguments)
    assert len(missing) == 1 and [[int(final) for final in of_number] for of_number in finals.values()] == [[0, 2]] * 6


@pytest.mark.parametrize(
    ("differences", "expected"),
    [
        ([0.001, -0.002, 0.003], True),
        ([-0.001, -0.0012, -0.0008], False),  # surely below 0
        ([-0.009, 0.001], True),  # -0.4 points, by two runs that tell little
        ([-0.0015, -0.0025, -0.0065, -0.0035], False),
        ([-0.01], None),
    ],
)
def test_as_good_as_no_freezing(differences: list[float], expected: bool | None) -> None:
    assert is_as_good(differences) is expected


def test_the_table_tells_how_far_each_rule_is_off(tmp_path: Path) -> None:
    task = texts(tmp_path, tmp_path / "e5", num_blocks=12)
    means = {0: 0.86, 2: 0.86, 4: 0.859, 6: 0.858, 8: 0.84, 10: 0.8}
    # From the second number on, differences of two seeds are the mean, 0.4 points more or less.
    finals = {n: [mean, mean + (0.004 if n else 0.0)] for n, mean in means.items()}
    told = [{"depths": {"norm": 11, "linear probe": 8}}, {"depths": {"norm": 11, "linear probe": 4}}]
    rows = {row["signal"]: row for row in signals.table(task, finals, told)}
    assert (rows["norm"]["safe"], rows["norm"]["off"], rows["linear probe"]["off"]) == (6, 2.5, 1.0)
    assert rows["norm"]["says"] == "11 11" and rows["norm"]["metric at 4/6"] == pytest.approx(0.842)
    assert rows["norm"]["± at 1/6"] is not None and rows["norm"]["± at 1/6"] > 0.01, "two seeds tell little"


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ((), "--sst2: missing; give it with --models, or --cifar100, or all three"),
        (("--sst2", "."), "--models: missing; give --sst2 the folders of saved encoders"),
        (("--cifar100", ".", "--models", "."), "--models: it has no effect with --cifar100 alone; leave it out"),
    ],
)
def test_a_task_is_given_whole(given: tuple[str, ...], line: str) -> None:
    with pytest.raises(UserError) as error:
        signals.parsed(signals.make_parser(), given)
    assert str(error.value) == line
    assert not signals.parsed(signals.make_parser(), ("--cifar100", ".")).models


@pytest.mark.parametrize(("with_it", "name"), [(True, "signals"), (False, "signals-float32")])
def test_a_table_is_named_by_its_precision(
    with_it: bool, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[tuple[str, str]] = []
    task = texts(tmp_path, tmp_path / "e5", num_blocks=12)
    monkeypatch.setattr(signals, "has_bfloat16", lambda _: with_it)
    monkeypatch.setattr(signals, "split_pictures", lambda *_, **__: task)
    monkeypatch.setattr(signals, "measured", lambda task, *_, **__: ({n: [0.9] for n in (0, 2, 4, 6, 8, 10)}, []))
    monkeypatch.setattr(signals, "signals", lambda *_, **__: {"depths": {"norm": 2}})
    monkeypatch.setattr(signals, "write_table", lambda name, rows, **_: written.append((name, rows[0]["task"])))
    monkeypatch.setattr("sys.argv", ["signals", "--cifar100", ".", "--output", str(tmp_path)])
    signals.main()
    assert written == [(name, task.name + name.removeprefix("signals"))]


@pytest.mark.full
def test_a_run_notes_all_signals(tmp_path: Path) -> None:
    tiny_bert(tmp_path / "bert", layers=6)
    tiny_sst2(tmp_path / "sst2", 60, num_eval_samples=8)
    config = REPOSITORY / "config" / "train_config_sst2_no_freeze.yaml"
    keys = (
        f"model.name={tmp_path / 'bert'}",
        f"data.path={tmp_path / 'sst2'}",
        "train.epochs=26",
        "train.batch_size=15",
    )
    place = (f"run.dir={tmp_path}", "run.id=x", "log.wandb=disabled", "checkpoint.every=null", "pipe.measure=false")
    result = tmp_path / "result.json"
    script = ["-m", "benchmarks.signals.collect", str(config), str(result)]
    launch([*script, *keys, *place, "train.eval_every=1000 epochs"], ranks=1, name="signals")
    told = json.loads(result.read_text())
    assert set(told["depths"]) == {
        *("norm", "change of norm", "agreement", "progress per cost", "plasticity", "linear probe"),
    }
    assert all(0 <= depth <= 6 for depth in told["depths"].values()) and len(told["scores"]) == 7
    assert all(len(values) == 6 and np.isfinite(values).all() for values in told["values"].values())
    assert min(told["values"]["norm"]) > 0 and max(np.abs(told["values"]["agreement"])) <= 1 + 1e-9
