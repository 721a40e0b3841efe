"""The weights of the whole model, gathered on one rank, to be saved in the format of the model's library."""

from __future__ import annotations

import torch
from torch import Tensor

from pipetransformer.dp import Holders, execute_transfers, transfers_of
from pipetransformer.models import Chain
from pipetransformer.process.world import World


def gather_weights(chain: Chain, holders: Holders, *, world: World) -> dict[str, Tensor] | None:
    """Collective. Parameters and persistent buffers by name, on the CPU of rank 0; None on the other ranks.

    Args:
        holders: holders of the weights of each unit.
    """
    to_first = dict.fromkeys(holders, range(1))
    transfers = transfers_of(world.rank, holders, to_first, ranks_per_node=world.local_size)
    arriving = {transfer.unit for transfer in transfers if transfer.target == world.rank}
    gathered: dict[str, Tensor] = {}
    parameters = {unit: chain.named_parameters([unit]) for unit in holders}
    for unit, named in parameters.items():
        for name, parameter in named.items():
            if unit in arriving:
                gathered[name] = torch.empty_like(parameter, device=chain.device)
            elif not parameter.is_meta:
                gathered[name] = parameter.detach()
    execute_transfers(transfers, rank=world.rank, tensors=lambda unit: (gathered[name] for name in parameters[unit]))
    if world.rank != 0:
        return None
    buffers = {n: b for n, b in chain.model.state_dict().items() if n not in gathered}
    return {name: tensor.cpu() for name, tensor in {**gathered, **buffers}.items()}
