"""Sums the gradients of weights with copies on several stages: each rank's gradient is a part of the whole.

Every holder sends its part to every other and adds all parts in order of rank: the copies then see the same bits and
stay equal under the same optimizer. With two holders, the usual case, nothing is sent twice; no group is made for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn


@torch.no_grad()
def sum_tied_gradients(
    parameters: Mapping[str, nn.Parameter],
    *,
    tied: Sequence[tuple[str, Sequence[int]]],
    group: dist.ProcessGroup,
) -> None:
    """Sums the parts of all holders; call once a step, after the last backward, on every holder in ``group``.

    Args:
        parameters: this rank's parameters, by first name; a rank with two stages holds one copy for both.
        tied: first names with the ranks in ``group`` that hold the parameter, the same on all ranks.
    """
    me = dist.get_rank(group)
    received: dict[str, dict[int, Tensor]] = {}
    operations: list[dist.P2POp] = []
    for name, ranks in tied:
        if me not in ranks or len(ranks) == 1 or not parameters[name].requires_grad:
            continue
        parameter = parameters[name]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        parts = {rank: torch.empty_like(parameter.grad) for rank in ranks if rank != me}
        received[name] = {**parts, me: parameter.grad.clone()}
        for rank, part in parts.items():
            peer = dist.get_global_rank(group, rank)
            operations.append(dist.P2POp(dist.isend, received[name][me], peer, group))
            operations.append(dist.P2POp(dist.irecv, part, peer, group))
    if not operations:
        return
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    for name, by_rank in received.items():
        first, *others = (by_rank[rank] for rank in sorted(by_rank))
        gradient = parameters[name].grad
        assert gradient is not None
        gradient.copy_(first)
        for part in others:
            gradient.add_(part)
