"""The advance pass: all ranks compute the cached activations at a later boundary, from those at the present one."""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch

from pipetransformer.cache.store import ActivationStore
from pipetransformer.data import Dataset, epoch_batches
from pipetransformer.models import Chain


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
) -> Counter[tuple[int, int]]:
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

    Returns:
        Number of samples by (first unit of the computation, padded length).

    Raises:
        UserError: if the type of the store cannot hold the activations.
    """
    done: Counter[tuple[int, int]] = Counter()
    numbering = chain.numbering
    slots = store.layout.slots
    samples = np.arange(len(dataset)) if slots is None else np.flatnonzero(slots >= 0)
    batches = epoch_batches(dataset.lengths[samples], batch_size=rows, seed=0, epoch=0, shuffle=False)
    with torch.inference_mode():
        for batch in batches[worker::num_workers]:
            real, length = samples[batch.ids], batch.length
            ids = np.resize(real, rows)
            first = numbering.behind(source) if source is not None and store.holds(ids, source).all() else 0
            inputs = {}
            if first == 0 or chain.family.side_inputs:
                raw = dataset.inputs(ids, length=length, epoch=0)
                inputs = {key: value.to(chain.device) for key, value in raw.items()}
            if first == 0:
                hidden = inputs[chain.family.main_input]
            else:
                hidden = store.read(ids, length=length).to(chain.device)
                hidden = hidden.to(chain.boundary(first - 1, rows=1, length=length).dtype)
            side = {key: inputs[key] for key in chain.input_keys if key in inputs}
            hidden = chain.run(range(first, numbering.behind(target)), hidden, side)
            store.write(real, hidden[: len(real)], boundary=target)
            done[first, length] += len(real)
    return done
