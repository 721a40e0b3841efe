"""The advance pass: all ranks together carry the cached activations from one boundary to a later one."""

from __future__ import annotations

import numpy as np
import torch

from pipetransformer.cache.store import ActivationStore
from pipetransformer.data import Dataset, epoch_batches
from pipetransformer.models import Chain

__all__ = ["advance"]


def advance(
    store: ActivationStore,
    dataset: Dataset,
    chain: Chain,
    *,
    source: int | None,
    target: int,
    own: np.ndarray | None,
    worker: int,
    num_workers: int,
    rows: int,
) -> dict[tuple[int, int], int]:
    """Runs this worker's share of ``dataset`` up to boundary ``target`` and stores it there.

    Samples that the store holds at ``source`` start from there, others from the inputs. The frozen units must be held
    and in eval mode. Readers start after a barrier that the caller provides.

    Args:
        own: slot of each sample, -1 for those of other nodes; None where all are this node's.
        worker, num_workers: this rank among those that share the store.
        rows: samples a batch; the last of a length is filled up with copies, so that every product has the shape
            [rows, length, width] (results depend on shape).

    Returns:
        Samples by (first unit that was run, padded length).
    """
    done: dict[tuple[int, int], int] = {}
    numbering = chain.numbering
    samples = np.arange(len(dataset)) if own is None else np.flatnonzero(own >= 0)
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
            done[first, length] = done.get((first, length), 0) + len(real)
    return done
