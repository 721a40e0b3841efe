"""One store per node and split. The first rank of a node reserves it, the other ranks of the node open it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from pipetransformer.cache.store import ActivationStore, StoreLayout
from pipetransformer.process.collectives import values_of_ranks

_CONTROL_GROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class ActivationCache:
    """The stores of a node, as one rank has them open.

    Attributes:
        stores: store of each split (``train``, ``eval``, ...).
    """

    stores: Mapping[str, ActivationStore]

    @property
    def num_bytes(self) -> int:
        """Bytes of all stores together."""
        return sum(store.layout.num_bytes for store in self.stores.values())

    def clear(self) -> None:
        """Empties every store."""
        for store in self.stores.values():
            store.clear()

    def close(self) -> None:
        """Closes every store on this rank."""
        for store in self.stores.values():
            store.close()


def available_host_memory() -> int:
    """Free bytes of memory on this node: those of the kernel, or fewer where a control group sets a lower limit."""
    available = int(psutil.virtual_memory().available)
    try:
        limit, used = (int((_CONTROL_GROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        counters = dict(line.split() for line in (_CONTROL_GROUP / "memory.stat").read_text().splitlines())
        # Note: "current" counts the page cache too, which the kernel frees on demand.
        return min(available, limit - used + int(counters["inactive_file"]))
    except (OSError, ValueError, KeyError):  # no control group, or "max"
        return available


def open_cache(
    layouts: Mapping[str, StoreLayout], *, budget: int | None, rank: int, local_rank: int
) -> tuple[ActivationCache | None, str]:
    """Collective. Reserves the stores on every node, or on none.

    Args:
        layouts: layout of this node's store, by split.
        budget: bytes per node; None for half of the available memory.
        rank: this rank.
        local_rank: number of this rank on its node, from 0.

    Returns:
        The cache and an empty string, or None and the reason in words. The reason is the same on all ranks.
    """
    wanted = sum(layout.num_bytes for layout in layouts.values())
    stores: dict[str, ActivationStore] = {}
    offer: dict[str, str] | str = {}
    if local_rank == 0:
        available = available_host_memory()
        budget = available // 2 if budget is None else budget
        if wanted > min(budget, available):
            offer = (
                f"the cache needs {_megabytes(wanted)} of host memory; its budget is {_megabytes(budget)} "
                f"and {_megabytes(available)} are available"
            )
        else:
            try:
                stores = _open_all(layouts, lambda _, layout: ActivationStore.reserve(layout))
                offer = {split: store.address for split, store in stores.items()}
            except OSError as error:
                offer = f"the cache's {_megabytes(wanted)} of host memory could not be reserved ({_reason(error)})"
    offers = values_of_ranks(offer)
    reason = next((o for o in offers if isinstance(o, str)), "")
    addresses = offers[rank - local_rank]
    if not reason and local_rank != 0:
        assert isinstance(addresses, dict)
        try:
            stores = _open_all(layouts, lambda split, layout: ActivationStore.open(addresses[split], layout))
        except OSError as error:
            reason = f"rank {rank} could not open its node's cache ({_reason(error)})"
    reason = next((r for r in values_of_ranks(reason) if r), "")
    cache = ActivationCache(stores)
    if reason:
        cache.close()
    return None if reason else cache, reason


def _open_all(
    layouts: Mapping[str, StoreLayout], open_one: Callable[[str, StoreLayout], ActivationStore]
) -> dict[str, ActivationStore]:
    """The store of every split. Raises OSError, with all stores closed again."""
    stores: dict[str, ActivationStore] = {}
    try:
        for split, layout in layouts.items():
            stores[split] = open_one(split, layout)
    except OSError:
        ActivationCache(stores).close()
        raise
    return stores


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f} MB"


def _reason(error: OSError) -> str:
    return os.strerror(error.errno or 0)
