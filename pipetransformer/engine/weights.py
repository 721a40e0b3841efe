"""The weights of the whole model on one rank, unit by unit, to be saved in the format of the model's library."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from pipetransformer.dp import AutoDP, Transfer, execute_transfers
from pipetransformer.models import Chain, saved_tensors
from pipetransformer.process.world import World

_OF_SIZE = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def gathered_weights(chain: Chain, autodp: AutoDP, *, world: World) -> Iterator[Mapping[str, Tensor]]:
    """Collective: every rank asks for all. Values by name, on the CPU of rank 0, of what may train, a unit at a time,
    and of persistent buffers at the end; nothing in them on the other ranks.

    What one holds is gone when the next is asked for.
    """
    for unit in range(chain.num_units):
        source = autodp.saved_by(unit)
        with chain.lent([unit] if world.rank == source else []):
            named = {name: parameter.data for name, parameter in chain.trained_parameters([unit]).items()}
            if world.rank == 0 != source:
                named = {name: torch.empty_like(tensor, device=chain.device) for name, tensor in named.items()}
            transfers = [Transfer(unit, source, 0)] if source and world.rank in (0, source) else []
            execute_transfers(transfers, rank=world.rank, tensors=partial(_values, named))
            is_here = world.rank == 0
            yield {name: tensor.to("cpu", chain.dtype) for name, tensor in named.items()} if is_here else {}
    parameters = dict(chain.model.named_parameters())
    buffers = {name: tensor.cpu() for name, tensor in saved_tensors(chain.model).items() if name not in parameters}
    yield buffers if world.rank == 0 else {}


def weight_digests(parameters: Mapping[str, Tensor]) -> dict[str, int]:
    """The sum of each parameter's bits, read as whole numbers, by name: one bit of difference changes it."""
    if not parameters:
        return {}
    sums = [p.detach().view(_OF_SIZE[p.element_size()]).sum(dtype=torch.int64) for p in parameters.values()]
    return dict(zip(parameters, torch.stack(sums).tolist(), strict=True))


def _values(named: Mapping[str, Tensor], unit: int) -> Iterable[Tensor]:
    return named.values()
