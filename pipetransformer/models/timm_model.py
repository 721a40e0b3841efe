"""Image classifiers of timm."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from pipetransformer.config import Config
from pipetransformer.data import DataInfo, ImagePreprocessing
from pipetransformer.errors import UserError
from pipetransformer.models.adapters import Adapters
from pipetransformer.models.built import BuiltModel, could_not_build, did_you_mean, own_arguments, refuse_useless_folder
from pipetransformer.models.families import family_of
from pipetransformer.models.traced import take_blocks
from pipetransformer.models.weight_files import saved_tensors, write_weights


class TimmModel(BuiltModel):
    """An image classifier of timm."""

    def __init__(self, config: Config, info: DataInfo) -> None:
        import timm
        from timm.data import resolve_model_data_config  # type: ignore[attr-defined]

        kwargs = own_arguments(config, decided_by_data=("num_classes", "img_size"))
        channels = kwargs.pop("in_chans", info.channels)
        if channels not in (1, 3):
            raise UserError(f"model.kwargs: in_chans {channels} is not allowed; give 1 (grey) or 3 (colour)")
        if config.model.dropout is not None:
            kwargs = {**{f"{part}_rate": config.model.dropout for part in ("drop", "pos_drop", "proj_drop")}, **kwargs}
            kwargs.setdefault("attn_drop_rate", config.model.dropout)
        if config.data.image_size is not None:
            kwargs["img_size"] = config.data.image_size
        name = _timm_name(config.model.name)
        try:
            self.model = timm.create_model(
                name,
                pretrained=config.model.pretrained,
                num_classes=len(info.label_names),
                in_chans=channels,
                **kwargs,
            )
        except Exception as error:  # whatever a constructor makes of arguments, and four libraries of a download
            if "img_size" in kwargs and config.model.blocks is None and not isinstance(error, OSError):
                _refuse_other_families(name)
            raise UserError(could_not_build(config, error)) from error
        take_blocks(self.model, config.model.blocks, name=config.model.name, main_input="pixel_values")
        family_of(self.model, name=config.model.name)
        patch = getattr(getattr(self.model, "patch_embed", None), "patch_size", None)
        if config.data.image_size is not None and patch and config.data.image_size % patch[0]:
            raise UserError(
                f"data.image_size: {config.data.image_size} does not divide into patches of {patch[0]} pixels; "
                f"give {config.data.image_size // patch[0] * patch[0] or patch[0]}, or model.kwargs with a patch_size"
            )
        if config.model.lora is not None:
            self.adapters = Adapters(self.model, config.model, name=config.model.name)
        self.arguments = {**_arguments_of(name), "in_chans": channels, **kwargs}
        self.label_names = info.label_names
        data = resolve_model_data_config(self.model)  # type: ignore[no-untyped-call]
        size = config.data.image_size or data["input_size"][-1]
        # Note: timm keeps the channels of pre-training in the data configuration of a model with other ones.
        self.preprocessing = ImagePreprocessing.from_timm({**data, "input_size": (channels, size, size)}, size=size)

    def save(self, folder: Path, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Writes the hub layout of timm: ``config.json`` and ``model.safetensors``, which timm reads as one file."""
        used, source = self.preprocessing, cast(Mapping[str, Any], self.model.pretrained_cfg)
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
        if self.adapters is not None:
            self.adapters.save(folder, weights)
        else:
            write_weights(folder, weights, like=saved_tensors(self.model))


def _timm_name(name: str) -> str:
    """timm's name for ``model.name``. Raises UserError where there is none."""
    import timm

    refuse_useless_folder(name)
    if Path(name).is_dir():
        return f"local-dir:{name}"
    if ":" in name:
        return name
    if "/" in name:
        return f"hf-hub:{name}"
    if timm.is_model(name):
        return name
    otherwise = "give another name, a hub id such as owner/name or a local folder"
    raise UserError(
        f"model.name: timm has no model {name}; {did_you_mean(name, timm.list_models(), otherwise=otherwise)}"
    )


def _arguments_of(name: str) -> Mapping[str, Any]:
    """The arguments that a saved model brings: without them, what is trained further could not be loaded again."""
    from timm.models import load_model_config_from_hf

    kind, _, place = name.partition(":")
    if kind == "local-dir":
        found = json.loads((Path(place) / "config.json").read_text()).get("model_args")
    else:
        found = load_model_config_from_hf(place)[2] if kind == "hf-hub" else None
    return found or {}


def _refuse_other_families(name: str) -> None:
    """Refuses a model without ``img_size`` that is no chain: its user must hear that first. Raises UserError."""
    import timm

    try:
        with torch.device("meta"):
            model = timm.create_model(name, pretrained=False)
    except Exception:
        return
    family_of(model, name=name)
