"""The identity of stored activations: a digest of everything that they depend on, before the first step."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from pipetransformer.cache.kept import key_of
from pipetransformer.cache.store import StoreLayout
from pipetransformer.data import Dataset
from pipetransformer.models import Chain
from pipetransformer.process.collectives import values_of_ranks
from pipetransformer.process.device import device_name
from pipetransformer.process.world import World

_PACKAGE = Path(__file__).parent.parent
_CODE = ("adapter", "cache", "data", "models")
_PLAIN = (bool, int, float, str, tuple)  # types whose text says all


class Identity:
    """Of the activations that ``chain`` gives with the weights of the start.

    Args:
        datasets: the datasets by split.
        digests: digest of the weights of each unit [num_units].
        rows: samples of a batch of the advance pass: results depend on the shape.
    """

    def __init__(self, chain: Chain, datasets: Mapping[str, Dataset], *, digests: Sequence[str], rows: int) -> None:
        self._fingerprints = {split: data.fingerprint for split, data in datasets.items()}
        device = chain.device
        self._surroundings = (
            *(
                rows,
                chain.autocasts,
                str(chain.half),
                chain.is_compiled,
                str(chain.dtype),
                torch.get_float32_matmul_precision(),
                torch.get_num_threads(),
            ),
            *(device_name(device), _settings(chain.model), _code()),
            *(version(name) for name in ("torch", "transformers", "timm", "peft")),
        )
        # Of what lies before each boundary, from 0: weights, and modules with settings, which weights do not tell.
        stops = map(chain.numbering.behind, range(chain.num_blocks + 1))
        self._weights = ["".join(digests[:stop]) for stop in stops]
        parts = [_modules(chain.stem_modules), *(_modules([block]) for block in chain.blocks)]
        self._modules = [key_of(parts[: boundary + 1]) for boundary in range(chain.num_blocks + 1)]

    def key(self, boundary: int, layouts: Mapping[str, StoreLayout], *, by_block: bool = False) -> str:
        """Of the stores of these splits at a boundary, in blocks, laid out so.

        Args:
            by_block: whether the activations were stored behind each block, where a narrower type rounds them.
        """
        data = sorted((split, self._fingerprints[split], _told(layout)) for split, layout in layouts.items())
        before = self._weights[boundary], self._modules[boundary]
        return key_of((boundary, by_block, *before, data, self._surroundings))


def digests_of_units(chain: Chain, *, world: World) -> tuple[tuple[str, ...], ...]:
    """Collective. Digests of the weights of each unit, as each node has them [nodes][num_units].

    The ranks of a node share the units, which are lent to them: each weight is read once a node.
    """
    mine = {unit: _digest_of(chain, unit) for unit in range(world.local_rank, chain.num_units, world.local_size)}
    told = values_of_ranks(mine) if world.size > 1 else [mine]
    nodes = [told[first : first + world.local_size] for first in range(0, world.size, world.local_size)]
    return tuple(tuple(ranks[unit % world.local_size][unit] for unit in range(chain.num_units)) for ranks in nodes)


def _digest_of(chain: Chain, unit: int) -> str:
    digest = hashlib.sha256()
    with chain.lent([unit]):
        for name, parameter in sorted(chain.named_parameters([unit]).items()):
            digest.update(name.encode())
            digest.update(parameter.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _modules(tops: Iterable[torch.nn.Module]) -> str:
    """Modules with their settings: what they print, and plain attributes, as a number of heads, which few print."""
    told = list[object]()
    for top in tops:
        told.append(top)
        told += ((name, _plain_attributes(module)) for name, module in top.named_modules())
    return repr(told)


def _plain_attributes(module: torch.nn.Module) -> list[tuple[str, object]]:
    found = vars(module).items()
    return sorted((n, value) for n, value in found if isinstance(value, _PLAIN) and n[0] != "_" and n != "training")


def _told(layout: StoreLayout) -> tuple[object, ...]:
    arrays = (layout.positions, layout.slots)
    digests = [None if array is None else hashlib.sha256(array.tobytes()).hexdigest() for array in arrays]
    return (*digests, layout.width, str(layout.dtype), layout.has_rows)


def _settings(model: torch.nn.Module) -> str:
    """Those of the whole model, which modules do not tell: how a mask is made, say."""
    told: Any = getattr(model, "config", None)
    settings = told.to_dict() if hasattr(told, "to_dict") else {}
    settings = {key: value for key, value in settings.items() if key not in ("_name_or_path", "name_or_path")}
    return hashlib.sha256(
        f"{type(model).__name__} {json.dumps(settings, sort_keys=True, default=str)}".encode()
    ).hexdigest()


def _code() -> str:
    """Digest of the package's own code that activations go through."""
    digest = hashlib.sha256()
    for path in sorted(path for folder in _CODE for path in (_PACKAGE / folder).glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
