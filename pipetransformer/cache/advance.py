"""The advance pass: all ranks compute the cached activations at a later boundary, from those at the present one."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from pipetransformer.cache.codec import decode, encode, rounding
from pipetransformer.cache.reader import read_ahead
from pipetransformer.cache.store import ActivationStore
from pipetransformer.data import Dataset, epoch_batches, loader
from pipetransformer.models import Chain

_WAITING = 2  # batches that wait to be written


@dataclass(frozen=True, slots=True)
class Advance:
    """The work of one advance pass, over all ranks.

    Attributes:
        seconds: seconds of this rank without those of ``evaluation_s``.
        evaluation_s: seconds for the splits to evaluate on, which evaluations are spared; waiting for another job that
            stores them is a part.
        stop: the unit behind the last one of the pass.
        samples: number of samples that training needs by (first unit of the computation, padded length).
        evaluation_samples: number of samples to evaluate on.
        is_found: whether earlier runs had stored all activations on every node.
        rounding: the relative error of what is stored for training, the largest of the ranks' first batches, or of a
            batch of each rank where it was found; None where it is stored as it is computed, or found by block.
        replaces: whether earlier runs had stored other activations, which are deleted.
    """

    seconds: float
    evaluation_s: float
    stop: int
    samples: Counter[tuple[int, int]]
    evaluation_samples: int
    is_found: bool = False
    rounding: float | None = None
    replaces: bool = False

    @property
    def num_samples(self) -> int:
        """Number of samples of the pass, over all ranks."""
        return self.samples.total() + self.evaluation_samples


def advance(
    store: ActivationStore,
    dataset: Dataset,
    chain: Chain,
    *,
    source: int | None,
    target: int,
    worker: int,
    num_workers: int,
    rows: int,
    num_loaders: int = 0,
    into: ActivationStore | None = None,
) -> tuple[Counter[tuple[int, int]], float | None]:
    """Computes the activations of this worker's samples at boundary ``target`` and stores them.

    A batch whose samples are all in the store at ``source`` starts there, any other from the inputs of the model. The
    rank must hold the frozen units, in eval mode. The caller must add a barrier before the first read.

    Args:
        source: the boundary of the stored activations, in blocks; None for an empty store.
        target: the boundary to compute, in blocks.
        worker: number of this rank among the ranks that share the store, from 0.
        num_workers: number of these ranks.
        rows: samples of a batch. The last batch of a length is filled up with copies, so that every matrix product has
            the shape [rows, length, width]: results depend on the shape.
        num_loaders: processes that prepare the model's inputs; they are not used where the store is read.
        into: the store to write to; None for the same.

    Returns:
        Number of samples by (first unit of the computation, padded length); and the relative error of what is stored,
        by this worker's first batch (``codec.rounding``), None where it is stored as it is computed.

    Raises:
        UserError: if the type of the store cannot hold the activations.
    """
    done: Counter[tuple[int, int]] = Counter()
    chain_input = _Input(store, chain, source=source)
    items = _items(store, dataset, worker=worker, num_workers=num_workers, rows=rows)
    if source is None and num_loaders:
        parts = loader(dataset, items=items, fetch=chain_input.fetch, num_workers=num_loaders)
    else:
        parts = read_ahead(items, partial(chain_input.fetch_here, dataset))
    stop, into, error = chain.numbering.behind(target), into or store, None
    dtype = into.layout.dtype
    with torch.inference_mode(), closing(parts), _Writer(into, boundary=target) as writer:
        for part in parts:
            hidden = _computed(part, chain, stop=stop)
            if error is None and hidden.dtype != dtype:
                error = rounding(hidden, dtype)
            writer.write(part.item.ids, hidden)
            done[part.first, part.item.length] += len(part.item.ids)
    return done, error


def compared(
    store: ActivationStore, dataset: Dataset, chain: Chain, *, boundary: int, worker: int, num_workers: int, rows: int
) -> tuple[bool, float | None]:
    """Whether a store that another job has filled holds, to the bit, what this one would compute; and the relative
    error of what is stored, as above. By this worker's fullest batch of the shortest samples. Arguments as in
    ``advance``.
    """
    items = _items(store, dataset, worker=worker, num_workers=num_workers, rows=rows)
    if not items:
        return True, None
    item = min(items, key=lambda each: (each.length, -len(each.ids)))
    ids, dtype = item.ids, store.layout.dtype
    part = _Input(store, chain, source=None).fetch(dataset, item)
    with torch.inference_mode():
        hidden = _computed(part, chain, stop=chain.numbering.behind(boundary))
    error = None if hidden.dtype == dtype else rounding(hidden, dtype)
    hidden = encode(hidden, dtype)
    is_same = bool(store.holds(ids, boundary).all()) and torch.equal(store.read(ids, positions=hidden.shape[1]), hidden)
    return is_same, error


def _items(store: ActivationStore, dataset: Dataset, *, worker: int, num_workers: int, rows: int) -> list[_Item]:
    """The batches of a worker."""
    slots = store.layout.slots
    samples = np.arange(len(dataset)) if slots is None else np.flatnonzero(slots >= 0)
    batches = epoch_batches(dataset.lengths[samples], batch_size=rows, seed=0, epoch=0, shuffle=False)
    items = [_Item(samples[batch.ids], np.resize(samples[batch.ids], rows), batch.length) for batch in batches]
    return items[worker::num_workers]


def _computed(part: _Part, chain: Chain, *, stop: int) -> Tensor:
    """The activations of a batch before unit ``stop``, without those of copies."""
    hidden = part.hidden.to(device=chain.device, non_blocking=True)
    if part.dtype is not None:
        hidden = decode(hidden, part.dtype)
    side = {key: value.to(chain.device, non_blocking=True) for key, value in part.side.items()}
    return chain.run(range(part.first, stop), hidden, side)[: len(part.item.ids)]


@dataclass(frozen=True, slots=True, eq=False)
class _Item:
    """Samples ``ids`` of one padded length, and ``filled``: the same with copies, up to a batch's rows."""

    ids: np.ndarray
    filled: np.ndarray
    length: int


