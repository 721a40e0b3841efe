"""What earlier runs have stored on this node, for blocks frozen from the first step on: one entry of training's splits,
one of those to evaluate on, so that either is found without the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter

from pipetransformer.cache.identity import Identity, digests_of_units
from pipetransformer.cache.kept import LONGEST_WAIT, Held, KeptStores
from pipetransformer.cache.shared import ActivationCache, open_all, reserve_in, sizes_of
from pipetransformer.cache.store import ActivationStore, StoreLayout
from pipetransformer.config import Config
from pipetransformer.data import TRAINING, Dataset
from pipetransformer.models import Chain
from pipetransformer.process.collectives import led_by, values_of_ranks
from pipetransformer.process.world import World

_Layouts = Mapping[str, StoreLayout]


def may_keep(config: Config, world: World) -> bool:
    """Whether later runs may find what this one stores: not of a user's own code, of which little more than the weights
    is known, nor where nodes hold the same samples: each would wait for another one in a folder that they share.
    """
    wants = config.may_freeze and config.cache.disk_budget is not None
    return wants and config.task != "own" and (world.num_nodes == 1 or world.sample_nodes > 1)


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

    def stored(self, boundary: int, layouts: _Layouts) -> frozenset[str]:
        """The splits that they have stored at this boundary on every node; asked once."""
        if boundary not in self._found:
            entries = entries_of(layouts)
            keys = self._keys(boundary, entries, by_block=False)
            own = {split for key, entry in zip(keys, entries) if not key or self._kept.has(key) for split in entry}
            self._found[boundary] = frozenset(own).intersection(*values_of_ranks(own))
        return self._found[boundary]

    def open(
        self, boundary: int, layouts: _Layouts, *, by_block: bool, budget: Callable[[], int]
    ) -> list[ActivationCache]:
        """Their stores at this boundary, or new ones to be filled for later runs: of each entry that every node has.

        Args:
            by_block: whether the activations are rounded behind each block.
            budget: gives the bytes of all entries together.
        """
        entries, made = entries_of(layouts), list[ActivationCache | None]()

        def lead() -> list[tuple[dict[str, str], bool, Mapping[str, float]] | None]:
            made.extend(self._led(entries, self._keys(boundary, entries, by_block=by_block), budget=budget))
            return [(c.held[0].paths, c.is_complete, c.waited_s) if c is not None else None for c in made]

        offers = led_by(self._world.rank - self._world.local_rank, lead)
        if self._world.local_rank != 0:
            made += [None if offer is None else _of_lead(own, *offer) for own, offer in zip(entries, offers)]
        had = [all(of_entry) for of_entry in zip(*values_of_ranks([cache is not None for cache in made]))]
        for cache, is_had in zip(made, had):
            if cache is not None and not is_had:
                cache.close()
        return [cache for cache, is_had in zip(made, had) if cache is not None and is_had]

    def _led(
        self, entries: Sequence[_Layouts], keys: Sequence[str], *, budget: Callable[[], int]
    ) -> list[ActivationCache | None]:
        """On the first rank of a node: its entries.

        Who has one to fill waits for no other: another job may wait for it. What is there is taken before anything is
        deleted to make room.
        """
        held, waited, sizes = list[Held | None](), list[float](), [sizes_of(own) for own in entries]

        def wait(number: int) -> float | None:
            return None if all(each is not None and each.is_complete for each in held[:number]) else 0.0

        for number, key in enumerate(keys):
            began = perf_counter()
            held.append(self._kept.find(key, sizes=sizes[number], wait=wait(number)))
            waited.append(perf_counter() - began)
        begun = 0  # bytes of entries whose files are not there yet
        for number, key in enumerate(keys):
            if held[number] is None:
                held[number] = self._kept.begin(key, sizes=sizes[number], budget=budget() - begun)
                begun += sum(sizes[number].values()) if held[number] is not None else 0
            if held[number] is None:  # another job may just have begun it; who has waited in vain waits no more
                again = 0.0 if waited[number] >= LONGEST_WAIT else wait(number)
                held[number] = self._kept.find(key, sizes=sizes[number], wait=again)
        return [_mapped(own, each, seconds) for own, each, seconds in zip(entries, held, waited)]

    def _keys(self, boundary: int, entries: Sequence[_Layouts], *, by_block: bool) -> list[str]:
        """Empty ones on ranks that are not their node's first."""
        identity = self._identity
        return ["" if identity is None else identity.key(boundary, entry, by_block=by_block) for entry in entries]


def entries_of(layouts: _Layouts) -> list[dict[str, StoreLayout]]:
    """The layouts of each entry, training's first."""
    parts = ([split for split in layouts if (split in TRAINING) == is_first] for is_first in (True, False))
    return [{split: layouts[split] for split in part} for part in parts if part]


def _mapped(layouts: _Layouts, held: Held | None, seconds: float) -> ActivationCache | None:
    """The stores of an entry, on the rank that holds it; None where a disk fails."""
    if held is None:
        return None
    paths, complete = held.paths, frozenset(layouts if held.is_complete else ())
    try:
        if complete:
            stores = open_all(layouts, lambda split, layout: ActivationStore.find(paths[split], layout))
        else:
            stores = reserve_in(held, layouts)
        return ActivationCache(stores, "disk", True, complete, (held,), {next(iter(layouts)): seconds})
    except OSError:  # a full disk, say
        held.close()
        return None


def _of_lead(
    layouts: _Layouts, paths: Mapping[str, str], is_complete: bool, waited_s: Mapping[str, float]
) -> ActivationCache | None:
    """The stores of an entry, on the other ranks of a node."""
    open_one = ActivationStore.find if is_complete else ActivationStore.open
    try:
        stores = open_all(layouts, lambda split, layout: open_one(paths[split], layout))
    except OSError:
        return None
    complete = frozenset(layouts if is_complete else ())
    return ActivationCache(stores, "disk", True, complete, waited_s=waited_s)
