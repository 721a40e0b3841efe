"""The leading samples of a store in the memory of the step's device, so that they need not come from the host again."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pipetransformer.cache.store import ActivationStore

__all__ = ["DeviceTier"]


class DeviceTier:
    """Holds the first samples of each padded length, in their stored form, as far as a budget goes.

    They are copied at the first batch of their length, all at once: which rank reads a sample changes with every epoch.
    What is held stays as it is: make a new tier when the store changes.

    Args:
        budget: the most bytes to take.
    """

    def __init__(self, store: ActivationStore, *, budget: int, device: torch.device) -> None:
        self._store, self._left, self._device = store, budget, device
        self._held: dict[int, Tensor] = {}  # by positions, [samples, positions, stored width]

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes."""
        return sum(held.nbytes for held in self._held.values())

    def read(self, ids: np.ndarray, *, positions: int) -> tuple[Tensor, np.ndarray]:
        """The activations of those samples that are held.

        Args:
            ids: numbers of the samples [rows], all of one padded length; all must be in the store.
            positions: as in ``ActivationStore.read``.

        Returns:
            Activations [samples that are held, positions, stored width] on the device, in the order of ``ids``; and
            whether each sample is held, bool [rows].
        """
        region, places = self._store.region(ids, positions=positions)
        held = self._held.get(positions)
        if held is None:
            count = min(len(region), self._left // max(region[:1].nbytes, 1))
            held = self._held[positions] = region[:count].to(self._device, copy=True)
            self._left -= held.nbytes
        is_held: np.ndarray = (places >= 0) & (places < len(held))
        return held.index_select(0, torch.from_numpy(places[is_held]).to(self._device)), is_held
