"""A checkpoint is written beside training: what training changes meanwhile is not in it."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from unittest import mock

import pytest
import torch
from ranks import RankPool
from test_faults import run
from torch import Tensor

from pipetransformer.adapter import load_tensors, save_tensors, silent_nodes
from pipetransformer.adapter.checkpoints import _PlainReader
from pipetransformer.errors import UserError
from pipetransformer.process.whereabouts import HERE
from pipetransformer.process.world import World, close_world, init_world
from pipetransformer.run import out_of_memory, writing
from pipetransformer.run.writing import CheckpointWriter


@pytest.fixture
def alone() -> Iterator[World]:
    """A process without peers."""
    yield init_world(timeout_seconds=20)
    close_world()


def written(folder: Path) -> Tensor:
    found = {"weight": torch.empty(4)}
    load_tensors(found, folder, is_alone=True)
    return found["weight"]


def test_what_changes_meanwhile_is_not_in_it(tmp_path: Path, alone: World) -> None:
    may_write, weight = Event(), torch.ones(4)

    def slow(*args: object, **kwargs: object) -> None:
        assert may_write.wait(20)
        save_tensors(*args, **kwargs)  # type: ignore[arg-type]

    writer = CheckpointWriter(tmp_path / "checkpoints", keep=1, beside=True, world=alone)
    with mock.patch.object(writing, "save_tensors", slow):
        writer.begin(3, {"weight": weight}, {"step": 3})
        assert writer.outcome(wait=False) is None, "it is not written yet"
        weight += 1  # a step
        may_write.set()
        outcome = writer.outcome(wait=True)
    assert outcome is not None and outcome.error is None and outcome.step == 3
    assert outcome.path == tmp_path / "checkpoints" / "step-00000003"
    assert written(outcome.path).tolist() == [1.0] * 4
    assert writer.outcome(wait=True) is None, "it is told once"


def test_one_that_cannot_be_written_leaves_the_one_before(tmp_path: Path, alone: World) -> None:
    writer = CheckpointWriter(tmp_path / "checkpoints", keep=1, beside=True, world=alone)
    writer.begin(1, {"weight": torch.ones(4)}, {})
    assert writer.outcome(wait=True) is not None
    with mock.patch.object(writing, "write_digests", side_effect=UserError("no room")):
        writer.begin(2, {"weight": torch.zeros(4)}, {})
        outcome = writer.outcome(wait=True)
    assert outcome is not None and str(outcome.error) == "no room"
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]


def test_a_failure_gives_up_what_is_not_written(tmp_path: Path, alone: World) -> None:
    writer, never = CheckpointWriter(tmp_path / "checkpoints", keep=1, beside=True, world=alone), Event()
    with mock.patch.object(writing, "save_tensors", lambda *args, **kwargs: never.wait(20)):
        writer.begin(1, {"weight": torch.ones(4)}, {})
        until = time.monotonic() + 10
        while not list(tmp_path.glob("checkpoints/*")):
            assert time.monotonic() < until
        writer.close(has_ended=False)
        assert not list(tmp_path.glob("checkpoints/*"))
        never.set()


def test_holders_take_turns_to_write(tmp_path: Path) -> None:
    """Two replicas have all alike: each writes about a half, and none what the other writes."""
    ended = run(tmp_path, "pipe.initial_length=1", "freeze.policy=none", "train.epochs=1", timeout=60.0)
    assert ended.exit_code == 0, ended.cause
    (folder,) = (tmp_path / "x" / "checkpoints").iterdir()
    contents = _PlainReader(folder).read_metadata()
    written = [(index.fqn, place.relative_path) for index, place in contents.storage_data.items()]
    assert len({name for name, _ in written}) == len(written), "once each"
    for kind in ("model.", "optimizer."):
        by_file = Counter(file for name, file in written if name.startswith(kind))
        assert len(by_file) == 2 and min(by_file.values()) > 0.5 * max(by_file.values())


def wrapped() -> BaseException:
    """As schedules of ``torch.distributed.pipelining`` raise it."""
    try:
        try:
            raise torch.OutOfMemoryError("CUDA out of memory")
        except RuntimeError as error:
            raise RuntimeError("[Stage 1] failed to run forward") from error
    except RuntimeError as error:
        return error


def test_memory_that_a_stage_lacks_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HERE, "phase", "forward")
    assert out_of_memory.in_training(wrapped())
    assert not out_of_memory.in_training(RuntimeError("[Stage 1] failed to run forward"))
    monkeypatch.setattr(HERE, "phase", "measuring")
    assert not out_of_memory.in_training(wrapped()), "there is no plan to make smaller yet"


def silent(world: World) -> list[int]:
    """Node 2 of three, of a rank each, says nothing."""
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    try:
        if world.rank == 2:
            time.sleep(2.5)
            return []
        return silent_nodes(seconds=2.0)
    finally:
        del os.environ["LOCAL_WORLD_SIZE"]


@pytest.mark.parametrize("size", [3])
def test_a_node_that_says_nothing_is_found(size: int, ranks: RankPool) -> None:
    assert ranks.run(size, silent) == [[2], [2], []]
