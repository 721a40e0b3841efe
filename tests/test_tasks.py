"""Every kind of data from its files to a summary: an elastic run of two epochs by the entries."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from entries import EntryServer
from test_bad_input import IMAGES, TEXTS
from test_readers import COLUMNS, GLUE, ROWS, write_archive, write_folder, write_glue, write_table
from tiny import tiny_bert


def _tables(folder: Path) -> None:
    for name in ("train", "dev"):
        write_table(folder / f"{name}.parquet", ROWS * 4)


TEXT_COLUMNS = [f"data.{name}={value}".replace("'", "") for name, value in COLUMNS.items()]
CASES: dict[str, tuple[str, Callable[[Path], object], list[str], set[str]]] = {
    **{
        name: (TEXTS, lambda folder, name=name: write_glue(name, folder), [], set(task.metrics))  # type: ignore[misc]
        for name, task in GLUE.items()
    },
    "mnli": (TEXTS, lambda folder: write_glue("mnli", folder), [], {"accuracy", "accuracy_mismatched"}),
    "table": (TEXTS, _tables, TEXT_COLUMNS, {"accuracy"}),
    "image_folder": (IMAGES, write_folder, ["model.kwargs.in_chans=3"], {"accuracy"}),
    "cifar10": (IMAGES, lambda folder: write_archive(folder, "cifar10"), ["model.kwargs.in_chans=3"], {"accuracy"}),
    "cifar100": (IMAGES, lambda folder: write_archive(folder, "cifar100"), ["model.kwargs.in_chans=3"], {"accuracy"}),
}


@pytest.fixture(scope="module")
def entries() -> EntryServer:
    return EntryServer()


IN_SHORT = ("cola", "stsb", "mnli", "table", "image_folder", "cifar10")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in IN_SHORT else pytest.mark.full) for name in CASES]
)
def test_every_kind_of_data_trains(name: str, entries: EntryServer, tmp_path: Path) -> None:
    base, write, overrides, metrics = CASES[name]
    (tmp_path / "data").mkdir()
    write(tmp_path / "data")
    if base is TEXTS:
        tiny_bert(tmp_path / "bert")
    (tmp_path / "config.yaml").write_text(base.replace("FOLDER", str(tmp_path)))
    task = "text_classification" if base is TEXTS else "image_classification"
    own = (f"data.name={name}", f"data.path={tmp_path / 'data'}", "train.epochs=2", "train.batch_size=4")
    ended = entries.run(task, tmp_path / "config.yaml", *own, "freeze.policy=schedule", *overrides)
    assert ended.exit_code == 0, ended
    summary = json.loads((tmp_path / "runs" / "x" / "summary.json").read_text())
    assert [move["frozen"] for move in summary["transitions"]] == [2]
    told = {key for key in summary["metrics"] if not key.startswith("loss")}
    assert told >= metrics and all(math.isfinite(value) for value in summary["metrics"].values())
