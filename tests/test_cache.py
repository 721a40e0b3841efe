"""The cache never lies: what it returns was written for that sample at that boundary; everything else is a miss."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import RankPool

from pipetransformer.cache import (
    ActivationStore,
    BatchReader,
    DeviceTier,
    StoreLayout,
    open_cache,
    read_ahead,
)
from pipetransformer.cache import shared as shared_module
from pipetransformer.cache.advance import _Writer
from pipetransformer.errors import UserError
from pipetransformer.process.world import World

WIDTH = 3
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float64])
LENGTHS = st.lists(st.integers(1, 4), min_size=1, max_size=20).map(np.array)


def text_layout(lengths: np.ndarray, dtype: torch.dtype = torch.float32) -> StoreLayout:
    return StoreLayout(lengths, width=WIDTH, dtype=dtype)


def image_layout(num_samples: int, *, positions: int = 5) -> StoreLayout:
    return StoreLayout(np.full(num_samples, positions), width=WIDTH, dtype=torch.float32)


def activations(ids: np.ndarray, *, length: int, boundary: int = 1, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What a model might give: every number tells sample, position and boundary."""
    values = torch.from_numpy(ids).view(-1, 1, 1) + torch.arange(length).view(1, -1, 1) / 16 + boundary * 32
    return values.expand(-1, -1, WIDTH).to(dtype)


def held(store: ActivationStore, boundary: int) -> list[bool]:
    return store.holds(np.arange(len(store.layout.positions)), boundary).tolist()


@pytest.fixture
def store() -> Iterator[ActivationStore]:
    store = ActivationStore.reserve(image_layout(6))
    yield store
    store.close()


def traces() -> list[str]:
    """What this process has of stores: open descriptors and mappings."""
    descriptors = []
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            descriptors.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        except FileNotFoundError:  # the one of the listing
            continue
    mappings = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in (*descriptors, *mappings) if "memfd:pipetransformer" in line]


# Round trips


@given(lengths=LENGTHS, dtype=DTYPES, data=st.data())
@settings(max_examples=60, deadline=None)
def test_texts_come_back_as_they_were_written(lengths: np.ndarray, dtype: torch.dtype, data: st.DataObject) -> None:
    store = ActivationStore.reserve(text_layout(lengths, dtype))
    everyone = np.array(data.draw(st.permutations(range(len(lengths)))))
    written = everyone[: data.draw(st.integers(0, len(everyone)))]
    for length in np.unique(lengths):
        of_length = written[lengths[written] == length]
        for ids in np.array_split(of_length, data.draw(st.integers(1, 4))):
            store.write(ids, activations(ids, length=length, dtype=dtype), boundary=1)
    assert held(store, 1) == [sample in written for sample in range(len(lengths))]
    for length in np.unique(lengths):
        ids = written[lengths[written] == length][::-1].copy()
        read = store.read(ids, positions=int(length))
        assert torch.equal(read, activations(ids, length=length, dtype=dtype)) and read.dtype == dtype
    store.close()


def test_rows_of_samples_lie_beside_their_slots() -> None:
    """Samples that wait for the advance are still read at the boundary before."""
    layout = replace(text_layout(np.array([3, 2, 3, 2, 3])), has_rows=True)
    assert layout.num_bytes == (13 + 5) * WIDTH * 4 + 5
    store = ActivationStore.reserve(layout)
    long, short = np.array([0, 2, 4]), np.array([1, 3])
    for ids, length in ((long, 3), (short, 2)):
        store.write(ids, activations(ids, length=length, boundary=1), boundary=1)
    some = np.array([4, 1, 0])
    store.write(some, activations(some, length=1, boundary=2), boundary=2)
    assert torch.equal(store.read(some, positions=1), activations(some, length=1, boundary=2))
    assert held(store, 1) == [False, False, True, True, False]
    for ids, length in ((long[1:2], 3), (short[1:], 2)):
        assert torch.equal(store.read(ids, positions=length), activations(ids, length=length, boundary=1))
    store.close()


