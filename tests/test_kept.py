"""The stores that outlive their run: found, checked, bounded, shared, and never half a store."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread
from time import monotonic, sleep, time

import pytest

from pipetransformer.cache import kept as kept_module
from pipetransformer.cache.kept import Held, KeptStores, key_of

SIZES = {"train": 1000, "eval": 10}
ABOUT = {"model": "m", "boundary": 3}


def fill(held: Held) -> None:
    for split, path in held.paths.items():
        Path(path).write_bytes(os.urandom(SIZES[split]))


def make(stores: KeptStores, key: str, *, budget: int = 10**6, used: float | None = None) -> None:
    """A complete entry that no one has open."""
    held = stores.begin(key, sizes=SIZES, budget=budget)
    assert held is not None
    fill(held)
    assert held.publish(ABOUT)
    held.close()
    if used is not None:
        os.utime(stores.folder / key / "record.json", (used, used))


def keys(stores: KeptStores) -> list[str]:
    return [entry.key for entry in stores.entries()]


def test_an_entry_is_found_once_it_is_published(tmp_path: Path) -> None:
    stores = KeptStores(tmp_path / "new")
    assert stores.find("a", sizes=SIZES) is None and not stores.has("a")
    held = stores.begin("a", sizes=SIZES, budget=1010)
    assert held is not None and not held.is_complete
    fill(held)
    contents = {split: Path(path).read_bytes() for split, path in held.paths.items()}
    assert not stores.has("a") and not stores.entries()
    assert held.publish(ABOUT) and held.is_complete
    found = stores.find("a", sizes=SIZES)  # together with the one who filled it
    assert found is not None and found.is_complete
    assert {split: Path(path).read_bytes() for split, path in found.paths.items()} == contents
    (entry,) = stores.entries()
    assert (entry.key, entry.num_bytes, entry.about, entry.in_use) == ("a", 1010, ABOUT, True)
    found.close()
    held.close()
    assert not stores.entries()[0].in_use


@pytest.mark.parametrize("damage", ["flip", "cut", "gone", "record"])
def test_a_damaged_entry_is_deleted_and_not_used(damage: str, tmp_path: Path) -> None:
    stores = KeptStores(tmp_path)
    make(stores, "a")
    path = tmp_path / "a" / "train.store"
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[500] ^= 1
        path.write_bytes(content)
    elif damage == "cut":
        path.write_bytes(content[:-1])
    elif damage == "gone":
        path.unlink()
    else:
        (tmp_path / "a" / "record.json").write_text('{"version": 1')
    assert stores.find("a", sizes=SIZES) is None
    assert not stores.has("a")
    make(stores, "a")
    assert stores.has("a")


def test_an_entry_of_other_sizes_is_not_used(tmp_path: Path) -> None:
    stores = KeptStores(tmp_path)
    make(stores, "a")
    assert stores.find("a", sizes={**SIZES, "eval": 11}) is None


def test_what_was_given_up_leaves_nothing(tmp_path: Path) -> None:
    stores = KeptStores(tmp_path)
    held = stores.begin("a", sizes=SIZES, budget=10**6)
    assert held is not None
    fill(held)
    assert not held.publish(ABOUT, is_cancelled=lambda: True)
    held.close()
    assert not list(tmp_path.glob("a*/")) and stores.find("a", sizes=SIZES) is None


def test_the_entry_that_was_not_used_for_longest_makes_room(tmp_path: Path) -> None:
    stores = KeptStores(tmp_path)
    for number, key in enumerate("abc"):
        make(stores, key, used=time() - 100 + number)
    found = stores.find("a", sizes=SIZES)  # used now
    assert found is not None
    found.close()
    make(stores, "d", budget=3 * 1010)
    assert sorted(keys(stores)) == ["a", "c", "d"]


def test_an_entry_that_a_job_has_open_stays(tmp_path: Path) -> None:
    stores = KeptStores(tmp_path)
    make(stores, "a")
    found = stores.find("a", sizes=SIZES)
    assert found is not None
    assert stores.begin("b", sizes=SIZES, budget=2 * 1010 - 1) is None, "there is no room beside it"
    deleted, in_use = stores.clear()
    assert not deleted and [entry.key for entry in in_use] == ["a"]
    found.close()
    deleted, in_use = stores.clear()
    assert [entry.key for entry in deleted] == ["a"] and not in_use and not stores.entries()


def test_what_others_fill_counts_and_nothing_is_deleted_in_vain(tmp_path: Path) -> None:
    stores = KeptStores(tmp_path)
    make(stores, "a")
    filling = stores.begin("b", sizes=SIZES, budget=10**6)
    assert filling is not None
    fill(filling)
    assert stores.num_bytes() == 2 * 1010
    assert stores.begin("c", sizes=SIZES, budget=2 * 1010 - 1) is None, "one of them is in use"
    assert keys(stores) == ["a"], "it would not have been enough"
    filling.close()
    assert stores.num_bytes() == 1010


def test_entries_that_come_and_go_meanwhile_are_no_error(tmp_path: Path) -> None:
    """Another job may complete or delete an entry between any two looks at its folder."""
    stores, is_over = KeptStores(tmp_path), Event()

    def come_and_go() -> None:
        while not is_over.is_set():
            held = stores.begin("a", sizes=SIZES, budget=10**6)
            if held is not None:  # else the look at it has its lock
                fill(held)
                held.publish(ABOUT)
                held.close()
            stores.delete("a")

    other = Thread(target=come_and_go)
    other.start()
    try:
        assert max(stores.num_bytes() for _ in range(8000)) <= 2 * 1010, "once on its way, and once complete"
    finally:
        is_over.set()
        other.join(timeout=30)


def test_clear_takes_what_was_not_used_for_so_long(tmp_path: Path) -> None:
    stores = KeptStores(tmp_path)
    make(stores, "old", used=time() - 5000)
    make(stores, "new")
    deleted, _ = stores.clear(unused_for=1000)
    assert [entry.key for entry in deleted] == ["old"] and keys(stores) == ["new"]


@pytest.mark.parametrize("sizes", [{"train": 1011}, {"train": 10**6}])
def test_what_the_budget_does_not_hold_is_not_begun(sizes: dict[str, int], tmp_path: Path) -> None:
    assert KeptStores(tmp_path).begin("a", sizes=sizes, budget=1010) is None


def test_a_folder_that_cannot_be_made_costs_the_entry_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    stores = KeptStores(tmp_path / "file" / "folder")
    assert stores.begin("a", sizes=SIZES, budget=10**6) is None
    assert stores.find("a", sizes=SIZES) is None and not stores.entries()


def test_a_spill_tells_the_room_that_there_can_be(tmp_path: Path) -> None:
    """All but what a job has open: the rest could be deleted."""
    stores, big = KeptStores(tmp_path), {"train": 2000}
    make(stores, "a")
    assert stores.spill(big, setting=1500) == (None, 1500)
    found = stores.find("a", sizes=SIZES)
    assert found is not None
    assert stores.spill(big, setting=1500) == (None, 490)
    assert stores.spill(big, setting=100) == (None, 0)
    held, _ = stores.spill(big, setting=3010)
    assert held is not None and keys(stores) == ["a"]
    held.close()
    found.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "a.lock"]


def _in_another_process(action: Callable[[Path], None], folder: Path) -> multiprocessing.Process:
    process = multiprocessing.get_context("fork").Process(target=action, args=(folder,))
    process.start()
    until = monotonic() + 20
    while not (folder / "ready").exists():
        assert monotonic() < until
        sleep(0.01)
    return process


def _fill_and_wait(folder: Path) -> None:
    held = KeptStores(folder).begin("a", sizes=SIZES, budget=10**6)
    assert held is not None
    fill(held)
    (folder / "ready").touch()
    while not (folder / "go").exists():
        sleep(0.01)
    held.publish(ABOUT)


def test_others_wait_for_the_one_that_fills(tmp_path: Path) -> None:
    stores = KeptStores(tmp_path)
    process = _in_another_process(_fill_and_wait, tmp_path)
    assert stores.begin("a", sizes=SIZES, budget=10**6) is None, "one fills it"
    Thread(target=lambda: (sleep(0.3), (tmp_path / "go").touch())).start()
    found = stores.find("a", sizes=SIZES)
    assert found is not None and found.is_complete
    process.join()


def test_others_wait_for_the_one_that_makes_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no folder of the entry yet."""
    makes_room = Event()
    filler, make_room = KeptStores(tmp_path), KeptStores.make_room

    def slowly(self: KeptStores, num_bytes: int, budget: int) -> bool:
        makes_room.set()
        sleep(0.3)
        return make_room(self, num_bytes, budget)

    monkeypatch.setattr(KeptStores, "make_room", slowly)
    thread = Thread(target=make, args=(filler, "a"))
    thread.start()
    makes_room.wait()
    found = KeptStores(tmp_path).find("a", sizes=SIZES)
    assert found is not None and found.is_complete
    thread.join()


