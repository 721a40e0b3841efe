"""A module of a user's own, which no library saves."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor, nn

from pipetransformer.models.built import BuiltModel
from pipetransformer.models.families import OWN
from pipetransformer.models.traced import traced_family
from pipetransformer.models.weight_files import saved_tensors, write_weights


class OwnModel(BuiltModel):
    """``model`` with its blocks at the attribute path ``blocks``. Raises UserError where it is no chain."""

    def __init__(self, model: nn.Module, *, blocks: str) -> None:
        self.model = model
        model.__dict__[OWN] = traced_family(model, blocks, name=type(model).__name__)

    def save(self, folder: Path, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Writes ``model.safetensors``, for ``load_state_dict``, and the name of the class."""
        folder.mkdir(parents=True, exist_ok=True)
        own = {"module": f"{type(self.model).__module__}.{type(self.model).__qualname__}"}
        (folder / "config.json").write_text(json.dumps(own, indent=2) + "\n")
        write_weights(folder, weights, like=saved_tensors(self.model))
