"""Builds the model that the configuration names and saves it in its own library's format."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pipetransformer.data import DataInfo, ImagePreprocessing
from pipetransformer.errors import UserError

if TYPE_CHECKING:
    from pipetransformer.config import Config

__all__ = ["BuiltModel", "build_model"]


class BuiltModel(ABC):
    """A model, the preprocessing that belongs to it, and how both are saved for their own library."""

    model: nn.Module

    @abstractmethod
    def save(self, folder: Path, state: Mapping[str, Tensor]) -> None:
        """Writes configuration, label names, preprocessing and the weights ``state`` (by parameter name, on the CPU).

        The folder loads with ``timm.create_model("local-dir:FOLDER", pretrained=True)`` or
        ``AutoModelForSequenceClassification.from_pretrained(FOLDER)``.
        """


class TimmModel(BuiltModel):
    """An image classifier of timm."""

    def __init__(self, config: Config, info: DataInfo) -> None:
        import timm
        from timm.data import resolve_model_data_config

        name, kwargs = config.model.name, dict(config.model.kwargs)
        channels = kwargs.pop("in_chans", info.channels)
        if config.model.dropout is not None:
            kwargs = {**{f"{part}_rate": config.model.dropout for part in ("drop", "pos_drop", "proj_drop")}, **kwargs}
            kwargs.setdefault("attn_drop_rate", config.model.dropout)
        if config.data.image_size is not None:
            kwargs["img_size"] = config.data.image_size
        if Path(name).is_dir():
            name = f"local-dir:{name}"
        elif "/" in name and ":" not in name:
            name = f"hf-hub:{name}"
        try:
            self.model = timm.create_model(
                name,
                pretrained=config.model.pretrained,
                num_classes=len(info.label_names),
                in_chans=channels,
                **kwargs,
            )
        except Exception as error:
            raise UserError(_could_not_build(config, error)) from error
        self.arguments = {"in_chans": channels, **kwargs}
        self.label_names = info.label_names
        data = resolve_model_data_config(self.model)
        size = config.data.image_size or data["input_size"][-1]
        # Note: timm keeps the channels of pre-training in the data configuration of a model with other ones.
        self.preprocessing = ImagePreprocessing.from_timm({**data, "input_size": (channels, size, size)}, size=size)

    def save(self, folder: Path, state: Mapping[str, Tensor]) -> None:
        """The hub layout of timm: ``config.json`` and ``model.safetensors``."""
        from safetensors.torch import save_file

        used, source = self.preprocessing, self.model.pretrained_cfg
        config = {
            "architecture": source["architecture"],
            "num_classes": len(self.label_names),
            "num_features": self.model.num_features,
            "label_names": list(self.label_names),
            "model_args": self.arguments,
            "pretrained_cfg": {
                **{"custom_load": False, "num_classes": len(self.label_names)},
                **{"input_size": [used.channels, used.size, used.size], "fixed_input_size": True, "crop_pct": 1.0},
                **{"interpolation": used.interpolation, "mean": list(used.mean), "std": list(used.std)},
                **{key: source[key] for key in ("first_conv", "classifier") if key in source},
            },
        }
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / "model.safetensors")


class TransformersModel(BuiltModel):
    """A text classifier of transformers with its tokenizer."""

    def __init__(self, config: Config, info: DataInfo) -> None:
        from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

        labels = info.label_names
        settings: dict[str, Any] = {
            **config.model.kwargs,
            "num_labels": len(labels),
            "id2label": dict(enumerate(labels)),
            "label2id": {label: index for index, label in enumerate(labels)},
        }
        if config.model.dropout is not None:
            settings |= {f"{part}_dropout_prob": config.model.dropout for part in ("hidden", "attention_probs")}
        name = config.model.name
        try:
            model_config = AutoConfig.from_pretrained(name, **settings)
            if config.model.pretrained:
                loaded = AutoModelForSequenceClassification.from_pretrained(
                    name, config=model_config, dtype=torch.float32
                )
            else:
                loaded = AutoModelForSequenceClassification.from_config(model_config)
            self.tokenizer = AutoTokenizer.from_pretrained(name)
        except Exception as error:
            raise UserError(_could_not_build(config, error)) from error
        self.model = loaded
        if len(self.tokenizer) > model_config.vocab_size:
            raise UserError(
                f"model.name: the tokenizer of {name} knows {len(self.tokenizer)} tokens but the model embeds only "
                f"{model_config.vocab_size}; use the tokenizer that belongs to the model"
            )
        longest = getattr(model_config, "max_position_embeddings", None)
        if longest is not None and config.data.max_length > longest:
            raise UserError(
                f"data.max_length: {config.data.max_length} is more than {name} can read; give at most {longest}"
            )

    def save(self, folder: Path, state: Mapping[str, Tensor]) -> None:
        """The layout of ``save_pretrained``, tokenizer included."""
        self.model.save_pretrained(folder, state_dict=dict(state))
        self.tokenizer.save_pretrained(folder)


def build_model(config: Config, info: DataInfo) -> TimmModel | TransformersModel:
    """Builds the model of ``config.model`` for the labels and channels of ``info``, the same on every rank.

    Raises:
        UserError: if the model cannot be found or its arguments do not fit.
    """
    torch.manual_seed(config.train.seed)
    return TimmModel(config, info) if config.task == "image_classification" else TransformersModel(config, info)


def _could_not_build(config: Config, error: Exception) -> str:
    said = " ".join(str(error).split()).rstrip(".")
    remedy = "a local folder, a hub id that can be reached, or model.pretrained=false for random weights"
    return f"model.name: {config.model.name} could not be built ({said[:300]}); give {remedy}"
