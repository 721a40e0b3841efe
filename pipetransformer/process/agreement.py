"""Agreement: what all ranks must hold alike is compared, and a difference ends the job with the ranks that differ.

Two ranks that train under two plans give no error of their own: they wait for each other for ever, or end with other
weights.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping

import torch
import torch.distributed as dist

from pipetransformer.process.collectives import values_of_ranks

_SHOWN = 300  # characters of a value


class Disagreement(RuntimeError):
    """Ranks hold different values of what all must hold alike."""


def agree(what: str, value: object) -> None:
    """Collective. Compares ``value``, by its ``repr``, over all ranks: by a digest, at the cost of one small sum.

    Args:
        what: the name of the value, for the error.

    Raises:
        Disagreement: on every rank, unless all have the same.
    """
    if dist.get_world_size() == 1:
        return
    text = repr(value)
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    most = torch.tensor([digest, -digest])
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    if int(most[0]) == -int(most[1]):
        return
    texts = values_of_ranks(text)
    usual, others = _dissenters(dict(enumerate(texts)))
    first = min(others)
    raise Disagreement(
        f"{_named(others)} {'has' if len(others) == 1 else 'have'} another {what} than the other ranks: "
        f"{texts[first][:_SHOWN]} on rank {first}, {usual[:_SHOWN]} elsewhere"
    )


def agree_by_name(what: str, values: Mapping[str, int], *, step: int) -> None:
    """Collective. Compares each entry over the ranks that have one of that name.

    Args:
        what: the name of the values, for the error.
        step: number of steps done, likewise.

    Raises:
        Disagreement: on every rank, unless all that have one have the same.
    """
    if dist.get_world_size() == 1:
        return
    everyone = values_of_ranks(dict(values))
    for name in dict.fromkeys(name for of_rank in everyone for name in of_rank):
        own = {rank: str(of_rank[name]) for rank, of_rank in enumerate(everyone) if name in of_rank}
        if len(set(own.values())) > 1:
            _, others = _dissenters(own)
            verb = "has" if len(others) == 1 else "have"
            raise Disagreement(f"step {step}: {_named(others)} {verb} other {what} of {name} than its replicas")


def _dissenters(values: Mapping[int, str]) -> tuple[str, list[int]]:
    """The most frequent value, of equals that of the lowest rank; and the ranks that have another."""
    ((usual, _),) = Counter(values[rank] for rank in sorted(values)).most_common(1)
    return usual, [rank for rank, value in values.items() if value != usual]


def _named(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
