"""The weights of the whole model on one rank, unit by unit, to be saved in the format of the model's library."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from pipetransformer.dp import AutoDP, Transfer, execute_transfers
from pipetransformer.models import Chain, saved_tensors
from pipetransformer.process.world import World


def gathered_weights(chain: Chain, autodp: AutoDP, *, world: World) -> Iterator[tuple[str, Tensor]]:
    """Collective: every rank asks for all. Names and values, on the CPU of rank 0, of what may train, and persistent
    buffers; none on the other ranks.

    No more than one unit is there at a time.
    """
    for unit in range(chain.num_units):
        source = autodp.saved_by(unit)
        with chain.lent([unit] if world.rank == source else []):
            named = {name: parameter.data for name, parameter in chain.trained_parameters([unit]).items()}
            if world.rank == 0 != source:
                named = {name: torch.empty_like(tensor, device=chain.device) for name, tensor in named.items()}
            transfers = [Transfer(unit, source, 0)] if source and world.rank in (0, source) else []
            execute_transfers(transfers, rank=world.rank, tensors=partial(_values, named))
            if world.rank == 0:
                yield from ((name, tensor.to("cpu", chain.dtype)) for name, tensor in named.items())
    if world.rank == 0:
        parameters = dict(chain.model.named_parameters())
        yield from ((n, tensor.cpu()) for n, tensor in saved_tensors(chain.model).items() if n not in parameters)


def _values(named: Mapping[str, Tensor], unit: int) -> Iterable[Tensor]:
    return named.values()
