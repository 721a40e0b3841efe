"""Damaged files are found before anything of them is believed: prepared data are made anew, checkpoints passed over."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from ranks import RankPool
from test_live import live_run
from test_simulation import LARGE, costs_of, load_simulation

from pipetransformer.data.prepared import alone, file_digest, prepared
from pipetransformer.data.tables import _read
from pipetransformer.errors import UserError
from pipetransformer.pipe.measure.profile_file import Profile, load_profile, save_profile
from pipetransformer.run.checksums import NAME

ARRAYS = {"pictures": np.arange(4000, dtype=np.uint8).reshape(40, 100), "labels": np.arange(40)}


def flip(path: Path, at: float) -> None:
    content = bytearray(path.read_bytes())
    content[int(at * (len(content) - 1))] ^= 4
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a bit of its head": lambda path: flip(path, 0.0),
    "a bit in the middle": lambda path: flip(path, 0.5),
    "its last bit": lambda path: flip(path, 1.0),
    "cut off": lambda path: path.write_bytes(path.read_bytes()[:-7]),
    "empty": lambda path: path.write_bytes(b""),
    "gone": lambda path: path.unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("file", ["pictures.npy", "labels.npy", "digest"])
def test_damaged_prepared_data_are_made_anew(
    damage: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIPETRANSFORMER_CACHE", str(tmp_path))
    made: list[str] = []

    def build() -> dict[str, np.ndarray]:
        made.append("made")
        return ARRAYS

    first = prepared(lambda: "key", build, lead=alone)
    again = prepared(lambda: "key", build, lead=alone)
    assert len(made) == 1 and again.digest == first.digest
    del first, again
    (folder,) = tmp_path.iterdir()
    DAMAGES[damage](folder / file)
    found = prepared(lambda: "key", build, lead=alone)
    assert len(made) == 2
    assert all(np.array_equal(found.arrays[name], array) for name, array in ARRAYS.items())


@pytest.fixture(scope="module")
def checkpointed(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of runs with one that was cut after seven steps and has two checkpoints."""
    folder = tmp_path_factory.mktemp("runs")
    ranks.run(2, live_run, str(folder), SAVING, 7, False)
    assert len(checkpoints_of(folder)) == 2
    return folder


SAVING = ["pipe.initial_length=2", "freeze.policy=none", "checkpoint.every=3 steps", "checkpoint.keep=2"]


def checkpoints_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/checkpoints/step-*"))


FILES = ["__0_0.distcp", "__1_0.distcp", ".metadata", "state.json", NAME]


OF_CHECKPOINTS = ("a bit in the middle", "cut off", "gone")
QUICK = {(file, OF_CHECKPOINTS[number % 3]) for number, file in enumerate(FILES)}


@pytest.mark.parametrize(
    ("file", "damage"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.full) for case in product(FILES, OF_CHECKPOINTS)],
)
def test_a_damaged_checkpoint_is_passed_over(
    file: str, damage: str, checkpointed: Path, ranks: RankPool, tmp_path: Path
) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(checkpointed, folder)
    before, last = checkpoints_of(folder)
    DAMAGES[damage](last / file)
    ranks.run(2, live_run, str(folder), SAVING, 8, True)
    (told,) = [event for event in map(json.loads, events_of(folder)) if event["event"] == "resume"]
    assert told["resumed_from"] == before.name
    (said,) = told["damaged"]
    assert said.startswith(f"{last.name}: ") and (file in said or file == NAME)


def events_of(folder: Path) -> list[str]:
    (events,) = folder.glob("*/events.jsonl")
    return events.read_text().splitlines()


def test_without_any_whole_checkpoint_nothing_is_resumed(checkpointed: Path, ranks: RankPool, tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    shutil.copytree(checkpointed, folder)
    for checkpoint in checkpoints_of(folder):
        DAMAGES["a bit in the middle"](checkpoint / "__0_0.distcp")
    with pytest.raises(AssertionError, match="holds no checkpoint that is whole .*__0_0.distcp is damaged"):
        ranks.run(2, live_run, str(folder), SAVING, 8, True)


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_costs_are_not_believed(damage: str, tmp_path: Path) -> None:
    costs = costs_of(load_simulation(LARGE))
    path = tmp_path / "profile.json"
    save_profile(Profile({"model": "m"}, costs, dict(costs.by_rows), 1e9), path)
    load_profile(path)
    DAMAGES[damage](path)
    with pytest.raises(UserError, match=r"profile.json: (is no profile that this version reads|cannot be read) \("):
        load_profile(path)


def test_any_changed_bit_of_costs_is_found(tmp_path: Path) -> None:
    """Most are figures still."""
    costs = costs_of(load_simulation(LARGE))
    path = tmp_path / "profile.json"
    save_profile(Profile({"model": "m"}, costs, dict(costs.by_rows), 1e9), path)
    whole, found = path.read_bytes(), load_profile(path)
    for at in np.linspace(0.0, 1.0, 60):
        path.write_bytes(whole)
        flip(path, float(at))
        with contextlib.suppress(UserError):
            assert load_profile(path) == found, "a space, at most"


class Harm:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {os.environ['HARMED']}",)


def test_no_code_of_a_checkpoint_runs(
    checkpointed: Path, ranks: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its author has told the right digests."""
    folder, harmed = tmp_path / "runs", tmp_path / "harmed"
    monkeypatch.setenv("HARMED", str(harmed))
    shutil.copytree(checkpointed, folder)
    for checkpoint in checkpoints_of(folder):
        (checkpoint / ".metadata").write_bytes(pickle.dumps(Harm()))
        digests = json.loads((checkpoint / NAME).read_text())
        digests["files"][".metadata"] = file_digest(checkpoint / ".metadata")
        (checkpoint / NAME).write_text(json.dumps(digests))
    with pytest.raises(AssertionError, match=r"run.resume: .*system, which no checkpoint does"):
        ranks.run(2, live_run, str(folder), SAVING, 8, True)
    assert not harmed.exists()


def test_a_torn_configuration_stops_no_resumption(checkpointed: Path, ranks: RankPool, tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    shutil.copytree(checkpointed, folder)
    (configuration,) = folder.glob("*/config.yaml")
    configuration.write_text(configuration.read_text()[:100])
    ranks.run(2, live_run, str(folder), SAVING, 8, True)
    (told,) = [event for event in map(json.loads, events_of(folder)) if event["event"] == "resume"]
    assert "config.yaml, as it was before, cannot be read" in told["changes"][0]
    assert configuration.read_text().startswith("task: image_classification"), "it is whole again"


def test_texts_between_tabs_may_begin_with_a_quotation_mark(tmp_path: Path) -> None:
    lines = ["text\tlabel", '"Fine," he said\t1', "dull\t0", 'she said "no"\t0', '"Never" again\t1', "end\t0"]
    (tmp_path / "train.tsv").write_text("\n".join(lines) + "\n")
    assert [tuple(row.values()) for row in _read(tmp_path / "train.tsv").to_pylist()] == [
        ('"Fine," he said', 1),
        ("dull", 0),
        ('she said "no"', 0),
        ('"Never" again', 1),
        ("end", 0),
    ]
    (tmp_path / "train.tsv").write_text('text\tlabel\n"one, quoted"\t1\n\n"two"\t0\n')
    assert _read(tmp_path / "train.tsv").to_pylist() == [
        {"text": "one, quoted", "label": 1},
        {"text": "two", "label": 0},
    ], "a file whose quotation marks enclose"