@dataclass(slots=True)
class _Part:
    """What a batch's computation starts from: ``hidden`` enters unit ``first``. It is in stored form, to be computed in
    ``dtype``; raw inputs have None.
    """

    item: _Item
    first: int
    hidden: Tensor
    side: Mapping[str, Tensor]
    dtype: torch.dtype | None

    def pin_memory(self) -> _Part:
        """Pins the tensors on the host. The data loader calls it."""
        self.hidden = self.hidden.pin_memory()
        self.side = {key: value.pin_memory() for key, value in self.side.items()}
        return self


class _Input:
    """Fetches the inputs of batches, from the store where it has all samples of one, else from the dataset."""

    def __init__(self, store: ActivationStore, chain: Chain, *, source: int | None) -> None:
        self._store, self._chain, self._source = store, chain, source

    def fetch(self, dataset: Dataset, item: _Item) -> _Part:
        chain, first, source = self._chain, 0, self._source
        if source is not None and self._store.holds(item.filled, source).all():
            first = chain.numbering.behind(source)
        raw: Mapping[str, Tensor] = {}
        if first == 0 or chain.family.side_inputs:
            raw = dataset.inputs(item.filled, length=item.length, epoch=0)
        side = {key: raw[key] for key in chain.input_keys if key in raw}
        if first == 0:
            return _Part(item, 0, raw[chain.family.main_input], side, None)
        stored = chain.boundary(first - 1, rows=1, length=item.length)
        hidden = self._store.read(item.filled, positions=stored.shape[1])
        return _Part(item, first, hidden, side, stored.dtype)

    def fetch_here(self, dataset: Dataset, item: _Item) -> _Part:
        """In a thread of the rank, which pins what it fetches, as the data loader does."""
        part = self.fetch(dataset, item)
        return part.pin_memory() if self._chain.device.type == "cuda" else part


class _Writer:
    """Writes to the store in a thread, while the next batch is computed; few batches wait."""

    def __init__(self, store: ActivationStore, *, boundary: int) -> None:
        self._store, self._boundary = store, boundary
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="cache-writer")
        self._pending: deque[Future[None]] = deque()

    def __enter__(self) -> _Writer:
        return self

    def write(self, ids: np.ndarray, hidden: Tensor) -> None:
        """Raises what an earlier write has raised."""
        copied: torch.cuda.Event | None = None
        if hidden.device.type == "cuda":  # the device goes on while its copy is under way
            host = torch.empty(hidden.shape, dtype=hidden.dtype, pin_memory=True)
            host.copy_(hidden, non_blocking=True)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
            hidden = host
        self._pending.append(self._thread.submit(self._write, ids, hidden, copied))
        if len(self._pending) > _WAITING:
            self._pending.popleft().result()

    def _write(self, ids: np.ndarray, hidden: Tensor, copied: torch.cuda.Event | None) -> None:
        if copied is not None:
            copied.synchronize()
        self._store.write(ids, hidden, boundary=self._boundary)

    def __exit__(self, *raised: object) -> None:
        self._thread.shutdown(cancel_futures=raised[0] is not None)
        while self._pending and raised[0] is None:
            self._pending.popleft().result()
