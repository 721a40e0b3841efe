"""``train.wide_attention: auto``: over how many positions attention trains faster in float32 than in bfloat16.

A pure function of timings that all ranks take together; kept by a run, as its precision is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter

import numpy as np
import torch
import torch.nn.functional as F

from pipetransformer.adapter import WideAttention, attentions
from pipetransformer.data import Dataset
from pipetransformer.models import Chain
from pipetransformer.process.collectives import slowest

__all__ = ["most_positions", "widest"]

_WORTH = 0.9  # of bfloat16's time: less gain is noise
_MOST_LENGTHS, _ROUNDS, _MOST_POSITIONS = 4, 5, 2048  # positions of all samples together: fewer of long ones


def most_positions(
    chain: Chain, dataset: Dataset, *, rows: int, agree: Callable[[float], float] = slowest
) -> tuple[int, str]:
    """Collective. The most positions for which attention in float32 is worth it, 0 for none, and the evidence in words.

    Args:
        chain: computes in bfloat16, on the CPU.
        dataset: the training data.
        rows: samples of a rank's micro-batch.
        agree: gives the seconds that all ranks go by, from this rank's.
    """
    lengths, counts = np.unique(dataset.lengths, return_counts=True)
    usual = int(lengths[np.argmax(counts * lengths)])
    query, key = _shapes(chain, dataset, length=usual)
    if query is None or key is None:
        return 0, ""
    is_text = query[-2] == usual  # else positions do not depend on the sample
    chosen = np.unique(np.linspace(0, len(lengths) - 1, min(_MOST_LENGTHS, len(lengths))).round().astype(int))
    positions = [int(n) for n in lengths[chosen]] if is_text else [int(query[-2])]
    ratios = []
    for n in positions:
        few = max(1, min(rows, _MOST_POSITIONS // n))
        shapes = (few, query[1], n, query[-1]), (few, key[1], n, key[-1])
        ratios.append(_ratio(*shapes, is_grouped=query[1] != key[1], agree=agree))
    most = widest(positions, ratios)
    told = ", ".join(f"{ratio:.2f} for {n}" for n, ratio in zip(positions, ratios))
    return most, f"attention's forward and backward in float32, over those in bfloat16, by positions: {told}"


def widest(positions: Sequence[int], ratios: Sequence[float]) -> int:
    """The most positions that are worth it, as are all fewer; 0 for none.

    Args:
        positions: ascending.
        ratios: seconds in float32 over those in bfloat16.
    """
    most = 0
    for n, ratio in zip(positions, ratios):
        if ratio >= _WORTH:
            break
        most = n
    return most


def _shapes(chain: Chain, dataset: Dataset, *, length: int) -> tuple[torch.Size | None, torch.Size | None]:
    """Of query and key in the first block; None where it has no attention of torch's that drops nothing out."""
    ids = np.flatnonzero(dataset.lengths == length)[:1]
    inputs = {key: value.to(chain.device) for key, value in dataset.inputs(ids, length=length, epoch=0).items()}
    units = range(chain.numbering.behind(1))
    chain.train()
    side = {key: inputs[key] for key in chain.input_keys}
    with torch.random.fork_rng(devices=[]), chain.with_stand_ins(), chain.lent(units), attentions() as calls:
        chain.run(units, inputs[chain.family.main_input], side)
    if not calls or calls[0][2] or len(calls[0][0]) != 4:
        return None, None
    return calls[0][:2]


def _ratio(query: Sequence[int], key: Sequence[int], *, is_grouped: bool, agree: Callable[[float], float]) -> float:
    """Collective. Median seconds of forward and backward in float32 over those in bfloat16."""
    asks, has, gives = (torch.zeros(shape, dtype=torch.bfloat16).requires_grad_() for shape in (query, key, key))
    seconds: dict[int, list[float]] = {0: [], key[-2]: []}
    for _ in range(_ROUNDS + 1):  # the first is not counted
        for most, taken in seconds.items():
            start = perf_counter()
            with WideAttention(most):
                found = F.scaled_dot_product_attention(asks, has, gives, enable_gqa=is_grouped)
            torch.autograd.backward(found, found.detach())
            taken.append(perf_counter() - start)
    narrow, wide = (agree(median(taken[1:])) for taken in seconds.values())
    return wide / narrow
