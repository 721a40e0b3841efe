"""AutoCache: the activation stores of a node, the boundaries that they may hold, and their advance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import torch
import torch.distributed as dist

from pipetransformer.cache.advance import advance
from pipetransformer.cache.shared import ActivationCache, open_cache
from pipetransformer.cache.store import ActivationStore, StoreLayout
from pipetransformer.config import Config
from pipetransformer.data import SET_ASIDE, Dataset, samples_of_nodes
from pipetransformer.models import Chain
from pipetransformer.plan.prefix import PrefixWork, cached_choices
from pipetransformer.process.collectives import values_of_ranks
from pipetransformer.process.heap import release_freed_memory
from pipetransformer.process.world import World

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Advance:
    """The work of one advance pass, over all ranks.

    Attributes:
        seconds: duration on this rank.
        stop: the unit behind the last one of the pass.
        samples: number of samples by (first unit of the computation, padded length).
    """

    seconds: float
    stop: int
    samples: Counter[tuple[int, int]]

    @property
    def num_samples(self) -> int:
        """Number of samples of the pass, over all ranks."""
        return self.samples.total()


class AutoCache:
    """One rank's part in the activation stores of its node. It takes no memory before ``reserve``.

    Attributes:
        boundary: boundary of the stored activations, in blocks; None for empty stores.
        path: all boundaries of the stores so far, in order. Where the stored type is narrower than that of the
            computation, values were rounded at each of them.
        declined: the reason for having no cache, in words; empty while a cache is possible.

    Args:
        datasets: the datasets by split; each split has its own store.
    """

    def __init__(self, config: Config, *, chain: Chain, datasets: Mapping[str, Dataset], world: World) -> None:
        self._config, self._chain, self._datasets, self._world = config, chain, datasets, world
        self._cache: ActivationCache | None = None
        self.boundary: int | None = None
        self.path: list[int] = []
        self.declined = "" if config.cache.enabled else "cache.enabled is false"
        if config.cache.enabled and datasets["train"].augmented:
            self.declined = "augmented training inputs are not cached"

    @property
    def num_bytes(self) -> int:
        """Bytes of the node's stores; 0 before ``reserve``."""
        return self._cache.num_bytes if self._cache is not None else 0

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

    def offers(
        self, frozen: int, *, evaluations: int, guard_passes: int = 0, may_advance: bool = True
    ) -> dict[int | None, tuple[PrefixWork, ...]]:
        """The possible boundaries of the cache for ``frozen`` blocks, each with its work outside of training steps.

        This work is the advance pass to the boundary, and the rest of the prefix in the remaining evaluations.

        Args:
            evaluations: number of evaluations to come.
            guard_passes: number of passes over the samples set aside to come.
            may_advance: whether the cache may move to another boundary.

        Returns:
            Work by boundary in blocks; None stands for no cache.
        """
        held = self.boundary if self.boundary is not None and self.boundary <= frozen else None  # else it is cleared
        choices = (None,) if self.declined else cached_choices(frozen, held=held)
        if not may_advance:
            choices = tuple(cached for cached in choices if cached in (None, held))
        passes = {SET_ASIDE: guard_passes}
        return {cached: self._work(frozen, cached, held, passes, evaluations) for cached in choices}

    def _work(
        self, frozen: int, cached: int | None, held: int | None, passes: Mapping[str, int], other_passes: int
    ) -> tuple[PrefixWork, ...]:
        stop, from_here, from_cached = map(self._chain.numbering.behind, (frozen, held or 0, cached or 0))
        work = list[PrefixWork]()
        for split, dataset in self._datasets.items():
            for length, count in zip(*np.unique(dataset.lengths, return_counts=True)):
                if split != "train":
                    work.append(
                        PrefixWork(from_cached, stop, int(length), int(count), times=passes.get(split, other_passes))
                    )
                if cached is not None and cached != held:
                    work.append(PrefixWork(from_here, from_cached, int(length), int(count)))
        return tuple(work)

    def store(self, split: str) -> ActivationStore | None:
        """The store of a split; None before ``reserve`` and where there is no cache."""
        return self._cache.stores[split] if self._cache is not None else None

    def reserve(self) -> str:
        """Collective. Reserves the memory at the first call. Returns the reason for having no cache, or an empty
        string.
        """
        if self._cache is None and not self.declined:
            budget = self._config.cache.host_budget
            if self._world.device.type == "cpu":  # else what the last step has freed would count as taken
                release_freed_memory()
                dist.barrier()
            self._cache, self.declined = open_cache(
                {split: self._layout(dataset) for split, dataset in self._datasets.items()},
                budget=budget if isinstance(budget, int) else None,
                rank=self._world.rank,
                local_rank=self._world.local_rank,
            )
        return self.declined

    def _layout(self, dataset: Dataset) -> StoreLayout:
        leaving = self._chain.boundary(0, rows=1, length=1)  # Note: the stem's: a last block may leave one row alone.
        computed = self._chain.boundary(self._chain.numbering.behind(1) - 1, rows=1, length=1)
        dtype = _DTYPES.get(self._config.cache.dtype, computed.dtype)
        world = self._world
        own = samples_of_nodes(dataset.lengths, num_nodes=world.num_nodes) == world.rank // world.local_size
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
            if self._world.local_rank == 0:
                self._cache.clear()
            dist.barrier()
            self.boundary = None
            self.path = []

    def advance(self, target: int) -> Advance:
        """Collective. Computes and stores every sample of all splits at boundary ``target``.

        The first ``target`` blocks must be frozen, and the memory reserved.

        Raises:
            UserError: if the type of the stores cannot hold the activations.
        """
        assert self._cache is not None
        start = perf_counter()
        done: Counter[tuple[int, int]] = Counter()
        for split, store in self._cache.stores.items():
            done += advance(
                store,
                self._datasets[split],
                self._chain,
                source=self.boundary if self.boundary is not None and self.boundary <= target else None,
                target=target,
                worker=self._world.local_rank,
                num_workers=self._world.local_size,
                # Those of a step at dp = world size, from the configuration and never from measurements: results
                # depend on the shape.
                rows=-(-self._config.train.batch_size // self._world.size),
                num_loaders=self._config.data.num_workers,
            )
        parts = values_of_ranks(done)  # also a barrier: no rank reads before all have written
        self.boundary = target
        self.path.append(target)
        stop = self._chain.numbering.behind(target)
        return Advance(seconds=perf_counter() - start, stop=stop, samples=sum(parts, Counter()))

    def close(self) -> None:
        """Frees this rank's part of the stores. May be called twice."""
        if self._cache is not None:
            self._cache.close()
            self._cache = None
