"""The predicted tables of torchgpipe's speed: its cuts found in our graphs, one rate from one row, errors as told."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import benchmarks.amoebanet_speed.__main__ as amoebanet_speed
import benchmarks.resnet101_speed.__main__ as resnet101_speed
from benchmarks.resnet101_speed.original import Original, Prediction, boundaries_of, mean_error, predict
from benchmarks.resnet101_speed.original_table import tell_predictions
from benchmarks.resnet101_speed.speed import SpeedTable
from benchmarks.support.graphs import Setting
from pipetransformer.graphs.graph import trace

TABLES = [resnet101_speed.TABLE, amoebanet_speed.TABLE]
LAYERS = ("0", "1", "", "2", "3")  # of four equal layers, and one of the original's that does nothing
SETTINGS = [Setting("naive", 1, 8, checkpoint=None), Setting("pipe", 2, 8, 4), Setting("odd", 2, 9, 4, "never")]
PUBLISHED = {"naive": 100.0, "pipe": 120.0, "odd": 150.0}


def build() -> nn.Sequential:
    return nn.Sequential(*(nn.Conv2d(3, 3, 3, padding=1, bias=False) for _ in range(4)))


def predicted(**changed: float) -> list[Prediction]:
    original = Original({"pipe": (3, 2), "odd": (1, 4)}, LAYERS, copies_beside=False)
    return predict(SETTINGS, original, published=PUBLISHED | changed, build=build, image_size=8)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_balances_are_of_all_layers_and_of_the_rows(table: SpeedTable) -> None:
    for name, balance in table.original.balances.items():
        assert sum(balance) == len(table.original.layers)
        assert len(balance) == next(setting.num_devices for setting in table.settings if setting.name == name)
    cut = {setting.name for setting in table.settings if setting.num_devices > 1}
    assert cut == set(table.original.balances)


@pytest.mark.parametrize(
    ("table", "known"),
    [
        (resnet101_speed.TABLE, {"layer1.0.downsample", "layer3.22.act3", "fc", "maxpool"}),
        (amoebanet_speed.TABLE, {"stem.1", "cells.0", "cells.15.operations.9", "classifier"}),
    ],
    ids=lambda given: getattr(given, "name", ""),
)
def test_layers_are_modules_of_our_model(table: SpeedTable, known: set[str]) -> None:
    with torch.device("meta"):
        names = {name for name, _ in table.sizes["full"].build().named_modules()}
    layers = {layer for layer in table.original.layers if layer}
    absent = {layer for layer in layers - names if not layer.endswith("downsample")}  # first blocks alone have one
    assert not absent
    assert known <= layers


def test_a_balance_becomes_units_by_the_layers_that_work() -> None:
    with torch.device("meta"):
        graph = trace(build(), (torch.empty(2, 3, 8, 8),))
    assert [unit.name for unit in graph.units] == ["0", "1", "2", "3"]
    cuts = {start: boundaries_of(graph, LAYERS, (start, len(LAYERS) - start)) for start in range(1, 5)}
    assert cuts == {1: (1,), 2: (2,), 3: (2,), 4: (3,)}
    with pytest.raises(AssertionError, match="4 layers in the balance, 5 in the sequence"):
        boundaries_of(graph, LAYERS, (2, 2))


def test_the_rate_is_of_the_first_row_alone() -> None:
    first = predicted()
    assert first == predicted(pipe=1.0, odd=1.0), "others are only judged"
    assert [each.samples_per_s["naive"] for each in first] == pytest.approx([100.0] * len(first), rel=1e-4)
    faster = predicted(naive=200.0)[0]
    assert faster.operations_per_s == pytest.approx(2 * first[0].operations_per_s)


def test_equal_layers_give_the_closed_form() -> None:
    """Four micro-batches of 2 rows on equal halves, 3 of 4 run forward twice; the first layer has no gradient of its
    input, so that a step of the whole is 11 products, of the halves 5 and 6."""
    operations = predicted()[0]
    longer, recomputed = 6, 2 * 3 / 4
    last_first = (5 + recomputed + longer + recomputed) / 4  # one micro-batch through both halves, both ways
    seconds = 8 / 100 / 11 * (3 / 4 * (longer + recomputed) + last_first)
    assert operations.samples_per_s["pipe"] == pytest.approx(8 / seconds, rel=0.03)
    best = operations.best_samples_per_s
    assert best["odd"] > operations.samples_per_s["odd"], "one layer and three are a bad cut"


def test_each_assumption_but_the_rate_costs_time() -> None:
    rates = [each.operations_per_s for each in predicted()]
    assert rates[0] < rates[1], "with memory counted, operations are faster"
    by_name = {each.assumption.name: each.samples_per_s["pipe"] for each in predicted()}
    assert by_name["these through the host"] < by_name["and copies that wait"] < by_name["and copies beside"]


def test_mean_errors_drop_signs_and_the_first_row(tmp_path: Path) -> None:
    rates = {"naive": 50.0, "pipe": 108.0, "odd": 180.0}
    assert mean_error(rates, PUBLISHED, first="naive") == pytest.approx((0.1 + 0.2) / 2)
    found = predicted()
    tell = partial(tell_predictions, published=PUBLISHED, title="T", notes=["N"], folder=tmp_path)
    tell("speed", found, SETTINGS)
    kept = json.loads((tmp_path / "speed-original.json").read_text())
    *rows, errors = kept["rows"]
    assert len(rows) == len(SETTINGS) and kept["notes"][-1] == "N"
    for each in found:
        name = each.assumption.name
        assert rows[1][name] == pytest.approx(each.samples_per_s["pipe"] / 100.0)
        missed = [row[name] / row["published"] - 1 for row in rows[1:]]
        assert errors[name] == pytest.approx(100 * sum(map(abs, missed)) / 2)
    assert rows[1]["our cut"] == pytest.approx(found[-1].best_samples_per_s["pipe"] / 100.0)