def test_samples_of_another_length_are_not_read_for_those_that_are_asked_for() -> None:
    lengths = np.array([3, 2, 3, 4, 3])
    for some, asked in (([0, 1], 3), ([0, 3], 3), ([1, 0], 2), ([3, 4], 4), ([0], 5)):
        store = ActivationStore.reserve(text_layout(lengths))
        for ids, length in ((np.array([0, 2, 4]), 3), (np.array([1]), 2), (np.array([3]), 4)):
            store.write(ids, activations(ids, length=length), boundary=1)
        with pytest.raises(LookupError):
            store.read(np.array(some), positions=asked)
        with pytest.raises(LookupError):
            store.write(np.array(some), torch.zeros(len(some), asked, WIDTH), boundary=2)
        for other in {0, 1, 2, 3, 4} - set(some):
            ids, length = np.array([other]), int(lengths[other])
            assert torch.equal(store.read(ids, positions=length), activations(ids, length=length))
        store.close()


def test_images_come_back_as_they_were_written(store: ActivationStore) -> None:
    ids = np.array([4, 0, 3])
    store.write(ids, activations(ids, length=5), boundary=1)
    assert torch.equal(store.read(ids[::-1].copy(), positions=5), activations(ids[::-1].copy(), length=5))


def test_a_narrower_store_holds_rounded_numbers() -> None:
    store = ActivationStore.reserve(text_layout(np.array([2]), torch.bfloat16))
    exact = torch.full((1, 2, WIDTH), 1 / 3)
    store.write(np.array([0]), exact, boundary=1)
    assert torch.equal(store.read(np.array([0]), positions=2), exact.bfloat16())
    store.close()


def test_a_store_that_is_too_narrow_is_refused() -> None:
    store = ActivationStore.reserve(text_layout(np.array([2]), torch.float16))
    with pytest.raises(UserError, match="^cache.dtype: float16 cannot hold this model's activations; give bfloat16"):
        store.write(np.array([0]), torch.full((1, 2, WIDTH), 1e5), boundary=1)
    store.close()


# Misses


def test_what_was_never_written_is_a_miss(store: ActivationStore) -> None:
    store.write(np.array([1, 4]), activations(np.array([1, 4]), length=5), boundary=2)
    assert held(store, 2) == [False, True, False, False, True, False]


def test_another_boundary_is_a_miss(store: ActivationStore) -> None:
    ids = np.arange(6)
    store.write(ids, activations(ids, length=5), boundary=2)
    assert not any(held(store, 1) + held(store, 3))


def test_a_write_that_broke_off_is_a_miss(store: ActivationStore) -> None:
    ids = np.arange(6)
    store.write(ids, activations(ids, length=5), boundary=2)
    with pytest.raises(RuntimeError):
        store.write(ids[:2], torch.zeros(2, 5, WIDTH + 1), boundary=3)
    assert held(store, 2) == [False, False, True, True, True, True]
    assert not any(held(store, 3))


@pytest.mark.parametrize("num_batches", [1, 9])
def test_a_write_that_fails_in_its_thread_ends_the_pass(num_batches: int, store: ActivationStore) -> None:
    ids, too_wide = np.arange(2), torch.zeros(2, 5, WIDTH + 1)
    with pytest.raises(RuntimeError, match="shape"), _Writer(store, boundary=1) as writer:
        for _ in range(num_batches):
            writer.write(ids, too_wide)
    assert not any(held(store, 1))


def test_a_cleared_store_holds_nothing(store: ActivationStore) -> None:
    ids = np.arange(6)
    store.write(ids, activations(ids, length=5), boundary=2)
    store.clear()
    assert not any(held(store, 2))


def test_an_advance_replaces_in_place(store: ActivationStore) -> None:
    ids = np.arange(6)
    store.write(ids, activations(ids, length=5, boundary=1), boundary=1)
    for part in (ids[:2], ids[2:5]):
        store.write(part, store.read(part, positions=5) + 32, boundary=2)
    assert held(store, 1) == [False] * 5 + [True]
    assert held(store, 2) == [True] * 5 + [False]
    assert torch.equal(store.read(ids[:5], positions=5), activations(ids[:5], length=5, boundary=2))
    assert torch.equal(store.read(ids[5:], positions=5), activations(ids[5:], length=5, boundary=1))


# Memory


@given(lengths=LENGTHS, dtype=DTYPES)
@settings(max_examples=20, deadline=None)
def test_the_whole_space_is_reserved_and_no_more(lengths: np.ndarray, dtype: torch.dtype) -> None:
    layout = text_layout(lengths, dtype)
    assert layout.num_bytes == lengths.sum() * WIDTH * dtype.itemsize + len(lengths)
    store = ActivationStore.reserve(layout)
    status = os.fstat(store.descriptor)
    assert status.st_size == layout.num_bytes
    assert status.st_blocks * 512 >= layout.num_bytes
    store.close()


