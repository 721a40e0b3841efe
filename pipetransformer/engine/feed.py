"""One rank's inputs under a plan, from the global batches: raw inputs, or activations of the prefix."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from pipetransformer.cache import ActivationStore, BatchReader, DeviceTier, read_ahead, view_numbers
from pipetransformer.data import IGNORED, Batch, Dataset, Mixing, Share, loader, replica_share
from pipetransformer.engine.executor import StepInput
from pipetransformer.models import MASK, Chain
from pipetransformer.plan import ParallelPlan

_LARGE_BYTES = 2**22


@dataclass(frozen=True, slots=True, eq=False)
class _Item:
    share: Share
    length: int
    global_count: int
    epoch: int
    index: int
    partners: np.ndarray | None


class Feed:
    """The inputs of ``rank`` from ``dataset`` under ``plan``.

    The rank of stage 0 gets the input of the first active unit. Without a prefix this is the model's own input, else
    its activations: read from ``store`` up to the plan's cached boundary, then computed without gradients.
    Other ranks get only the further inputs of their units, such as attention masks. All ranks get the labels.

    Args:
        store: the cache's store of this dataset; None where there is none.
        device_budget: the most bytes of it to hold on the device too.
        num_workers: processes that prepare inputs; they are not used where the cache is read.
        skips_masks: whether active units get no mask where no text of a batch is padded. Then the last bits of a sample
            depend on its batch, which is of no weight in training.
        mixing: how pictures are mixed; None for not at all.
    """

    def __init__(
        self,
        chain: Chain,
        dataset: Dataset,
        plan: ParallelPlan,
        *,
        rank: int,
        store: ActivationStore | None,
        num_workers: int,
        skips_masks: bool,
        device_budget: int = 0,
        mixing: Mixing | None = None,
    ) -> None:
        self._mixing = mixing
        self._chain = chain
        self._dataset = dataset
        self._plan = plan
        self._replica = plan.replica_of(rank)
        self._is_first = plan.stage_of(rank) == 0
        self._num_workers = num_workers
        self._skips_masks = skips_masks and not chain.needs_mask
        self._positions: dict[int, int] = {}
        self._reader: BatchReader | None = None
        self._tier: DeviceTier | None = None
        if self._is_first and store is not None and plan.cached is not None:
            dtype = chain.boundary(plan.first_computed - 1, rows=1, length=1).dtype
            self._tier = DeviceTier(store, budget=device_budget, device=chain.device) if device_budget else None
            self._reader = BatchReader(store, boundary=plan.cached, device=chain.device, dtype=dtype, tier=self._tier)

    @property
    def device_bytes(self) -> int:
        """Bytes of the cache that the device holds."""
        return 0 if self._tier is None else self._tier.num_bytes

    def batches(self, batches: Sequence[Batch], *, epoch: int) -> Generator[StepInput, None, None]:
        """This rank's part of each global batch, in order, read ahead by a thread or by worker processes."""
        items = [self._item(batch, epoch=epoch) for batch in batches]
        if self._reader is not None:
            fetch = partial(self._fetch, self._dataset)
            yield from (read_ahead(items, fetch) if self._reads_ahead(items) else map(fetch, items))
        else:
            yield from loader(self._dataset, items=items, fetch=self._fetch, num_workers=self._num_workers)

    def _item(self, batch: Batch, *, epoch: int) -> _Item:
        plan, mixing = self._plan, self._mixing
        share = replica_share(batch, dp=plan.dp, replica=self._replica, num_microbatches=plan.num_microbatches)
        partners = None if mixing is None else mixing.partners(share.ids, batch, epoch=epoch)
        return _Item(share, batch.length, len(batch.ids), epoch, batch.index, partners)

    def _reads_ahead(self, items: Sequence[_Item]) -> bool:
        """Whether a thread reads the cache: on a CPU, a small batch is read sooner than a thread is woken."""
        chain = self._chain
        if chain.device.type != "cpu" or not items:
            return True
        read = chain.boundary(self._plan.first_computed - 1, rows=len(items[0].share.ids), length=items[0].length)
        return read.nbytes >= _LARGE_BYTES

    def _stored_positions(self, length: int) -> int:
        """Positions of a sample at the plan's cached boundary, by its padded length."""
        if length not in self._positions:
            boundary = self._chain.boundary(self._plan.first_computed - 1, rows=1, length=length)
            self._positions[length] = boundary.shape[1]
        return self._positions[length]

    def _fetch(self, dataset: Dataset, item: _Item) -> StepInput:
        chain, plan, ids = self._chain, self._plan, item.share.ids
        labels = _labels(dataset, ids)
        hidden = None
        if self._reader is not None:
            stored = view_numbers(dataset, ids, epoch=item.epoch)
            hidden = self._reader.read(stored, positions=self._stored_positions(item.length))
        needs_main = self._is_first and hidden is None
        keys = chain.input_keys if needs_main or plan.first_staged == 0 else chain.family.side_inputs
        raw: dict[str, Tensor] = {}
        if needs_main or keys:
            wanted = (*keys, chain.family.main_input) if needs_main else keys
            raw = dataset.inputs(ids, length=item.length, epoch=item.epoch, keys=wanted)
        if needs_main:
            hidden = raw[chain.family.main_input]
        if item.partners is not None:
            hidden, labels = self._mixed(dataset, item, item.partners, hidden, labels)
        if item.share.num_real < len(ids):
            labels[item.share.num_real :] = 0 if item.partners is not None else IGNORED
        batch = StepInput(
            hidden=hidden,
            inputs={key: raw[key] for key in keys},
            ids=ids,
            labels=labels,
            length=item.length,
            rows=len(ids),
            global_count=item.global_count,
            enters=0 if needs_main else plan.first_computed,
            num_real=item.share.num_real,
            is_padded=MASK in raw and not bool(raw[MASK].all()),
        )
        # Note: the loader pins what it fetches itself.
        return batch.pin_memory() if self._reader is not None and chain.device.type == "cuda" else batch

    def _mixed(
        self, dataset: Dataset, item: _Item, partners: np.ndarray, hidden: Tensor | None, labels: Tensor
    ) -> tuple[Tensor | None, Tensor]:
        """The rows' inputs, where this rank has them, and their targets."""
        assert self._mixing is not None
        if hidden is None:
            others = own = torch.empty((len(partners), 1, item.length, item.length), device="meta")
        else:
            key = self._chain.family.main_input
            own, others = hidden, dataset.inputs(partners, length=item.length, epoch=item.epoch, keys=(key,))[key]
        found, targets = self._mixing.mixed(
            (own, others), (labels, _labels(dataset, partners)), epoch=item.epoch, index=item.index
        )
        return None if hidden is None else found, targets

    def enter(self, batch: StepInput) -> None:
        """Moves ``batch`` to the device, in place, and runs the uncached rest of the prefix, without gradients."""
        self._enter(batch)
        if self._skips_masks and MASK in batch.inputs and not batch.is_padded:
            batch.inputs = {key: value for key, value in batch.inputs.items() if key != MASK}

    def _enter(self, batch: StepInput) -> None:
        chain, plan = self._chain, self._plan
        if chain.device.type != "cpu":
            batch.move(chain.device)
        if batch.hidden is None:
            return
        if plan.first_staged:
            units = range(batch.enters, plan.first_staged)
            if units:
                with torch.no_grad():
                    batch.hidden = chain.run(units, batch.hidden, batch.inputs)
            batch.inputs = {key: batch.inputs[key] for key in chain.family.side_inputs}
        elif batch.hidden.is_floating_point():
            batch.hidden = batch.hidden.to(chain.dtype)


def _labels(dataset: Dataset, ids: np.ndarray) -> Tensor:
    return torch.index_select(dataset.labels, 0, torch.from_numpy(ids))


class Incoming:
    """The inputs of the rest of an epoch, some of them read ahead.

    Attributes:
        epoch: the epoch, from 0.
        left: number of batches that were not taken yet.
    """

    def __init__(self, inputs: Generator[StepInput, None, None], *, epoch: int, left: int) -> None:
        self._inputs = inputs
        self.epoch, self.left = epoch, left

    def take(self) -> StepInput:
        """The next batch."""
        self.left -= 1
        return next(self._inputs)

    def close(self) -> None:
        """Ends threads and worker processes."""
        self._inputs.close()
