"""An elastic run holds no more memory than the best static layout and the cache that it announces."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from laws import REPOSITORY

from pipetransformer.launch import free_port

# A BERT of 19 M parameters, so that weights, gradients and moments outweigh what a process holds anyway.
KWARGS = "{hidden_size: 512, intermediate_size: 2048, num_attention_heads: 8, num_hidden_layers: 6}"
JOB = (
    *("data.max_train_samples=512", "data.max_eval_samples=64", "train.epochs=4", "train.batch_size=32"),
    *(f"model.kwargs={KWARGS}", "log.wandb=disabled", "checkpoint.every=null", "freeze.every=1 epoch"),
)


def summary_of(folder: Path, name: str, *overrides: str) -> dict[str, Any]:
    """The summary of a run on 2 ranks that decides live."""
    config = REPOSITORY / "config" / "train_config_demo_text.yaml"
    command = [sys.executable, "-m", "pipetransformer.launch", "2", "1", "0", "127.0.0.1", str(free_port())]
    places = [str(config), name, *JOB, f"run.dir={folder}", *overrides]
    # Else the C library keeps what is freed, more or less of it from run to run.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "32768"}
    subprocess.run([*command, *places], check=True, cwd=REPOSITORY, capture_output=True, env=environment)
    return json.loads((folder / name / "summary.json").read_text())  # type: ignore[no-any-return]


@pytest.mark.full
def test_an_elastic_run_holds_no_more_than_the_best_static_layout_and_its_cache(tmp_path: Path) -> None:
    elastic = summary_of(tmp_path, "elastic", "freeze.warmup=0 steps", "freeze.alpha=0.5")
    assert elastic["transitions"] and elastic["cache"]["hits"]
    events = map(json.loads, (tmp_path / "elastic" / "events.jsonl").read_text().splitlines())
    best_pp = next(event["best_pp"] for event in events if event["event"] == "calibration")
    static = summary_of(tmp_path, "static", "freeze.policy=none", f"pipe.initial_length={best_pp}")
    allowed = max(static["peak_memory_bytes"]) + elastic["cache"]["bytes"]["host"]
    assert max(elastic["peak_memory_bytes"]) <= allowed, (elastic["peak_memory_bytes"], static["peak_memory_bytes"])