def test_nothing_is_left_after_close() -> None:
    before = traces()
    store = ActivationStore.reserve(image_layout(100))
    neighbour = ActivationStore.open(store.address, store.layout)
    assert len(traces()) > len(before)
    assert os.fstat(store.descriptor).st_nlink == 0  # the memory has no name, in /dev/shm or elsewhere
    for opened in (store, neighbour):
        opened.close()
        opened.close()
    assert traces() == before


def test_a_node_may_have_no_sample_of_a_split() -> None:
    nobody = StoreLayout(np.array([], dtype=np.int64), WIDTH, torch.float32, slots=np.full(3, -1))
    store = ActivationStore.reserve(nobody)
    assert store.holds(np.arange(3), 1).tolist() == [False] * 3
    store.clear()
    store.close()


def test_a_failed_reservation_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = traces()
    monkeypatch.setattr(os, "posix_fallocate", no_space)
    with pytest.raises(OSError, match="No space left on device"):
        ActivationStore.reserve(image_layout(100))
    assert traces() == before


def no_space(descriptor: int, offset: int, num_bytes: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


# One store a node

LAYOUTS = {"train": text_layout(np.array([9, 4, 9, 4, 9, 4, 9, 4])), "eval": image_layout(4)}
NUM_BYTES = sum(layout.num_bytes for layout in LAYOUTS.values())


def shares_its_stores(world: World) -> list[bool]:
    before = traces()
    cache, reason = open_cache(LAYOUTS, budget=NUM_BYTES, rank=world.rank, local_rank=world.rank)
    assert cache is not None and not reason
    assert cache.num_bytes == NUM_BYTES
    ids = np.arange(8)
    halves = [(ids[::2], 9), (ids[1::2], 4)]
    for half, length in halves:
        mine = half[world.rank :: world.size]
        cache.stores["train"].write(mine, activations(mine, length=length), boundary=1)
    dist.barrier()
    agrees = all(
        torch.equal(cache.stores["train"].read(half, positions=length), activations(half, length=length))
        for half, length in halves
    )
    everything = [agrees, *held(cache.stores["train"], 1), *held(cache.stores["eval"], 1)]
    dist.barrier()
    cache.clear()
    assert not any(held(cache.stores["train"], 1))
    cache.close()
    assert traces() == before
    return everything


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_of_a_node_share_their_stores(ranks: RankPool, world_size: int) -> None:
    assert ranks.run(world_size, shares_its_stores) == [[True] * 9 + [False] * 4] * world_size


def is_declined(world: World, how: str, local_size: int) -> str:
    """The reason, on nodes of ``local_size`` ranks; what goes wrong goes wrong on the last node alone."""
    before = traces()
    on_last_node = world.rank >= world.size - local_size
    budget = NUM_BYTES - 1 if how == "budget" and on_last_node else NUM_BYTES
    with pytest.MonkeyPatch.context() as patch:
        if how == "space" and on_last_node:
            reserve, calls = os.posix_fallocate, iter([True, False])
            patch.setattr(os, "posix_fallocate", lambda *a: reserve(*a) if next(calls) else no_space(*a))
        if how == "machine" and on_last_node:
            patch.setattr(shared_module, "available_host_memory", lambda: NUM_BYTES - 1)
        if how == "neighbour" and world.rank == world.size - 1:
            patch.setattr(ActivationStore, "address", "/proc/0/fd/0")
            patch.setattr(os, "open", not_allowed)
        cache, reason = open_cache(LAYOUTS, budget=budget, rank=world.rank, local_rank=world.rank % local_size)
    assert cache is None
    assert traces() == before
    return reason


def not_allowed(path: str, flags: int) -> int:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("budget", "its budget is 0.0 MB"),
        ("space", "could not be reserved (No space left on device)"),
        ("machine", "0.0 MB are available"),
        ("neighbour", "could not open its node's cache (Permission denied)"),
    ],
)
@pytest.mark.parametrize(("world_size", "local_size"), [(2, 2), (4, 2)])
def test_a_cache_is_declined_everywhere_for_one_reason(
    ranks: RankPool, how: str, said: str, world_size: int, local_size: int
) -> None:
    reasons = ranks.run(world_size, is_declined, how, local_size)
    assert len(set(reasons)) == 1
    assert said in reasons[0]


# Reading ahead


def wait_for(fetched: list[int], count: int) -> None:
    """Until the thread has gone as far ahead as it may; then it stands still."""
    deadline = time.monotonic() + 10
    while len(fetched) < count and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.005)
    assert len(fetched) == count


