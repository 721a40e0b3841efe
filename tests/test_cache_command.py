"""``pipetransformer cache``: the stores on disk, listed and deleted."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from time import time

import pytest

from pipetransformer.cache.kept import KeptStores
from pipetransformer.commands import main


@pytest.fixture
def stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KeptStores:
    """Two entries: ``old`` was last used ten days ago."""
    monkeypatch.setenv("PIPETRANSFORMER_CACHE", str(tmp_path))
    stores = KeptStores(tmp_path / "activations")
    for key, days in (("old", 10), ("new", 0)):
        held = stores.begin(key, sizes={"train": 2_000_000}, budget=10**9)
        assert held is not None
        Path(held.paths["train"]).write_bytes(bytes(2_000_000))
        held.publish({"model": f"model-{key}", "data": "sst2", "boundary": 3, "samples": {"train": 20, "eval": 5}})
        held.close()
        used = time() - 86400 * days
        os.utime(tmp_path / "activations" / key / "record.json", (used, used))
    return stores


def test_list_tells_each_entry_the_oldest_first(stores: KeptStores, capsys: pytest.CaptureFixture[str]) -> None:
    held = stores.find("new", sizes={"train": 2_000_000})
    assert held is not None
    assert main(["cache", "list"]) == 0
    told = capsys.readouterr().out.splitlines()
    held.close()
    titles, _, old, new, summary = (line.split() for line in told if line.strip())
    assert titles == ["model", "data", "blocks", "samples", "MB", "last", "used", "open"]
    assert old[:7] == ["model-old", "sst2", "3", "20", "train,", "5", "eval"] and old[7] == "2.0" and old[-1] != "yes"
    assert new[0] == "model-new" and new[-1] == "yes"
    assert " ".join(summary).startswith("2 entries of 4.0 MB in ")


def test_clear_deletes_all_or_the_old(stores: KeptStores, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "clear", "--unused-for", "7"]) == 0
    assert capsys.readouterr().out == "deleted 1 entry of 2.0 MB\n"
    held = stores.find("new", sizes={"train": 2_000_000})
    assert held is not None
    assert main(["cache", "clear"]) == 0
    assert capsys.readouterr().out == "deleted 0 entries of 0.0 MB; a run has 1 entry of 2.0 MB open\n"
    held.close()
    assert main(["cache", "clear"]) == 0
    assert not stores.entries()


def test_a_folder_that_does_not_allow_it_is_named(
    stores: KeptStores, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(self: KeptStores, **_: float) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(KeptStores, "clear", refuse)
    assert main(["cache", "clear"]) == 2
    told = capsys.readouterr().err
    assert f"cache: {stores.folder}: Permission denied" in told and told.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["list", "--unused-for", "3"], "--unused-for: has no effect on list; give it to clear"),
        (["clear", "--unused-for", "x"], "--unused-for: 'x' is not allowed; give a number of days, such as 7"),
        (["clear", "--unused-for", "-1"], "--unused-for: '-1' is not allowed; give a number of days, such as 7"),
        (["empty"], "empty"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], line: str, stores: KeptStores, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cache", *arguments]) == 2
    told = capsys.readouterr().err.strip()
    assert line in told and "\n" not in told
    assert len(stores.entries()) == 2
