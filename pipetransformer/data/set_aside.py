"""Training samples set aside: nothing trains on them, and their loss tells what freezing costs."""

from __future__ import annotations

import hashlib
from collections.abc import Collection

import numpy as np
import torch

from pipetransformer.data.dataset import Dataset


class Part(Dataset):
    """Some samples of a dataset, numbered anew.

    Args:
        source: the whole dataset.
        ids: numbers of the samples in ``source`` [samples].
        trains: whether the part is for training; else its inputs are not augmented.
    """

    metric_names = ()

    def __init__(self, source: Dataset, ids: np.ndarray, *, trains: bool) -> None:
        self._source, self._ids, self._trains = source, ids, trains
        self.kind, self.labels, self.lengths = source.kind, source.labels[torch.from_numpy(ids)], source.lengths[ids]
        self.num_tokens = None if source.num_tokens is None else source.num_tokens[ids]
        self.groups = None if source.groups is None else source.groups[ids]
        self.extent, self.place = source.extent, source.place
        self.views = source.views if trains else 1
        self.fingerprint = hashlib.sha256(repr((source.fingerprint, trains)).encode() + ids.tobytes()).hexdigest()

    def inputs(
        self, ids: np.ndarray, *, length: int, epoch: int | None, keys: Collection[str] | None = None
    ) -> dict[str, torch.Tensor]:
        return self._source.inputs(self._ids[ids], length=length, epoch=epoch if self._trains else None, keys=keys)


def set_aside(data: Dataset, *, most: int) -> tuple[Dataset, Dataset] | None:
    """Draws ``most`` samples of ``data``, or fewer where samples of one group go together: groups that fit, in turn.

    Whatever the job's seed, the same ones: so that jobs of several seeds train on the same rest, and share its cache.

    Returns:
        What is left to train on, and the samples set aside; None where hardly any group is small enough.
    """
    groups = np.arange(len(data)) if data.groups is None else data.groups
    names, sizes = np.unique(groups, return_counts=True)
    order = np.random.default_rng(len(data)).permutation(len(names))
    taken, room = list[int](), most
    for group in order.tolist():
        if sizes[group] <= room:
            taken.append(group)
            room -= int(sizes[group])
    if most - room < 2:  # of one sample there is no error
        return None
    is_aside = np.isin(groups, names[taken])
    return Part(data, np.flatnonzero(~is_aside), trains=True), Part(data, np.flatnonzero(is_aside), trains=False)
