"""One store per node and split, in memory or on disk. The first rank of a node reserves it, the others open it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pipetransformer.cache.kept import Held
from pipetransformer.cache.store import ActivationStore, StoreLayout
from pipetransformer.process.collectives import led_by, values_of_ranks
from pipetransformer.process.control_group import available_host_memory

Tier = Literal["host", "disk"]


@dataclass(frozen=True, slots=True)
class ActivationCache:
    """The stores of a node, as one rank has them open.

    Attributes:
        stores: store of each split (``train``, ``eval``, ...).
        tier: place of the stores.
        is_kept: whether some are files that later runs find; no one writes to any after they are filled.
        complete: the splits that another job has filled.
        held: the entries of these files, of some splits each, on the rank that reserved them.
        waited_s: seconds until the stores of an entry were there, by its first split; another job's filling counts.
        spilled: the places on disk of the other stores there, likewise; they go with this job.
    """

    stores: Mapping[str, ActivationStore]
    tier: Tier = "host"
    is_kept: bool = False
    complete: frozenset[str] = frozenset()
    held: tuple[Held, ...] = field(default=(), compare=False)
    waited_s: Mapping[str, float] = field(default_factory=dict, compare=False)
    spilled: tuple[Held, ...] = field(default=(), compare=False)

    @property
    def is_complete(self) -> bool:
        """Whether other jobs have filled them all."""
        return self.complete == set(self.stores)

    @classmethod
    def joined(cls, parts: Sequence[ActivationCache]) -> ActivationCache:
        """Stores of different splits together, some of them kept."""
        return cls(
            {split: store for part in parts for split, store in part.stores.items()},
            "disk",
            True,
            frozenset[str]().union(*(part.complete for part in parts)),
            tuple(held for part in parts for held in part.held),
            {split: seconds for part in parts for split, seconds in part.waited_s.items()},
            tuple(held for part in parts for held in part.spilled),
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of all stores together."""
        return sum(store.layout.num_bytes for store in self.stores.values())

    def clear(self) -> None:
        """Empties every store."""
        for store in self.stores.values():
            store.clear()

    def close(self) -> None:
        """Closes every store on this rank, and gives the entries back. May be called twice."""
        for store in self.stores.values():
            store.close()
        for held in (*self.held, *self.spilled):
            held.close()


def open_cache(
    layouts: Mapping[str, StoreLayout],
    *,
    budget: int | None,
    rank: int,
    local_rank: int,
    spill: Callable[[Mapping[str, int]], tuple[Held | None, int]] | None = None,
) -> tuple[ActivationCache | None, str]:
    """Collective. Reserves the stores on every node, or on none.

    Args:
        layouts: layout of this node's store, by split.
        budget: bytes per node; None for half of the available memory.
        rank: this rank.
        local_rank: number of this rank on its node, from 0.
        spill: gives a place on disk for stores of these bytes, by split, which memory does not hold, or None; and the
            most bytes that there can be room for. None for no disk.

    Returns:
        The cache and an empty string, or None and the reason in words. The reason is the same on all ranks.
    """
    stores: dict[str, ActivationStore] = {}
    spilled: tuple[Held, ...] = ()

    def lead() -> tuple[Tier, dict[str, str], str]:
        nonlocal stores, spilled
        stores, spilled, reason = _reserved(layouts, budget=budget, spill=spill)
        return "disk" if spilled else "host", {split: store.address for split, store in stores.items()}, reason

    tier, addresses, reason = led_by(rank - local_rank, lead)  # a disk may take its time
    if not reason and local_rank != 0:
        try:
            stores = open_all(layouts, lambda split, layout: ActivationStore.open(addresses[split], layout))
        except OSError as error:
            reason = f"rank {rank} could not open its node's cache ({_reason(error)})"
    reason = next((r for r in values_of_ranks(reason) if r), "")
    cache = ActivationCache(stores, tier, spilled=spilled)
    if reason:
        cache.close()
    return None if reason else cache, reason


def _reserved(
    layouts: Mapping[str, StoreLayout],
    *,
    budget: int | None,
    spill: Callable[[Mapping[str, int]], tuple[Held | None, int]] | None,
) -> tuple[dict[str, ActivationStore], tuple[Held, ...], str]:
    """Stores in memory or, where that is too small, on disk, with their place there; else the reason against it."""
    wanted, available = sum(layout.num_bytes for layout in layouts.values()), available_host_memory()
    budget = available // 2 if budget is None else budget
    if wanted <= min(budget, available):
        try:
            return open_all(layouts, lambda _, layout: ActivationStore.reserve(layout)), (), ""
        except OSError as error:
            reason = f"the cache's {_megabytes(wanted)} of host memory could not be reserved ({_reason(error)})"
    else:
        reason = (
            f"the cache needs {_megabytes(wanted)} of host memory; its budget is {_megabytes(budget)} "
            f"and {_megabytes(available)} are available"
        )
    if spill is None:
        return {}, (), reason
    held = None
    try:
        held, disk = spill(sizes_of(layouts))
        if held is None:
            small = f"cache.disk_budget has room for {_megabytes(disk)}"
            return {}, (), f"{reason}; {small if disk < wanted else 'its folder on disk cannot be written, or locked'}"
        return reserve_in(held, layouts), (held,), ""
    except OSError as error:
        if held is not None:
            held.close()
        return {}, (), f"{reason}; on disk it could not be reserved ({_reason(error)})"


def sizes_of(layouts: Mapping[str, StoreLayout]) -> dict[str, int]:
    """Bytes of the file of each store."""
    return {split: max(layout.num_bytes, 1) for split, layout in layouts.items()}


def reserve_in(held: Held, layouts: Mapping[str, StoreLayout]) -> dict[str, ActivationStore]:
    """New stores at the paths of ``held``. Raises OSError, with all of them closed."""
    return open_all(layouts, lambda split, layout: ActivationStore.reserve(layout, place=Path(held.paths[split])))


def open_all(
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
