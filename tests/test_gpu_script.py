"""The script for a GPU, at toy size where there is none: it runs to its end, and its checks pass."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from laws import REPOSITORY

sys.path.insert(0, str(REPOSITORY))

from benchmarks.gpu.checks import a_raising_rank_ends_the_job, boundaries_have_their_type, same_bits


def test_a_check_can_fail(tmp_path: Path) -> None:
    one, two, three = (torch.full((2,), float(number)) for number in (1, 2, 3))
    after = iter([two, two])
    assert same_bits(lambda: ([one], [next(after)])).passed
    after = iter([two, three])
    assert not same_bits(lambda: ([one], [next(after)])).passed
    assert not same_bits(lambda: ([one], [one])).passed, "nothing was trained"
    told = SimpleNamespace(shape=(2, 4), dtype=torch.float32)
    chain = SimpleNamespace(
        family=SimpleNamespace(main_input="x"),
        input_keys=(),
        num_units=2,
        run=lambda units, hidden, side: hidden.double(),
        boundary=lambda unit, *, rows, length: told,
    )
    engine: Any = SimpleNamespace(chain=chain)
    assert not boundaries_have_their_type(engine, {"x": torch.zeros(2, 4)}).passed
    told.dtype = torch.float64
    assert boundaries_have_their_type(engine, {"x": torch.zeros(2, 4)}).passed
    assert a_raising_rank_ends_the_job(1).passed is None


@pytest.mark.full
def test_it_runs_alone_and_tells_all_that_a_gpu_would(tmp_path: Path) -> None:
    script = REPOSITORY / "benchmarks" / "gpu" / "run.py"
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [sys.executable, str(script), "--output", str(tmp_path)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
    rows = json.loads((tmp_path / "gpu-toy.json").read_text())["rows"]
    for model in ("ViT", "BERT"):
        own = {row["what"]: row for row in rows if row["model"] == model}
        for frozen in (1, 2, 3, 4):
            for kind in ("computed", "read from the host"):
                assert all(value > 0 for value in own[f"n {frozen}, prefix {kind}: speed over n 0"]["values"])
        for compiled in ("compiled", "not compiled"):
            assert own[f"no freeze, {compiled}: speed over the library's"]["values"]
        assert own["boundaries have the type that is told"]["told"] == "yes: all units"
        assert own["the same steps give the same bits"]["told"].startswith("yes")
        assert own["memory is released after a transition"]["told"] == "not on this machine: no GPU"
    (ends,) = (row for row in rows if row["model"] == "-")
    assert ends["told"].startswith("yes")


@pytest.mark.full
def test_the_hot_path_tells_each_beside_its_bound(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.hot_path", "--repeats", "1", "--output", str(tmp_path)]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=500)
    assert ended.returncode == 0, ended.stderr[-2000:]
    rows = json.loads((tmp_path / "hot-path.json").read_text())["rows"]
    assert [(row["model"], row["what"]) for row in rows] == [
        (model, what) for model in ("ViT", "BERT") for what in ("step", "read", "gather", "write", "advance")
    ]
    assert all(0 < row["over its bound"] < 20 for row in rows)
