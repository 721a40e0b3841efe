"""AutoCache: the activation stores of a node, the boundaries that they may hold, and their advance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from time import perf_counter

import numpy as np
import torch.distributed as dist

from pipetransformer.cache.advance import Advance, advance, compared
from pipetransformer.cache.codec import stored_dtype
from pipetransformer.cache.disk_reads import disk_ns
from pipetransformer.cache.earlier import EarlierRuns, entries_of, may_keep
from pipetransformer.cache.kept import KeptStores, stores_folder
from pipetransformer.cache.publisher import Publisher
from pipetransformer.cache.shared import ActivationCache, Tier, open_cache, sizes_of
from pipetransformer.cache.store import ActivationStore, StoreLayout
from pipetransformer.cache.views import in_views
from pipetransformer.config import Config
from pipetransformer.data import SET_ASIDE, TRAINING, Dataset, samples_of_nodes
from pipetransformer.errors import UserError
from pipetransformer.models import Chain
from pipetransformer.plan.prefix import PrefixWork, cached_choices
from pipetransformer.process.collectives import led_by, values_of_ranks
from pipetransformer.process.heap import release_freed_memory
from pipetransformer.process.world import World

Lender = Callable[[range], AbstractContextManager[None]]


def nothing_lent(units: range) -> AbstractContextManager[None]:
    """For ranks that hold the weights of the prefix."""
    return nullcontext()


class AutoCache:
    """One rank's part in the activation stores of its node. It takes no memory before ``reserve``.

    Attributes:
        boundary: boundary of the stored activations, in blocks; None for empty stores.
        path: all boundaries of the stores so far, in order. Where the stored type is narrower than that of the
            computation, values were rounded at each of them.
        declined: the reason for having no cache, in words; empty while a cache is possible.
        stays: the reason for no other boundary than the present one, in words; empty while another is possible.
        is_of_start: whether no step had trained the units before the boundary when the stores were filled.

    Args:
        datasets: the datasets by split; each split has its own store.
    """

    def __init__(self, config: Config, *, chain: Chain, datasets: Mapping[str, Dataset], world: World) -> None:
        self._config, self._chain, self._world = config, chain, world
        self._samples, self._datasets = datasets, {split: in_views(data) for split, data in datasets.items()}
        self._cache: ActivationCache | None = None  # what is read
        self._next: ActivationCache | None = None  # what the next advance writes, if not the same
        self.boundary: int | None = None
        self.path: list[int] = []
        self.is_of_start = False
        self.stays, self.declined = "", "" if config.cache.enabled else "cache.enabled is false"
        if not self.declined and config.train.mixes:
            self.declined = "training inputs are mixed anew at each step (train.mixup, train.cutmix)"
        if not self.declined and datasets["train"].views is None:
            self.declined = "training inputs are augmented anew at each epoch; cache.views would cycle a few of them"
        self._kept = KeptStores(stores_folder())
        self._earlier: EarlierRuns | None = None
        self._kept_at = 0  # the boundary of the stores that are kept
        self._publisher = Publisher()
        if not self.declined and may_keep(config, world):
            self._earlier = EarlierRuns(self._kept, chain, self._datasets, rows=self._rows, world=world)

    @property
    def _rows(self) -> int:
        """Samples of a batch of the advance pass: those of a step at dp = world size. Results depend on the shape."""
        return -(-self._config.train.batch_size // self._world.size)

    @property
    def num_bytes(self) -> int:
        """Bytes of the node's stores; 0 before ``reserve``."""
        return self._cache.num_bytes if self._cache is not None else 0

    @property
    def tier(self) -> Tier:
        """Place of the node's stores."""
        return self._cache.tier if self._cache is not None else "host"

    def read_bytes(self, ids: np.ndarray) -> int:
        """Bytes of the stored activations of these training samples, as far as they belong to this node."""
        if self._cache is None or self.boundary is None:
            return 0
        layout = self._cache.stores["train"].layout
        slots = ids if layout.slots is None else layout.slots[ids]
        positions = layout.positions[slots[slots >= 0]]
        if self._chain.leaves_one_row(self.boundary):
            positions = np.ones_like(positions)
        return int(positions.sum()) * layout.position_bytes

    def disk_ns(self) -> float:
        """Collective. Mean nanoseconds that a byte takes longer to be read where memory cannot hold the stores."""
        if self.declined or self._config.cache.disk_budget is None or not self._config.may_freeze:
            return 0.0
        return disk_ns(sum(sizes_of(self._layouts()).values()), self._kept.folder, world=self._world)

    def offers(
        self,
        frozen: int,
        *,
        evaluations: int,
        guard_passes: int = 0,
        may_advance: bool = True,
        at_start: bool = False,
    ) -> dict[int | None, tuple[PrefixWork, ...]]:
        """The possible boundaries of the cache for ``frozen`` blocks, each with its work outside of training steps.

        This work is the advance pass to the boundary, and the rest of the prefix in the remaining evaluations.

        Args:
            evaluations: number of evaluations to come.
            guard_passes: number of passes over the samples set aside to come.
            may_advance: whether the cache may move to another boundary.
            at_start: whether no step has been trained. Then what an earlier run has stored costs no advance pass, and
                the call is collective.

        Returns:
            Work by boundary in blocks; None stands for no cache.
        """
        held = self.boundary if self.boundary is not None and self.boundary <= frozen else None  # else it is cleared
        choices = (None,) if self.declined else cached_choices(frozen, held=held)
        if not may_advance or self.stays:
            choices = tuple(cached for cached in choices if cached in (None, held))
        passes = {SET_ASIDE: guard_passes}
        there = frozenset[str]()
        if self._earlier is not None and at_start and held is None and frozen in choices:
            there = self._earlier.stored(frozen, self._layouts())
        return {cached: self._work(frozen, cached, held, passes, evaluations, there=there) for cached in choices}

    def advance_work(self, cached: int, *, held: int | None) -> tuple[PrefixWork, ...]:
        """Of the advance pass to boundary ``cached`` from ``held``; None: an empty cache."""
        return tuple(part for part in self._work(cached, cached, held, {}, 0) if part.times)

    def _work(
        self,
        frozen: int,
        cached: int | None,
        held: int | None,
        passes: Mapping[str, int],
        other_passes: int,
        *,
        there: frozenset[str] = frozenset(),
    ) -> tuple[PrefixWork, ...]:
        stop, from_here, from_cached = map(self._chain.numbering.behind, (frozen, held or 0, cached or 0))
        work = list[PrefixWork]()
        for split, dataset in self._datasets.items():
            for length, count in zip(*np.unique(dataset.lengths, return_counts=True)):
                if split != "train":
                    work.append(
                        PrefixWork(from_cached, stop, int(length), int(count), times=passes.get(split, other_passes))
                    )
                if cached is not None and cached != held and split not in there:
                    work.append(PrefixWork(from_here, from_cached, int(length), int(count)))
        return tuple(work)

    def store(self, split: str) -> ActivationStore | None:
        """The store of a split; None before ``reserve`` and where there is no cache."""
        return self._cache.stores[split] if self._cache is not None else None

    def reserve(self, boundary: int | None = None, *, by_block: bool = False, at_start: bool = False) -> str:
        """Collective. Reserves the place of the next advance, if there is none yet: memory, or disk where that is too
        small.

        Args:
            boundary: the boundary of the plan to come; None for any.
            by_block: as in ``advance``.
            at_start: whether no step has trained the units before it. Then the stores of an earlier run are taken, or
                new ones are left to later runs.

        Returns:
            The reason for not having it, or an empty string. What is cached so far stays.
        """
        if self.declined or (boundary is not None and boundary == self.boundary):
            return self.declined
        if self._next is not None or (self._cache is not None and not self._cache.is_kept):
            return ""
        if boundary is not None and at_start and self._earlier is not None:
            self._next = self._opened_kept(boundary, by_block=by_block)
        if self._next is None:
            self._next, reason = self._opened()
            if self._cache is None:
                self.declined = reason
            else:
                self.stays = reason
        if self._cache is None and self._next is not None and not self._next.is_kept:
            self._cache, self._next = self._next, None
        return self.declined or self.stays

    def _opened_kept(self, boundary: int, *, by_block: bool) -> ActivationCache | None:
        """Collective. What earlier runs have stored or later ones may find, and stores of this job alone for the rest;
        None where nothing is kept.
        """
        assert self._earlier is not None
        layouts, self._kept_at = self._layouts(), boundary
        parts = self._earlier.open(boundary, layouts, by_block=by_block, budget=self._budget_of_kept)
        missing = {split: layouts[split] for split in layouts if not any(split in part.stores for part in parts)}
        if parts and missing:
            own, _ = self._opened(missing)
            if own is None:
                for part in parts:
                    part.close()
                return None
            parts.append(own)
        return ActivationCache.joined(parts) if parts else None

    def _budget_of_kept(self) -> int:
        """Bytes of all stores on disk together; 0 where no folder can hold them."""
        with suppress(OSError):
            return self._kept.budget(self._config.cache.disk_budget or 0)
        return 0

    def _opened(self, layouts: Mapping[str, StoreLayout] | None = None) -> tuple[ActivationCache | None, str]:
        """Collective. Stores of this job alone, of all splits where none are given, or the reason against them."""
        budget, disk = self._config.cache.host_budget, self._config.cache.disk_budget
        if self._world.device.type == "cpu":  # else what the last step has freed would count as taken
            release_freed_memory()
            dist.barrier()
        return open_cache(
            layouts or self._layouts(),
            budget=budget if isinstance(budget, int) else None,
            rank=self._world.rank,
            local_rank=self._world.local_rank,
            spill=None if disk is None else partial(self._kept.spill, setting=disk),
        )

    def _layouts(self) -> dict[str, StoreLayout]:
        return {split: self._layout(self._samples[split], dataset) for split, dataset in self._datasets.items()}

    def _layout(self, samples: Dataset, dataset: Dataset) -> StoreLayout:
        """Of the store of ``dataset``, which has the samples in all their views."""
        leaving = self._chain.boundary(0, rows=1, length=1)  # Note: the stem's: a last block may leave one row alone.
        computed = self._chain.boundary(self._chain.numbering.behind(1) - 1, rows=1, length=1)
        dtype = stored_dtype(self._config.cache.dtype, computed=computed.dtype)
        world = self._world
        node = world.rank // world.local_size if world.sample_nodes > 1 else 0
        own = samples_of_nodes(samples.lengths, num_nodes=world.sample_nodes) == node
        own = np.tile(own, len(dataset) // len(samples))
        slots = None if own.all() else np.where(own, np.cumsum(own) - 1, -1)
        is_text = dataset.num_tokens is not None
        positions = dataset.lengths if is_text else np.full(len(dataset), leaving.shape[1])
        has_rows = self._chain.leaves_one_row(self._chain.num_blocks)
        return StoreLayout(positions[own], leaving.shape[-1], dtype, has_rows=has_rows, slots=slots)

    def follow(self, frozen: int) -> None:
        """Collective. Clears the stores if they hold a boundary behind the first ``frozen`` blocks.

        Call it before blocks unfreeze: the activations behind them will change.
        """
        if self.boundary is not None and frozen < self.boundary:
            assert self._cache is not None
            if self._cache.is_kept:  # others may read them
                self._end_publication()
                self._cache.close()
                self._cache = None
            elif self._world.local_rank == 0:
                self._cache.clear()
            dist.barrier()
            self.boundary, self.is_of_start, self.stays = None, False, ""
            self.path = []

    def advance(
        self, target: int, *, lent: Lender = nothing_lent, by_block: bool = False, at_start: bool = False
    ) -> Advance:
        """Collective. Computes and stores every sample of all splits at boundary ``target``, unless an earlier run has.

        The first ``target`` blocks must be frozen, and the memory reserved with the same ``at_start``.

        Args:
            lent: a collective context in which every rank has the weights of some units.
            by_block: whether no rank has more than one block of them at a time: all samples pass it, then the next.

        Raises:
            UserError: if the type of the stores cannot hold the activations.
        """
        start, evaluation_s, behind = perf_counter(), 0.0, self._chain.numbering.behind
        replaces, rounding = False, None
        source = self.boundary if self.boundary is not None and self.boundary <= target else None
        # Note: a pass by block has none but its own block, and cannot compute a sample anew.
        if self._next is not None and self._next.is_kept and not by_block:
            with lent(range(behind(self._kept_at))):
                replaces, rounding = self._check(self._next, self._kept_at)
        into = self._next or self._cache
        assert into is not None
        done, is_found = dict[str, Counter[tuple[int, int]]](), all(values_of_ranks(into.is_complete))
        stops = range((source or 0) + 1, target + 1) if by_block else range(target, target + 1)
        before, origin = source, into if source is None or self._cache is None else self._cache
        splits = [split for entry in entries_of(self._layouts()) for split in entry]
        for stop in () if is_found else stops:
            with lent(range(behind(before or 0), behind(stop))):
                for split in splits:
                    began = perf_counter()
                    samples, error = self._pass(split, into, origin=origin, source=before, target=stop)
                    done[split] = done.get(split) or samples
                    rounding = (error or rounding) if split == "train" else rounding
                    evaluation_s += perf_counter() - began if split not in TRAINING else 0.0
                    if stop == target == self._kept_at and (by_block or source is None):  # as their key says
                        self._publish(into, split, target)
            before, origin = stop, into
        if self._cache is not None and into is not self._cache:
            self._end_publication()
            self._cache.close()
        self._cache, self._next, self.boundary, self.is_of_start = into, None, target, at_start
        self.path += stops
        return Advance(
            seconds=perf_counter() - start - evaluation_s,
            evaluation_s=evaluation_s + sum(into.waited_s.get(split, 0.0) for split in splits if split not in TRAINING),
            stop=behind(target),
            samples=sum((found for split, found in done.items() if split in TRAINING), Counter()),
            evaluation_samples=sum(found.total() for split, found in done.items() if split not in TRAINING),
            is_found=is_found,
            rounding=rounding,
            replaces=replaces,
        )

    def _publish(self, into: ActivationCache, split: str, boundary: int) -> None:
        """Leaves an entry to later runs, once the last of its splits is filled."""
        for held in into.held:
            if not held.is_complete and [*held.paths][-1] == split:
                samples = {name: len(self._datasets[name]) for name in held.paths}
                model, data = self._config.model.name, self._config.data.name
                about = {"model": model, "data": data, "boundary": boundary, "samples": samples}
                self._publisher.publish(held, about=about)

    def _end_publication(self) -> None:
        """Collective. Waits, on all ranks, as long as a disk takes."""
        led_by(self._world.rank - self._world.local_rank, self._publisher.wait)

    def _pass(
        self, split: str, into: ActivationCache, *, origin: ActivationCache, source: int | None, target: int
    ) -> tuple[Counter[tuple[int, int]], float | None]:
        """Collective. An advance pass over a split, unless this node has it: the samples and the relative error of what
        was stored, over all ranks.
        """
        mine: tuple[Counter[tuple[int, int]], float | None] = Counter(), None
        if split not in into.complete:
            mine = advance(
                origin.stores[split],
                self._datasets[split],
                self._chain,
                source=source,
                target=target,
                worker=self._world.local_rank,
                num_workers=self._world.local_size,
                rows=self._rows,
                num_loaders=self._config.data.num_workers,
                into=into.stores[split],
            )
        parts = values_of_ranks(mine)  # also a barrier: no rank reads before all have written
        errors = [error for _, error in parts if error is not None]
        return sum((samples for samples, _ in parts), Counter()), max(errors, default=None)

    def _check(self, kept: ActivationCache, boundary: int) -> tuple[bool, float | None]:
        """Collective. Deletes entries of other runs that hold something else than this job would compute, by a batch of
        each rank and split, and reserves memory on all nodes. Raises UserError where there is none.

        Returns:
            Whether there were any; and the relative error of what is stored for training, over all ranks, if not.
        """
        world, others, error = self._world, set[str](), None
        place = {"worker": world.local_rank, "num_workers": world.local_size, "rows": self._rows}
        for split in kept.complete:
            store, dataset = kept.stores[split], self._datasets[split]
            is_same, rounding = compared(store, dataset, self._chain, boundary=boundary, **place)
            others |= set() if is_same else {split}
            error = rounding if split == "train" else error
        found = values_of_ranks((others, error))
        rounding = max((error for _, error in found if error is not None), default=None)
        if not any(others for others, _ in found):
            return False, rounding
        first = world.rank - world.local_rank
        of_node = set[str]().union(*(others for others, _ in found[first : first + world.local_size]))
        kept.close()
        for held in kept.held:
            if of_node.intersection(held.paths):
                with suppress(OSError):  # a folder of another user's
                    self._kept.delete(held.key)
        self._next, reason = self._opened()
        if reason:
            raise UserError(f"cache: the stores of an earlier run hold other activations, and {reason}; free memory")
        return True, None

    def close(self, *, is_interrupted: bool = False) -> None:
        """Frees this rank's part of the stores; what later runs may find is completed before, unless the job was
        interrupted. May be called twice.
        """
        self._publisher.close(is_cancelled=is_interrupted)
        for cache in (self._cache, self._next):
            if cache is not None:
                cache.close()
        self._cache = self._next = None
