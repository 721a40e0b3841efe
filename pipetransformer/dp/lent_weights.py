"""Weights that one replica holds and the others borrow, unit by unit, for the time in which they compute with them.

The idea is ZeRO's, stage 3 (Rajbhandari et al., arXiv 1910.02054), by whole units, so that weights move by their unit's
name at a transition. torch's FSDP2 shards within tensors and hooks the forward of modules; here units are functions of
the model's own modules (halves, a head's one row), which have no forward to hook.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from pipetransformer.adapter import give_memory
from pipetransformer.models import Chain


class LentWeights:
    """The units that this rank trains, of which it holds some. One borrowed unit is there at a time.

    All replicas run the same units in the same order, so that the owner sends when the others ask.

    Args:
        owners: the rank that holds each unit that is trained here, by unit.
        group: the replicas.
    """

    def __init__(self, chain: Chain, owners: Mapping[int, int], *, group: dist.ProcessGroup) -> None:
        self._chain, self._owners, self._group, self._rank = chain, dict(owners), group, dist.get_rank()
        self._lent: int | None = None
        self._pieces: dict[int, Tensor] = {}
        for unit in owners:
            self._pieces[unit] = chain.in_one_piece(unit)
            self._shrink(unit)

    def around(self, unit: int, forward: Callable[..., Tensor], *arguments: object) -> Tensor:
        """``forward(*arguments)`` of a unit with its weights there, now and when its backward comes."""
        self._lend(unit)
        leaving = forward(*arguments)
        if leaving.requires_grad:
            leaving.register_hook(partial(self._lend_again, unit))  # type: ignore[no-untyped-call]
        return leaving

    def take_back(self) -> None:
        """Frees the memory of what is borrowed: weights that are updated must be borrowed anew."""
        if self._lent is not None:
            self._shrink(self._lent)
        self._lent = None

    def close(self) -> None:
        """Leaves shapes alone of what other ranks hold."""
        self.take_back()
        self._chain.release(unit for unit, owner in self._owners.items() if owner != self._rank)
        self._pieces.clear()

    def _lend_again(self, unit: int, gradient: Tensor) -> None:
        self._lend(unit)

    @torch.no_grad()
    def _lend(self, unit: int) -> None:
        if self._lent == unit:
            return
        self.take_back()
        piece = self._pieces[unit]
        if self._owners[unit] != self._rank:
            give_memory(piece, is_wanted=True)
        dist.broadcast(piece, self._owners[unit], group=self._group)
        self._lent = unit

    def _shrink(self, unit: int) -> None:
        if self._owners[unit] != self._rank:
            give_memory(self._pieces[unit], is_wanted=False)
