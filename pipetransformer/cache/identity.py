"""The identity of stored activations: a digest of everything that they depend on, before the first step."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from pipetransformer.cache.kept import key_of
from pipetransformer.cache.store import StoreLayout
from pipetransformer.data import Dataset
from pipetransformer.models import Chain
from pipetransformer.process.device import device_name

_PACKAGE = Path(__file__).parent.parent
_CODE = ("adapter", "cache", "data", "models")


class Identity:
    """Of the activations that ``chain`` gives with its present weights: those of the start, where all are there.

    Args:
        datasets: the datasets by split.
        rows: samples of a batch of the advance pass: results depend on the shape.
    """

    def __init__(self, chain: Chain, datasets: Mapping[str, Dataset], *, rows: int) -> None:
        self._fingerprints = {split: data.fingerprint for split, data in datasets.items()}
        device = chain.device
        self._surroundings = (
            *(rows, chain.autocasts, str(chain.dtype), torch.get_float32_matmul_precision(), torch.get_num_threads()),
            *(device_name(device), _structure(chain.model), _code()),
            *(version(name) for name in ("torch", "transformers", "timm")),
        )
        self._weights: list[str] = []  # of the units before each boundary, in blocks, from 0
        digest, parameters = hashlib.sha256(), dict(chain.model.named_parameters())
        first = 0
        for block in range(chain.num_blocks + 1):
            stop = chain.numbering.behind(block)
            for name in sorted(chain.named_parameters(range(first, stop))):
                digest.update(name.encode())
                digest.update(parameters[name].detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
            self._weights.append(digest.hexdigest())
            first = stop

    def key(self, boundary: int, layouts: Mapping[str, StoreLayout]) -> str:
        """Of the stores at a boundary, in blocks, laid out so."""
        data = sorted((split, self._fingerprints[split], _told(layout)) for split, layout in layouts.items())
        return key_of((boundary, self._weights[boundary], data, self._surroundings))


def _told(layout: StoreLayout) -> tuple[object, ...]:
    arrays = (layout.positions, layout.slots)
    digests = [None if array is None else hashlib.sha256(array.tobytes()).hexdigest() for array in arrays]
    return (*digests, layout.width, str(layout.dtype), layout.has_rows)


def _structure(model: torch.nn.Module) -> str:
    """Modules with their settings, which the weights do not tell: the number of heads, say."""
    told: Any = getattr(model, "config", None)
    settings = told.to_dict() if hasattr(told, "to_dict") else {}
    settings = {key: value for key, value in settings.items() if key not in ("_name_or_path", "name_or_path")}
    return hashlib.sha256(f"{model!r} {json.dumps(settings, sort_keys=True, default=str)}".encode()).hexdigest()


def _code() -> str:
    """Digest of the package's own code that activations go through."""
    digest = hashlib.sha256()
    for path in sorted(path for folder in _CODE for path in (_PACKAGE / folder).glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