def reader_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("cache-reader")]


@pytest.mark.parametrize("num_items", [0, 1, 2, 3, 20])
def test_items_come_in_order_and_the_thread_ends(num_items: int) -> None:
    assert list(read_ahead(range(num_items), lambda item: item * item)) == [item * item for item in range(num_items)]
    assert not reader_threads()


def test_two_items_are_fetched_ahead_and_no_more() -> None:
    fetched: list[int] = []
    for number, _ in enumerate(read_ahead(range(8), fetched.append)):
        wait_for(fetched, min(number + 3, 8))
    assert fetched == list(range(8))


def test_an_exception_comes_out_at_its_item() -> None:
    seen = []

    def fetch(item: int) -> float:
        return 1 / (item - 5)

    with pytest.raises(ZeroDivisionError):
        for value in read_ahead(range(20), fetch):
            seen.append(value)
    assert len(seen) == 5
    assert not reader_threads()


def test_a_reader_that_is_closed_early_ends_its_thread() -> None:
    fetched: list[int] = []
    reader = read_ahead(range(1000), fetched.append)
    next(reader)
    assert reader_threads()
    reader.close()  # type: ignore[attr-defined]
    assert not reader_threads()
    assert len(fetched) <= 4


def test_a_batch_in_use_is_not_overwritten() -> None:
    num_tokens = np.repeat([4, 7], 12)
    store = ActivationStore.reserve(text_layout(num_tokens))
    for half, length in ((np.arange(12), 4), (np.arange(12, 24), 7)):
        store.write(half, activations(half, length=length, boundary=3), boundary=3)
    reader = BatchReader(store, boundary=3, device=torch.device("cpu"), dtype=torch.float32)
    batches = [np.array([a, a + 1]) for a in (0, 2, 12, 4, 6, 14, 8, 10, 16, 18, 20, 22)]
    fetched: list[int] = []

    def fetch(number: int) -> torch.Tensor | None:
        fetched.append(number)
        ids = batches[number]
        return reader.read(ids, positions=int(num_tokens[ids[0]]))

    for number, hidden in enumerate(read_ahead(range(len(batches)), fetch)):
        wait_for(fetched, min(number + 3, len(batches)))
        ids = batches[number]
        assert torch.equal(hidden, activations(ids, length=int(num_tokens[ids[0]]), boundary=3))
    store.close()


@pytest.mark.parametrize("budget", [1, 500, 10**6])
def test_the_device_holds_the_leading_samples(budget: int) -> None:
    """As many as its budget allows; the others come from the host, and all in the order that was asked for."""
    num_tokens = np.repeat([4, 7], 12)
    store = ActivationStore.reserve(text_layout(num_tokens))
    for half, length in ((np.arange(12), 4), (np.arange(12, 24), 7)):
        store.write(half, activations(half, length=length, boundary=3), boundary=3)
    device = torch.device("cpu")
    tier = DeviceTier(store, budget=budget, device=device)
    reader = BatchReader(store, boundary=3, device=device, dtype=torch.float32, tier=tier)
    for ids in (np.array([11, 0, 5, 1]), np.arange(12), np.array([23, 12, 17]), np.array([8, 3])):
        length = int(num_tokens[ids[0]])
        read = reader.read(ids, positions=length)
        assert read is not None and torch.equal(read, activations(ids, length=length, boundary=3))
    held, is_held = tier.read(np.array([11, 0, 5, 1]), positions=4)
    per_sample = 4 * store.layout.position_bytes
    assert is_held.tolist() == [place < budget // per_sample for place in (11, 0, 5, 1)] and len(held) == is_held.sum()
    assert tier.num_bytes <= budget and (budget < per_sample) == (tier.num_bytes == 0)
    store.close()


def test_a_batch_with_any_miss_is_none_and_others_have_the_step_s_type(store: ActivationStore) -> None:
    reader = BatchReader(store, boundary=3, device=torch.device("cpu"), dtype=torch.float64)
    store.write(np.arange(5), activations(np.arange(5), length=5), boundary=3)
    assert reader.read(np.array([4, 5]), positions=5) is None
    hidden = reader.read(np.array([4, 3]), positions=5)
    assert hidden is not None and hidden.dtype == torch.float64
    assert BatchReader(store, boundary=2, device=torch.device("cpu"), dtype=torch.float32).read(
        np.array([0]), positions=5
    ) is None  # fmt: skip
