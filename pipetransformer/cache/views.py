"""Views: the few augmented inputs of each sample that epochs take in turn, so that a cache can hold all of them."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping

import numpy as np
import torch

from pipetransformer.cache.codec import stored_dtype, stored_width
from pipetransformer.config import Config
from pipetransformer.data import Dataset
from pipetransformer.models import Chain
from pipetransformer.process.collectives import smallest
from pipetransformer.process.control_group import available_host_memory

__all__ = ["AllViews", "in_views", "settle_views", "view_numbers"]

_EPOCHS_A_VIEW, _FEWEST = 4, 2  # each view is read some times, or storing it would not pay


class AllViews(Dataset):
    """Every view of every sample of a dataset as a sample of its own: sample i of view v has the number v N + i."""

    metric_names = ()

    def __init__(self, source: Dataset) -> None:
        assert source.views is not None
        times = self._num_views = source.views
        self._source, self.kind = source, source.kind
        self.labels = torch.cat([source.labels] * times)
        self.lengths = np.tile(source.lengths, times)
        self.num_tokens = None if source.num_tokens is None else np.tile(source.num_tokens, times)
        self.fingerprint = hashlib.sha256(repr((source.fingerprint, "all views")).encode()).hexdigest()

    def inputs(
        self, ids: np.ndarray, *, length: int, epoch: int | None, keys: Collection[str] | None = None
    ) -> dict[str, torch.Tensor]:
        views, samples = np.divmod(ids, len(self._source))
        order = np.argsort(views, kind="stable")
        parts = [
            self._source.inputs(samples[views == view], length=length, epoch=int(view), keys=keys)
            for view in np.unique(views)
        ]
        back = torch.from_numpy(np.argsort(order))
        return {key: torch.cat([part[key] for part in parts])[back] for key in parts[0]}


def in_views(dataset: Dataset) -> Dataset:
    """The samples that a cache of ``dataset`` holds."""
    return dataset if dataset.views in (1, None) else AllViews(dataset)


def view_numbers(dataset: Dataset, ids: np.ndarray, *, epoch: int) -> np.ndarray:
    """The numbers of samples as an epoch sees them, among those of ``in_views``."""
    views = dataset.views
    return ids if views in (1, None) else ids + epoch % views * len(dataset)


def settle_views(datasets: Mapping[str, Dataset], config: Config, *, chain: Chain, nodes: int) -> int | None:
    """Collective. ``cache.views``, decided where it is ``auto``: a view for some epochs each, if the budget holds them
    beside the samples to evaluate on.

    Args:
        datasets: by split; the training data are augmented.
        nodes: number of nodes that share out the samples.

    Returns:
        None for new inputs at each epoch, which are not cached.
    """
    cache, train = config.cache, datasets["train"]
    if cache.views != "auto":
        return cache.views
    if not cache.enabled or not config.may_freeze or config.train.mixes:
        return None
    budget = cache.host_budget if isinstance(cache.host_budget, int) else available_host_memory() // 2
    leaving = chain.boundary(0, rows=1, length=int(train.lengths[0]))
    dtype = stored_dtype(cache.dtype, computed=leaving.dtype)
    of_sample = leaving.shape[1] * stored_width(leaving.shape[2], dtype) * dtype.itemsize
    evaluated = sum(len(data) for split, data in datasets.items() if split != "train")
    most = smallest((budget * nodes // of_sample - evaluated) // len(train))
    assert most is not None
    views = min(max(_FEWEST, config.train.epochs // _EPOCHS_A_VIEW), most)
    return views if views >= _FEWEST else None
