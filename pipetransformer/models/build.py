"""Builds the model that the configuration names and saves it in its own library's format."""

from __future__ import annotations

import difflib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from pipetransformer.data import DataInfo, ImagePreprocessing
from pipetransformer.errors import UserError
from pipetransformer.models.families import Family, family_of

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

        kwargs = _own_arguments(config, decided_by_data=("num_classes", "img_size"))
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
            if "img_size" in kwargs and not isinstance(error, OSError):
                _refuse_other_families(name)
            raise UserError(_could_not_build(config, error)) from error
        family_of(self.model, name=config.model.name)
        patch = getattr(self.model.patch_embed, "patch_size", None)
        if config.data.image_size is not None and patch and config.data.image_size % patch[0]:
            raise UserError(
                f"data.image_size: {config.data.image_size} does not divide into patches of {patch[0]} pixels; "
                f"give {config.data.image_size // patch[0] * patch[0] or patch[0]}, or model.kwargs with a patch_size"
            )
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
    """A text classifier or a reader of transformers with its tokenizer."""

    def __init__(self, config: Config, info: DataInfo) -> None:
        from transformers import (
            AutoConfig,
            AutoModelForQuestionAnswering,
            AutoModelForSequenceClassification,
            AutoTokenizer,
        )
        from transformers.utils import logging

        logging.set_verbosity_error()  # what matters of its reports is checked below
        logging.disable_progress_bar()
        labels, answers = info.label_names, config.task == "question_answering"
        factory = AutoModelForQuestionAnswering if answers else AutoModelForSequenceClassification
        settings: dict[str, Any] = _own_arguments(
            config, decided_by_data=("num_labels", "id2label", "label2id", "problem_type")
        )
        if labels:
            names = {"id2label": dict(enumerate(labels)), "label2id": {label: i for i, label in enumerate(labels)}}
            settings |= {"num_labels": len(labels), **names}
        elif not answers:
            settings |= {"num_labels": 1, "problem_type": "regression"}
        name = config.model.name
        _refuse_useless_folder(name)
        report: dict[str, Any] = {}
        try:
            model_config, unknown = AutoConfig.from_pretrained(name, **settings, return_unused_kwargs=True)
            if unknown:
                raise UserError(_unknown_arguments(unknown, known=vars(model_config), name=name))
            if config.model.dropout is not None:
                _set_dropout(model_config, config.model.dropout)
            if config.model.pretrained:
                self.model, report = factory.from_pretrained(
                    name,
                    config=model_config,
                    dtype=torch.float32,
                    ignore_mismatched_sizes=True,
                    output_loading_info=True,
                )
            else:
                self.model = factory.from_config(model_config)
            self.tokenizer = AutoTokenizer.from_pretrained(name)
        except UserError:
            raise
        except Exception as error:  # as above
            raise UserError(_could_not_build(config, error)) from error
        _check_weights(report, family=family_of(self.model, name=name), name=name)
        if len(self.tokenizer) <= len(self.tokenizer.all_special_ids):
            raise UserError(f"model.name: there is no tokenizer in {name}; put the one that belongs to the model there")
        if len(self.tokenizer) > model_config.vocab_size:
            raise UserError(
                f"model.name: the tokenizer of {name} knows {len(self.tokenizer)} tokens but the model embeds only "
                f"{model_config.vocab_size}; use the tokenizer that belongs to the model"
            )
        self._agree_on_padding(name)
        longest = _longest_text(self.model)
        if longest is not None and config.data.max_length > longest:
            raise UserError(
                f"data.max_length: {config.data.max_length} is more than {name} can read; give at most {longest}"
            )

    def _agree_on_padding(self, name: str) -> None:
        """Model and tokenizer must mean the same token; decoders often have none and get the end of a text."""
        tokenizer, settings = self.tokenizer, cast(Any, self.model.config)
        if tokenizer.pad_token_id is None and tokenizer.eos_token_id is not None:
            tokenizer.pad_token = tokenizer.eos_token
        if settings.pad_token_id is None:
            settings.pad_token_id = tokenizer.pad_token_id
        if tokenizer.pad_token_id is not None and settings.pad_token_id != tokenizer.pad_token_id:
            raise UserError(
                f"model.name: the tokenizer of {name} pads with token {tokenizer.pad_token_id} and the model with "
                f"{settings.pad_token_id}; use the tokenizer that belongs to the model"
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


def _timm_name(name: str) -> str:
    """What timm calls the model that ``model.name`` names. Raises UserError where there is none."""
    import timm

    _refuse_useless_folder(name)
    if Path(name).is_dir():
        return f"local-dir:{name}"
    if ":" in name:
        return name
    if "/" in name:
        return f"hf-hub:{name}"
    if timm.is_model(name):
        return name
    near = difflib.get_close_matches(name, timm.list_models(), n=1)
    remedy = f"did you mean {near[0]}?" if near else "give another name, a hub id such as owner/name or a local folder"
    raise UserError(f"model.name: timm has no model {name}; {remedy}")


def _set_dropout(settings: Any, rate: float) -> None:
    """Families name their rates differently: everything that holds one and is called dropout or ..._pdrop."""
    for key, value in settings.to_dict().items():
        if ("dropout" in key or key.endswith("pdrop")) and isinstance(value, (int, float)) and value is not True:
            setattr(settings, key, rate)


def _longest_text(model: nn.Module) -> int | None:
    """Tokens that ``model`` has positions for; RoBERTa numbers its positions from behind the padding token's."""
    longest = getattr(model.config, "max_position_embeddings", None)
    if not isinstance(longest, int):
        return None
    for path, module in model.named_modules():
        padding = getattr(module, "padding_idx", None)
        if path.endswith("position_embeddings") and isinstance(padding, int):
            return longest - padding - 1
    return longest


def _refuse_useless_folder(name: str) -> None:
    if name.startswith((".", "/", "~")) and not Path(name).is_dir():
        raise UserError(f"model.name: there is no folder {name}; give one that holds a model, or a hub id")
    if Path(name).is_dir() and not (Path(name) / "config.json").is_file():
        raise UserError(f"model.name: {name} holds no config.json; give the folder of a saved model")


def _refuse_other_families(name: str) -> None:
    """A model without ``img_size`` is likely to be no chain at all: that is what its user must hear."""
    import timm

    try:
        with torch.device("meta"):
            model = timm.create_model(name, pretrained=False)
    except Exception:
        return
    family_of(model, name=name)


def _own_arguments(config: Config, *, decided_by_data: tuple[str, ...]) -> dict[str, Any]:
    """``model.kwargs``. Raises UserError for what the dataset decides and for null, which timm would drop silently."""
    for key, value in config.model.kwargs.items():
        if key in decided_by_data:
            remedy = "set data.image_size instead" if key == "img_size" else "leave it out"
            raise UserError(f"model.kwargs: {key} is decided by the data; {remedy}")
        if value is None:
            raise UserError(f"model.kwargs: {key} is null; give it a value, or leave it out")
    return dict(config.model.kwargs)


def _unknown_arguments(unknown: Iterable[str], *, known: Iterable[str], name: str) -> str:
    key = min(unknown)
    near = difflib.get_close_matches(key, known, n=1)
    remedy = f"did you mean {near[0]}?" if near else "leave it out"
    return f"model.kwargs: {key} is nothing that the configuration of {name} knows; {remedy}"


def _check_weights(report: Mapping[str, Any], *, family: Family, name: str) -> None:
    """Refuses blocks or a stem that would be drawn at random beside loaded weights; a new head is as it should be."""
    own = (f"{family.blocks}.", *family.stem_prefixes)
    for key, stored, wanted in report.get("mismatched_keys", ()):
        if key.startswith(own):
            raise UserError(
                f"model.kwargs: {key} is {list(stored)} in {name} and {list(wanted)} here; "
                "give sizes that fit the weights, or model.pretrained=false for random ones"
            )
    if missing := sorted(key for key in report.get("missing_keys", ()) if key.startswith(own)):
        raise UserError(
            f"model.name: {name} has no weights for {missing[0]} and {len(missing) - 1} more; "
            "give model.kwargs that fit it, or model.pretrained=false for random weights"
        )


def _could_not_build(config: Config, error: Exception) -> str:
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