def test_a_job_that_waits_too_long_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_module, "LONGEST_WAIT", 0.3)
    process = _in_another_process(_fill_and_wait, tmp_path)
    start = monotonic()
    assert KeptStores(tmp_path).find("a", sizes=SIZES) is None
    assert monotonic() - start < 5
    (tmp_path / "go").touch()
    process.join()


def test_a_killed_job_leaves_no_entry_and_no_lock(tmp_path: Path) -> None:
    stores = KeptStores(tmp_path)
    process = _in_another_process(_fill_and_wait, tmp_path)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert (tmp_path / "a.part").is_dir()
    assert stores.find("a", sizes=SIZES) is None
    make(stores, "a")
    assert keys(stores) == ["a"] and not (tmp_path / "a.part").exists()


def test_what_a_killed_job_left_makes_room(tmp_path: Path) -> None:
    process = _in_another_process(_fill_and_wait, tmp_path)
    process.kill()
    process.join()
    stores = KeptStores(tmp_path)
    make(stores, "b", budget=1010)
    assert not (tmp_path / "a.part").exists()
    assert stores.clear()[0][0].key == "b"


def test_a_record_of_another_version_is_none(tmp_path: Path) -> None:
    stores = KeptStores(tmp_path)
    make(stores, "a")
    record = json.loads((tmp_path / "a" / "record.json").read_text())
    (tmp_path / "a" / "record.json").write_text(json.dumps({**record, "version": 0}))
    assert not stores.has("a") and stores.find("a", sizes=SIZES) is None
    assert [(entry.key, entry.num_bytes, entry.about) for entry in stores.entries()] == [("a", 1010, {})]
    make(stores, "b", budget=1010)
    assert keys(stores) == ["b"], "it takes room as any other, and makes room"


def test_a_disk_without_locks_keeps_nothing_and_no_one_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(descriptor: int, kind: int) -> None:
        raise OSError(errno.ENOSYS, "no locks")

    monkeypatch.setattr(kept_module.fcntl, "flock", flock)
    stores, began = KeptStores(tmp_path), monotonic()
    assert stores.begin("a", sizes=SIZES, budget=10**6) is None and stores.find("a", sizes=SIZES) is None
    assert monotonic() - began < 5


def test_locks_of_entries_that_are_no_more_go_too(tmp_path: Path) -> None:
    stores = KeptStores(tmp_path)
    (tmp_path / "gone.lock").touch()
    make(stores, "a")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "a.lock"]


def test_what_cannot_be_deleted_makes_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stores = KeptStores(tmp_path)
    make(stores, "a")

    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, "not yours")

    monkeypatch.setattr(kept_module.shutil, "rmtree", refuse)
    with pytest.raises(PermissionError):
        stores.make_room(10, 1010)


def test_a_key_tells_its_parts_apart() -> None:
    assert key_of((1, "a")) == key_of((1, "a")) != key_of((1, "b"))
