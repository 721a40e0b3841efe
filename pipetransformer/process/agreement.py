"""Agreement: what all ranks must hold alike is compared, and a difference ends the job with the ranks that differ.

Two ranks that train under two plans give no error of their own: they wait for each other for ever, or end with other
weights.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from pipetransformer.errors import UserError
from pipetransformer.process.collectives import first_of_ranks, values_of_ranks

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
    text = repr(value)
    if _is_same(text):
        return
    texts = values_of_ranks(text)
    usual, others = _dissenters(dict(enumerate(texts)))
    first = min(others)
    raise Disagreement(
        f"{_named(others)} {'has' if len(others) == 1 else 'have'} another {what} than the other ranks: "
        f"{texts[first][:_SHOWN]} on rank {first}, {usual[:_SHOWN]} elsewhere"
    )


def agree_on_settings(settings: Mapping[str, object]) -> None:
    """Collective. Compares the settings that must be the same on all ranks, by key.

    Raises:
        UserError: on every rank, naming the first key that differs.
    """
    if _is_same(repr(settings)):
        return
    first, *others = values_of_ranks(dict(settings))
    for rank, theirs in enumerate(others, start=1):
        for key, value in first.items():
            if theirs.get(key) != value:
                raise UserError(f"{key}: rank {rank} has {theirs.get(key)} and rank 0 {value}; give all the same")


def _is_same(text: str) -> bool:
    """Collective. Whether all ranks give the same text."""
    if dist.get_world_size() == 1:
        return True
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    most = torch.tensor([digest, -digest])
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return int(most[0]) == -int(most[1])


def agree_by_name(what: str, values: Mapping[str, int], *, group: dist.ProcessGroup | None, step: int) -> None:
    """Collective. Compares the entries over the ranks of each group, which give the same names in the same order: by
    two small reductions, whatever the number of ranks.

    Args:
        what: the name of the values, for the error.
        group: the ranks that this one is compared with; None for none.
        step: number of steps done, for the error.

    Raises:
        Disagreement: on every rank of the job, unless all groups agree.
    """
    error = ""
    if group is not None and values:
        most, least = (torch.tensor(list(values.values())) for _ in range(2))
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=group)
        other = next((name for name, differs in zip(values, (most != least).tolist()) if differs), None)
        if other is not None:
            found: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(found, (dist.get_rank(), str(values[other])), group=group)
            _, others = _dissenters(dict(found))
            verb = "has" if len(others) == 1 else "have"
            error = f"step {step}: {_named(others)} {verb} other {what} of {other} than its replicas"
    if first_of_ranks(0 if error else None) is not None:
        raise Disagreement(next(filter(None, values_of_ranks(error))))


def _dissenters(values: Mapping[int, str]) -> tuple[str, list[int]]:
    """The most frequent value, of equals that of the lowest rank; and the ranks that have another."""
    ((usual, _),) = Counter(values[rank] for rank in sorted(values)).most_common(1)
    return usual, [rank for rank, value in values.items() if value != usual]


def _named(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
