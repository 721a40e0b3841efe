"""The dashboard as a user sees it: an offline run of wandb is read back from its own file."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.soak.forked import ForkedJob, running

_PAGE, _HEAD = 32768, 7  # of the format of LevelDB's log, which wandb writes
SETTINGS = (
    *("train.precision=float32", "log.wandb=offline", "log.report=false", "run.id=x", "log.every=2"),
    *("data.max_train_samples=64", "data.max_eval_samples=16", "train.batch_size=16", "train.epochs=4"),
    *("freeze.policy=static", "freeze.max_frozen=3", "freeze.warmup=2 epochs", "freeze.guard=false"),
    *("log.group=mine", "log.tags=[a, b]", "log.job_type=train"),
)


def records(path: Path) -> Iterator[Any]:
    """The records of a run's file, by wandb's own description of them."""
    from wandb.proto import wandb_internal_pb2

    data, at, whole = path.read_bytes(), _HEAD, b""
    while at + _HEAD <= len(data):
        if (room := _PAGE - at % _PAGE) < _HEAD:
            at += room
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + _HEAD])
        part, at = data[at + _HEAD : at + _HEAD + length], at + _HEAD + length
        if not kind:
            continue
        whole = part if kind in (1, 2) else whole + part  # whole, first, middle, last
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()  # type: ignore[attr-defined]
            record.ParseFromString(whole)
            yield record


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """The records of a small elastic run, by kind."""
    folder = tmp_path_factory.mktemp("runs")
    job = ForkedJob("image_classification", ["digits", *SETTINGS, f"run.dir={folder}"], num_ranks=2)
    with running(job):
        ended = job.supervise()
    assert ended.exit_code == 0, ended.cause
    (path,) = folder.glob("x/wandb/offline-run-*/*.wandb")
    found: dict[str, list[Any]] = {}
    for record in records(path):
        found.setdefault(record.WhichOneof("record_type"), []).append(record)
    return found


def items(found: list[Any]) -> dict[str, Any]:
    return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in found}


def test_steps_have_what_is_watched(told: dict[str, list[Any]]) -> None:
    rows = [items(record.history.item) for record in told["history"]]
    steps = [row for row in rows if "Train/Loss" in row]
    for name in ("Train/Acc", "lr", "epoch", "train_seconds", "sample_throughput", "frozen_blocks", "pp", "dp"):
        assert all(name in row for row in steps), name
    assert [row["frozen_blocks"] for row in steps][0] == 0 and steps[-1]["frozen_blocks"] == 3
    assert {f"gradient_norm/block_{block}" for block in range(6)} <= {name for row in steps for name in row}
    assert steps[-1]["cache_hit_rate"] == 1.0 and steps[-1]["forward_time_per_batch"] > 0
    assert any("Test/Acc" in row for row in rows), "evaluations"
    assert {"decisions.path", "transitions.path"} <= {name for row in rows for name in row} or {
        "decisions/path",
        "transitions/path",
    } <= {name for row in rows for name in row}


def test_the_table_of_runs_has_the_best_value_and_seconds_are_an_axis(told: dict[str, list[Any]]) -> None:
    metrics = [record.metric for record in told["metric"]]
    assert "train_seconds" in {metric.step_metric for metric in metrics} | {metric.name for metric in metrics}
    assert any(metric.name == "Test/Acc" and metric.summary.max for metric in metrics)
    (run,) = (record.run for record in told["run"])
    assert run.run_group == "mine" and list(run.tags) == ["a", "b"] and run.job_type == "train"
    summary = {name: value for record in told["summary"] for name, value in items(record.summary.update).items()}
    assert {"train_s", "wall_s", "steps_s", "evaluation_s", "compute_floor_s"} <= summary.keys(), sorted(summary)
    assert summary["peak_memory_bytes"] > 1e8 and summary["cache_bytes_host"] > 0
