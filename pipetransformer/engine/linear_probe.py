"""A linear head at every boundary of the model: how much of the task each of its blocks leaves to be learnt.

G. Alain and Y. Bengio, "Understanding intermediate layers using linear classifier probes" (arXiv 1610.01644).
"""

from __future__ import annotations

import numpy as np
import torch

from pipetransformer.data import Dataset, epoch_batches
from pipetransformer.models import MASK, Chain
from pipetransformer.process.collectives import values_of_ranks
from pipetransformer.process.world import World

MOST_SAMPLES, MOST_SHARE = 1000, 1 / 3
_PENALTIES = 10.0 ** np.arange(-3, 4)  # times the mean eigenvalue of the activations' Gram matrix


def boundary_scores(chain: Chain, dataset: Dataset, *, world: World, rows: int) -> tuple[float, ...] | None:
    """Collective. ``explained`` at every boundary [blocks + 1], that behind the stem first, by a third of the training
    data and at most 1,000 samples. The same numbers on all ranks; None for questions, whose labels are positions.

    Every rank must hold the whole chain.

    Args:
        rows: samples of a forward.
    """
    if dataset.kind == "spans":
        return None
    count = min(MOST_SAMPLES, max(2, int(MOST_SHARE * len(dataset))))
    ids = np.sort(np.random.default_rng(len(dataset)).permutation(len(dataset))[:count])
    batches = epoch_batches(dataset.lengths[ids], batch_size=rows, seed=0, epoch=0, shuffle=False)
    chain.train(False)
    with torch.inference_mode():
        mine = [pooled(chain, dataset, ids[b.ids], length=b.length) for b in batches[world.rank :: world.size]]
    chain.train()
    order = np.concatenate([ids[batch.ids] for rank in range(world.size) for batch in batches[rank :: world.size]])
    targets, scores = _targets(dataset)[order], {}
    for boundary in range(chain.num_blocks + 1):
        own = [found[boundary] for found in mine]
        parts = values_of_ranks(np.concatenate(own) if own else None)
        if boundary % world.size == world.rank:
            features = np.concatenate([part for part in parts if part is not None])
            scores[boundary] = round(explained(features, targets), 6)
    found = {boundary: score for part in values_of_ranks(scores) for boundary, score in part.items()}
    return tuple(found[boundary] for boundary in range(chain.num_blocks + 1))


def explained(features: np.ndarray, targets: np.ndarray) -> float:
    """The share of the targets' variance that a linear head explains, each sample judged by a head of all others.

    Ridge regression, its penalty chosen by the same figure, in closed form (Allen, "The relationship between variable
    selection and data augmentation and a method for prediction", Technometrics 1974).

    Args:
        features: activations [samples, width].
        targets: numbers to be told [samples, columns].

    Returns:
        0 for a head that tells nothing, at most 1.
    """
    features = features - features.mean(0)
    spread = features.std(0)
    features = features / np.where(spread > 0, spread, 1.0)
    targets = targets - targets.mean(0)
    variance = float((targets**2).sum())
    if variance == 0:
        return 0.0
    if len(features) > features.shape[1]:  # else most of the matrix of all samples would be zero
        vectors, sizes, _ = np.linalg.svd(features.astype(np.float64), full_matrices=False)
        values = sizes**2
    else:
        values, vectors = np.linalg.eigh((features @ features.T).astype(np.float64))
        values = values.clip(0)
    turned, least = vectors.T @ targets, np.inf
    for penalty in _PENALTIES * max(float(values.sum()) / len(features), 1e-12):
        kept = values / (values + penalty)
        # The mean is fitted too: it takes 1 / samples of each sample's own weight.
        own = (vectors**2) @ kept + 1.0 / len(targets)
        errors = (targets - vectors @ (kept[:, None] * turned)) / (1.0 - own.clip(max=1 - 1e-9))[:, None]
        least = min(least, float((errors**2).sum()))
    return max(0.0, 1.0 - least / variance)


def pooled(chain: Chain, dataset: Dataset, ids: np.ndarray, *, length: int) -> list[np.ndarray]:
    """Mean activations of each sample over its positions, without padding, at every boundary [samples, width]."""
    raw = {key: v.to(chain.device) for key, v in dataset.inputs(ids, length=length, epoch=None).items()}
    hidden, side = raw[chain.family.main_input], {key: raw[key] for key in chain.input_keys if key in raw}
    found, first = list[np.ndarray](), 0
    for block in range(chain.num_blocks + 1):
        stop = max(1, chain.numbering.behind(block))
        hidden, first = chain.run(range(first, stop), hidden, side), stop
        weights = torch.ones(hidden.shape[:2], device=hidden.device)
        if MASK in side and hidden.shape[1] == length:  # else the one row that the head reads
            weights = side[MASK].float()
        pooled = (hidden.float() * weights[..., None]).sum(1) / weights.sum(1, keepdim=True)
        found.append(pooled.cpu().numpy())
    return found


def _targets(dataset: Dataset) -> np.ndarray:
    """A column a class, 1 for the sample's own and 0 for others; scores as they are [samples, columns]."""
    labels = dataset.labels.numpy()
    return np.eye(int(labels.max()) + 1)[labels] if dataset.kind == "classes" else labels[:, None].astype(np.float64)
