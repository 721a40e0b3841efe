"""The face of every built model, and checks of ``model.name`` and ``model.kwargs`` for both libraries."""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from pipetransformer.config import Config
from pipetransformer.errors import UserError
from pipetransformer.models.adapters import Adapters


class BuiltModel(ABC):
    """A model with its preprocessing, both saved for their own library.

    Attributes:
        model: the model.
        adapters: what trains in place of the weights of its blocks; None where they train themselves.
    """

    model: nn.Module
    adapters: Adapters | None = None

    @property
    def fixed(self) -> Collection[str]:
        """Names of the parameters that never train."""
        return self.adapters.fixed if self.adapters is not None else ()

    @abstractmethod
    def save(self, folder: Path, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Writes configuration, label names, preprocessing and weights.

        Args:
            weights: name and value, on the CPU, of each of ``weight_files.saved_tensors`` that is not ``fixed``, in any
                order; they may come one by one.

        Without adapters, the folder loads with ``timm.create_model("local-dir:FOLDER", pretrained=True)`` or
        ``AutoModelForSequenceClassification.from_pretrained(FOLDER)``; with adapters, with
        ``peft.PeftModel.from_pretrained(BASE, FOLDER)``.
        """


def own_arguments(config: Config, *, decided_by_data: tuple[str, ...]) -> dict[str, Any]:
    """``model.kwargs``. Raises UserError for keys of the dataset, and for null, which timm would drop silently."""
    for key, value in config.model.kwargs.items():
        if key == "trust_remote_code":
            raise UserError(
                f"model.kwargs: {key} would run a model folder's own code; leave it out, and give a model that the "
                "library itself has"
            )
        if key in decided_by_data:
            remedy = "set data.image_size instead" if key == "img_size" else "leave it out"
            raise UserError(f"model.kwargs: {key} is decided by the data; {remedy}")
        if value is None:
            raise UserError(f"model.kwargs: {key} is null; give it a value, or leave it out")
    return dict(config.model.kwargs)


def refuse_useless_folder(name: str) -> None:
    if name.startswith((".", "/", "~")) and not Path(name).is_dir():
        raise UserError(f"model.name: there is no folder {name}; give one that holds a model, or a hub id")
    if (Path(name) / "adapter_config.json").is_file():
        raise UserError(f"model.name: {name} holds adapters; give the folder of the model that they belong to")
    if Path(name).is_dir() and not (Path(name) / "config.json").is_file():
        raise UserError(f"model.name: {name} holds no config.json; give the folder of a saved model")


def did_you_mean(name: str, known: Iterable[str], *, otherwise: str) -> str:
    """A remedy for an unknown name: the one of ``known`` that is nearest to it, or ``otherwise``."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {near[0]}?" if near else otherwise


def could_not_build(config: Config, error: Exception) -> str:
    name, said = config.model.name, " ".join(str(error).split()).rstrip(".")[:300]
    if isinstance(error, OSError):
        remedy = "give a local folder or a hub id that can be read"
        if config.task == "image_classification":  # timm knows the model's shape without the network
            remedy += ", or model.pretrained=false for random weights"
        return f"model.name: {name} could not be loaded ({said}); {remedy}"
    said = f"{type(error).__name__}: {said}"
    if not config.model.kwargs:
        return f"model.name: {name} could not be built ({said}); give another model, or the folder of one that is whole"
    weights = " and its pretrained weights" if config.model.pretrained else ""
    return f"model.kwargs: {name} could not be built ({said}); give arguments that fit the model{weights}"
