"""What earlier runs have stored on this node, for blocks frozen from the first step on: one entry of training's splits,
one of those to evaluate on, so that either is found without the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from pipetransformer.cache.identity import Identity, digests_of_units
from pipetransformer.cache.kept import KeptStores
from pipetransformer.cache.shared import ActivationCache, open_kept
from pipetransformer.cache.store import StoreLayout
from pipetransformer.data import TRAINING, Dataset
from pipetransformer.models import Chain
from pipetransformer.process.collectives import values_of_ranks
from pipetransformer.process.world import World


class EarlierRuns:
    """Collective, as are its methods: made while all ranks have the weights of the start.

    Args:
        kept: the entries of this node.
        rows: samples of a batch of the advance pass.
    """

    def __init__(
        self, kept: KeptStores, chain: Chain, datasets: Mapping[str, Dataset], *, rows: int, world: World
    ) -> None:
        self._kept, self._world, self._identity = kept, world, None
        self._found: dict[int, frozenset[str]] = {}
        digests = digests_of_units(chain, world=world)[world.rank // world.local_size]
        if world.local_rank == 0:
            self._identity = Identity(chain, datasets, digests=digests, rows=rows)

    def stored(self, boundary: int, layouts: Mapping[str, StoreLayout]) -> frozenset[str]:
        """The splits that they have stored at this boundary on every node; asked once."""
        if boundary not in self._found:
            entries = entries_of(layouts)
            keys = self._keys(boundary, entries, by_block=False)
            own = {split for key, entry in zip(keys, entries) if not key or self._kept.has(key) for split in entry}
            self._found[boundary] = frozenset(own).intersection(*values_of_ranks(own))
        return self._found[boundary]

    def open(
        self, boundary: int, layouts: Mapping[str, StoreLayout], *, by_block: bool, budget: Callable[[], int]
    ) -> ActivationCache | None:
        """Their stores at this boundary, or new ones to be filled for later runs; None for none (``open_kept``).

        Args:
            by_block: whether the activations are rounded behind each block.
            budget: gives the bytes of all entries together.
        """
        entries, world = entries_of(layouts), self._world
        keys = self._keys(boundary, entries, by_block=by_block)
        return open_kept(
            entries, keys=keys, kept=self._kept, budget=budget, rank=world.rank, local_rank=world.local_rank
        )

    def _keys(self, boundary: int, entries: Sequence[Mapping[str, StoreLayout]], *, by_block: bool) -> list[str]:
        """Empty ones on ranks that are not their node's first."""
        identity = self._identity
        return ["" if identity is None else identity.key(boundary, entry, by_block=by_block) for entry in entries]


def entries_of(layouts: Mapping[str, StoreLayout]) -> list[dict[str, StoreLayout]]:
    """The layouts of each entry, training's first."""
    parts = ([split for split in layouts if (split in TRAINING) == is_first] for is_first in (True, False))
    return [{split: layouts[split] for split in part} for part in parts if part]
