"""Reading ahead: what a step needs is fetched in order, by this process or by worker processes."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch.utils.data import DataLoader

from pipetransformer.data.dataset import Dataset
from pipetransformer.errors import UserError

Item = TypeVar("Item")
Fetched = TypeVar("Fetched")


def loader(
    dataset: Dataset, *, items: Sequence[Item], fetch: Callable[[Dataset, Item], Fetched], num_workers: int
) -> Generator[Fetched, None, None]:
    """Yield ``fetch(dataset, item)`` for each item, in order; tensors are pinned where there is a GPU. Its UserError
    is raised here.

    Workers start at the first ``next`` and end with the iterator, be it exhausted, closed or dropped. They are forked:
    ``fetch`` may be anything. Pinning looks into dicts, lists, tuples (a plain tuple comes out as a list) and objects
    with a ``pin_memory`` method.
    """
    # Note: the DataLoader's own iterator must be referenced from here alone: it ends its workers when it is collected.
    for fetched in DataLoader(
        items,  # type: ignore[arg-type]
        batch_size=None,
        num_workers=num_workers,
        # Note: from Python 3.14 on workers are not forked unless asked, and what ``fetch`` refers to would be pickled.
        multiprocessing_context="fork" if num_workers else None,
        collate_fn=partial(_fetched, fetch, dataset),
        pin_memory=torch.cuda.is_available(),
        generator=torch.Generator(),  # Else starting to iterate would draw from the stream that dropout draws from.
    ):
        if isinstance(fetched, UserError):
            raise fetched
        yield fetched


def _fetched(fetch: Callable[[Dataset, Item], Fetched], dataset: Dataset, item: Item) -> Fetched | UserError:
    """Note: what a worker raises reaches the job as a traceback in one string."""
    try:
        return fetch(dataset, item)
    except UserError as error:
        return error
