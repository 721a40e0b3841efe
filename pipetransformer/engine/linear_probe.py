"""A linear head at every boundary of the model: how much of the task each of its blocks leaves to be learnt.

G. Alain and Y. Bengio, "Understanding intermediate layers using linear classifier probes" (arXiv 1610.01644).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from pipetransformer.data import Dataset, epoch_batches
from pipetransformer.models import MASK, Chain
from pipetransformer.process.collectives import values_of_ranks
from pipetransformer.process.world import World

MOST_SAMPLES, MOST_SHARE = 1000, 1 / 4
_MANY = 64  # samples of a forward: with fewer of them, casting the weights takes most of it
_PENALTIES = 10.0 ** np.arange(-3, 4)  # times the mean eigenvalue of the activations' Gram matrix


def boundary_scores(chain: Chain, dataset: Dataset, *, world: World, rows: int) -> tuple[float, ...] | None:
    """Collective. ``explained`` at every boundary [blocks + 1], that behind the stem first, by a quarter of the
    training data and at most 1,000 samples. The same numbers on all ranks; None for questions, whose labels are
    positions.

    Units that a rank does not hold are lent to it, one after another.

    Args:
        rows: samples of a forward in training. Here, without a backward, up to four times as many, where they are few.
    """
    if dataset.kind == "spans":
        return None
    count = min(MOST_SAMPLES, max(2, int(MOST_SHARE * len(dataset))))
    ids = np.sort(np.random.default_rng(len(dataset)).permutation(len(dataset))[:count])
    shares = _shares(dataset, ids, rows=max(rows, min(4 * rows, _MANY)), num_ranks=world.size)
    chain.train(False)
    mine = pooled(chain, dataset, shares[world.rank])
    chain.train()
    order = np.concatenate([batch for share in shares for batch, _ in share])
    targets, features = _targets(dataset, order), {}
    for boundary in range(chain.num_blocks + 1):
        parts = values_of_ranks(np.concatenate(mine[boundary]) if mine[boundary] else None)
        if boundary % world.size == world.rank:
            features[boundary] = np.concatenate([part for part in parts if part is not None])
    scores = {boundary: round(explained(found, targets), 6) for boundary, found in features.items()}
    told = {boundary: score for part in values_of_ranks(scores) for boundary, score in part.items()}
    return tuple(told[boundary] for boundary in range(chain.num_blocks + 1))


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
    features = features.astype(np.float64)
    if len(features) > features.shape[1]:  # of the smaller of both matrices; what lies near 0 has no weight below
        values, axes = np.linalg.eigh(features.T @ features)
        vectors = features @ (axes / np.sqrt(values.clip(1e-12 * max(values[-1], 1e-300))))
    else:
        values, vectors = np.linalg.eigh(features @ features.T)
    values = values.clip(0)
    turned, least = vectors.T @ targets, np.inf
    for penalty in _PENALTIES * max(float(values.sum()) / len(features), 1e-12):
        kept = values / (values + penalty)
        # The mean is fitted too: it takes 1 / samples of each sample's own weight.
        own = (vectors**2) @ kept + 1.0 / len(targets)
        errors = (targets - vectors @ (kept[:, None] * turned)) / (1.0 - own.clip(max=1 - 1e-9))[:, None]
        least = min(least, float((errors**2).sum()))
    return max(0.0, 1.0 - least / variance)


@torch.no_grad()
def pooled(chain: Chain, dataset: Dataset, batches: Sequence[tuple[np.ndarray, int]]) -> list[list[np.ndarray]]:
    """Mean activations of each sample over its positions, without padding, at every boundary and of every batch
    [samples, width]. The device has the activations of one batch at a time; those of the others lie in host memory.

    Args:
        batches: sample ids of each batch, and their padded length.
    """
    inputs = [_inputs(chain, dataset, ids, length=length) for ids, length in batches]
    hidden = [given[chain.family.main_input].cpu() for given in inputs]
    found, first = [list[np.ndarray]() for _ in range(chain.num_blocks + 1)], 0
    for block, means in enumerate(found):
        units, first = range(first, max(1, chain.numbering.behind(block))), max(1, chain.numbering.behind(block))
        with chain.lent(units):
            for batch, (given, (_, length)) in enumerate(zip(inputs, batches)):
                leaving = chain.run(units, hidden[batch].to(chain.device), given)
                means.append(_mean(leaving, given, length=length))
                hidden[batch] = leaving.cpu()
    return found


def _shares(dataset: Dataset, ids: np.ndarray, *, rows: int, num_ranks: int) -> list[list[tuple[np.ndarray, int]]]:
    """Batches of every rank, with their padded lengths; about as many positions for each rank."""
    batches = epoch_batches(dataset.lengths[ids], batch_size=rows, seed=0, epoch=0, shuffle=False)
    cut = sorted(((ids[batch.ids], batch.length) for batch in batches), key=_positions, reverse=True)
    shares = [list[tuple[np.ndarray, int]]() for _ in range(num_ranks)]
    for batch in cut:
        min(shares, key=lambda share: sum(map(_positions, share))).append(batch)
    return shares


def _positions(batch: tuple[np.ndarray, int]) -> int:
    ids, length = batch
    return len(ids) * length


def _inputs(chain: Chain, dataset: Dataset, ids: np.ndarray, *, length: int) -> dict[str, Tensor]:
    raw = dataset.inputs(ids, length=length, epoch=None)
    keys = (chain.family.main_input, *chain.input_keys)
    return {key: raw[key].to(chain.device) for key in keys if key in raw}


def _mean(hidden: Tensor, inputs: Mapping[str, Tensor], *, length: int) -> np.ndarray:
    weights = torch.ones(hidden.shape[:2], device=hidden.device)
    if MASK in inputs and hidden.shape[1] == length:  # else the one row that the head reads
        weights = inputs[MASK].float()
    mean: np.ndarray = ((hidden.float() * weights[..., None]).sum(1) / weights.sum(1, keepdim=True)).cpu().numpy()
    return mean


def _targets(dataset: Dataset, ids: np.ndarray) -> np.ndarray:
    """A column a class or a label, 1 for the sample's own and 0 for others; scores as they are [samples, columns]."""
    labels: np.ndarray = dataset.labels.numpy()[ids]
    if dataset.kind == "classes":
        labels = labels[:, None] == np.arange(int(dataset.labels.max()) + 1)
    targets: np.ndarray = labels.astype(np.float64)
    return targets[:, None] if dataset.kind == "scores" else targets
