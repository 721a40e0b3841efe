"""Samples of a user's own: a map-style dataset of torch's, of (input, label) pairs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from pipetransformer.data.dataset import Dataset
from pipetransformer.data.metrics import METRICS
from pipetransformer.errors import UserError

Metric = Callable[[np.ndarray, np.ndarray], float]
Collate = Callable[[list[Any]], Any]


class OwnDataset(Dataset):
    """``items[i]`` is (input, label): a tensor, or a mapping of tensors by argument name; a class, or a number.

    Args:
        key: the argument of the model's forward that a single tensor is for.
        metrics: ``(classes or scores [samples], labels [samples]) -> figure``, by name, more is better; None for
            accuracy, or of scores Pearson's correlation.
        collate: makes a batch of a list of inputs; torch's own if not given.

    Raises:
        UserError: the items are not of that kind, or differ each time.
    """

    num_tokens = None

    def __init__(
        self, items: Any, *, key: str, name: str, metrics: Mapping[str, Metric] | None, collate: Collate | None
    ) -> None:
        if not (hasattr(items, "__len__") and hasattr(items, "__getitem__")) or not len(items):
            raise UserError(f"{name}: give a dataset with a length, of at least one (input, label) pair")
        self._items, self._key, self._collate, self.place = items, key, collate or default_collate, "memory"
        try:
            labels = [items[number][1] for number in range(len(items))]
            self.labels = torch.as_tensor(labels)
        except (TypeError, ValueError, KeyError, IndexError) as error:
            raise UserError(f"{name}: its items are no (input, label) pairs ({error})") from error
        if self.labels.ndim != 1:
            raise UserError(f"{name}: a label has {self.labels.ndim - 1} dimensions; give a class or a number each")
        self.kind = "scores" if self.labels.is_floating_point() else "classes"
        self.labels = self.labels.float() if self.kind == "scores" else self.labels.long()
        usual = "pearson" if self.kind == "scores" else "accuracy"
        self._metrics = metrics or {usual: METRICS[usual]}
        self.metric_names = tuple(self._metrics)
        first, again = self._batch([0]), self._batch([0])
        if any(not torch.equal(value, again[each]) for each, value in first.items()):
            raise UserError(f"{name}: sample 0 is another one each time; augment in the model, or not at all")
        main = first[key] if key in first else next(iter(first.values()))
        length = main.shape[1] if not main.is_floating_point() and main.ndim > 1 else 1
        self.lengths = np.full(len(items), length, dtype=np.int64)
        content = (self.labels.numpy().tobytes(), *(value.numpy().tobytes() for value in first.values()))
        self.fingerprint = hashlib.sha256(repr((type(items).__qualname__, content)).encode()).hexdigest()

    def inputs(
        self, ids: np.ndarray, *, length: int, epoch: int | None, keys: Collection[str] | None = None
    ) -> dict[str, Tensor]:
        found = self._batch(ids.tolist())
        return found if keys is None else {each: found[each] for each in keys if each in found}

    def measure(self, predictions: np.ndarray) -> dict[str, float]:
        labels = self.labels.numpy()
        return {name: float(metric(predictions, labels)) for name, metric in self._metrics.items()}

    def _batch(self, ids: Sequence[int]) -> dict[str, Tensor]:
        found = self._collate([self._items[number][0] for number in ids])
        return dict(found) if isinstance(found, Mapping) else {self._key: found}
