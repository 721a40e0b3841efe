"""One store a node and split, reserved by the node's first rank and opened by its neighbours; or a reason why not."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch.distributed as dist

from pipetransformer.cache.store import ActivationStore, StoreLayout

__all__ = ["ActivationCache", "available_host_memory", "open_cache"]


@dataclass(frozen=True, slots=True)
class ActivationCache:
    """The stores by split (``train``, ``eval``)."""

    stores: Mapping[str, ActivationStore]

    @property
    def num_bytes(self) -> int:
        return sum(store.layout.num_bytes for store in self.stores.values())

    def clear(self) -> None:
        for store in self.stores.values():
            store.clear()

    def close(self) -> None:
        for store in self.stores.values():
            store.close()


def available_host_memory() -> int:
    """Bytes that may still be taken on this node: what the kernel has, or less where a control group allows less."""
    available = int(psutil.virtual_memory().available)
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    try:
        return min(available, int(limit.read_text()) - int(used.read_text()))
    except (OSError, ValueError):  # no control group, or "max"
        return available


def open_cache(
    layouts: Mapping[str, StoreLayout], *, budget: int | None, rank: int, local_rank: int
) -> tuple[ActivationCache | None, str]:
    """Collective. Reserves the stores on every node, or none anywhere.

    Args:
        budget: bytes a node; None for half of what is available.

    Returns:
        (cache, "") or (None, the reason in words), the same on all ranks.
    """
    wanted = sum(layout.num_bytes for layout in layouts.values())
    stores: dict[str, ActivationStore] = {}
    offer: dict[str, str] | str = {}
    if local_rank == 0:
        allowed = available_host_memory() // 2 if budget is None else budget
        if wanted > allowed:
            offer = f"the cache needs {wanted / 1e6:.1f} MB of host memory and its budget is {allowed / 1e6:.1f} MB"
        else:
            try:
                stores = {split: ActivationStore.reserve(layout) for split, layout in layouts.items()}
                offer = {split: store.address for split, store in stores.items()}
            except OSError as error:
                offer = f"the cache's {wanted / 1e6:.1f} MB of host memory could not be reserved ({os.strerror(error.errno or 0)})"
    offers: list[dict[str, str] | str] = _gather(offer)
    mine = offers[rank - local_rank]
    reason = next((o for o in offers if isinstance(o, str)), "")
    if not reason and local_rank != 0:
        assert isinstance(mine, dict)
        try:
            stores = {split: ActivationStore.open(mine[split], layout) for split, layout in layouts.items()}
        except OSError as error:
            reason = f"rank {rank} could not open its node's cache ({os.strerror(error.errno or 0)})"
    reason = next((r for r in _gather(reason) if r), "")
    if reason:
        for store in stores.values():
            store.close()
        return None, reason
    return ActivationCache(stores), ""


def _gather(value):  # type: ignore[no-untyped-def]
    gathered = [value] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered
