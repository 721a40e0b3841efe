"""Text classifiers and readers of transformers, with their tokenizers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from pipetransformer.config import Config
from pipetransformer.data import DataInfo
from pipetransformer.errors import UserError
from pipetransformer.models.adapters import Adapters
from pipetransformer.models.built import BuiltModel, could_not_build, did_you_mean, own_arguments, refuse_useless_folder
from pipetransformer.models.families import Family, family_of
from pipetransformer.models.shards import check_shards
from pipetransformer.models.traced import take_blocks
from pipetransformer.models.weight_files import LARGEST_SHARD, saved_tensors, write_weights

_SPECIAL_TOKENS = {
    f"{role}_token": f"[{role.upper()}]" for role in ("pad", "unk", "cls", "sep", "mask")
}  # of tokenizers that are trained on the data's own texts


class TransformersModel(BuiltModel):
    """A text classifier or a reader of transformers with its tokenizer."""

    def __init__(self, config: Config, info: DataInfo) -> None:
        from transformers.utils import logging

        # What matters of its reports is checked below.
        logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        name = config.model.name
        refuse_useless_folder(name)
        if config.model.pretrained:
            check_shards(Path(name))
        try:
            self.tokenizer, model_config = _tokenizer_and_settings(config, info)
            if config.model.dropout is not None:
                _set_dropout(model_config, config.model.dropout)
            self.model, report = _network(config, model_config)
        except UserError:
            raise
        except Exception as error:  # whatever a constructor makes of arguments, and four libraries of a download
            raise UserError(could_not_build(config, error) + _type_remedy(name)) from error
        take_blocks(self.model, config.model.blocks, name=name, main_input="input_ids")
        _check_weights(report, family=family_of(self.model, name=name), name=name)
        if config.model.lora is not None:
            self.adapters = Adapters(self.model, config.model, name=name)
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
        """Gives model and tokenizer the same padding token; decoders often have none and get the end of a text."""
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

    def save(self, folder: Path, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Writes the layout of ``save_pretrained``, tokenizer included."""
        like, settings = saved_tensors(self.model), cast(Any, self.model.config)
        if self.adapters is None:
            self.model.save_pretrained(folder, state_dict={})  # type: ignore[operator]
            write_weights(folder, weights, like=like, largest=LARGEST_SHARD)
        else:
            self.adapters.save(folder, weights)
        # Note: of the first weight, which ``save_pretrained`` tells, it may be a narrower one, in which it rests.
        settings.dtype = next(iter(like.values())).dtype
        settings.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)


def _tokenizer_and_settings(config: Config, info: DataInfo) -> tuple[Any, Any]:
    """The tokenizer and the model's configuration: of a saved model, or of a type of model with random weights."""
    from tokenizers import Tokenizer
    from transformers import CONFIG_MAPPING, AutoConfig, AutoTokenizer, PreTrainedTokenizerFast

    name = config.model.name
    settings: dict[str, Any] = own_arguments(
        config, decided_by_data=("num_labels", "id2label", "label2id", "problem_type")
    )
    if labels := info.label_names:
        names = {"id2label": dict(enumerate(labels)), "label2id": {label: i for i, label in enumerate(labels)}}
        several = {"problem_type": "multi_label_classification"} if config.data.kind == "labels" else {}
        settings |= {"num_labels": len(labels), **names, **several}
    elif config.task == "question_answering":
        settings |= {"num_labels": 2}  # first and last token, whatever a saved model classified
    else:
        settings |= {"num_labels": 1, "problem_type": "regression"}
    tokenizer: Any
    is_drawn = not config.model.pretrained and name in CONFIG_MAPPING and not Path(name).is_dir()
    if info.tokenizer is not None and is_drawn:
        backend = Tokenizer.from_str(info.tokenizer)
        sizes = {"vocab_size": backend.get_vocab_size(), "pad_token_id": backend.token_to_id("[PAD]")}
        model_config, unknown = CONFIG_MAPPING[name].from_dict({}, **{**sizes, **settings}, return_unused_kwargs=True)
        inputs = ["input_ids", "token_type_ids", "attention_mask"]
        if getattr(model_config, "type_vocab_size", 1) < 2:
            inputs.remove("token_type_ids")
        tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
            tokenizer_object=backend,
            model_input_names=inputs,
            model_max_length=getattr(model_config, "max_position_embeddings", None),
            **_SPECIAL_TOKENS,
        )
    else:
        # Note: without a word about it, transformers asks on standard input whether to run a folder's own code.
        model_config, unknown = AutoConfig.from_pretrained(
            name, **settings, return_unused_kwargs=True, trust_remote_code=False
        )
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    if unknown:
        key = min(unknown)
        remedy = did_you_mean(key, vars(model_config), otherwise="leave it out")
        raise UserError(f"model.kwargs: {key} is nothing that the configuration of {name} knows; {remedy}")
    return tokenizer, model_config


def _type_remedy(name: str) -> str:
    from transformers import CONFIG_MAPPING

    is_type = name in CONFIG_MAPPING
    return f"; the type {name} can be drawn at random for the demo texts, by model.pretrained=false" if is_type else ""


def _network(config: Config, model_config: Any) -> tuple[nn.Module, Mapping[str, Any]]:
    """The model, and transformers' report of the loaded weights."""
    from transformers import AutoModelForQuestionAnswering, AutoModelForSequenceClassification

    answers = config.task == "question_answering"
    factory = AutoModelForQuestionAnswering if answers else AutoModelForSequenceClassification
    if not config.model.pretrained:
        return factory.from_config(model_config, trust_remote_code=False), {}  # type: ignore[no-untyped-call]
    model, report = factory.from_pretrained(
        config.model.name,
        config=model_config,
        dtype=_stored_type(config.model.name),
        ignore_mismatched_sizes=True,
        output_loading_info=True,
        trust_remote_code=False,
    )
    return model, report


def _stored_type(name: str) -> torch.dtype:
    """The type to load weights in: that of all weights of a folder, so that they stay in its files until they are
    needed; float32 where they have several, and from a hub."""
    from safetensors import safe_open

    types = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
    found = set[str]()
    for path in Path(name).glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            found |= {file.get_slice(key).get_dtype() for key in file.keys()}  # noqa: SIM118 (it is no mapping)
    floating = {kind for kind in found if not kind.startswith(("I", "U", "B")) or kind == "BF16"}
    return types.get(floating.pop(), torch.float32) if len(floating) == 1 else torch.float32


def _set_dropout(settings: Any, rate: float) -> None:
    """Sets every rate whose name has dropout or ends with pdrop: families name theirs differently."""
    for key, value in settings.to_dict().items():
        if ("dropout" in key or key.endswith("pdrop")) and isinstance(value, (int, float)) and value is not True:
            setattr(settings, key, rate)


def _longest_text(model: nn.Module) -> int | None:
    """The number of positions of ``model``; RoBERTa numbers them from behind the padding token's.

    At most its sliding window, where it has one that its family has no mask for.
    """
    settings = model.config
    longest, window = (getattr(settings, name, None) for name in ("max_position_embeddings", "sliding_window"))
    knows_window = family_of(model, name="").of_block is not None
    if isinstance(window, int) and getattr(settings, "use_sliding_window", True) and not knows_window:
        longest = min(longest, window) if isinstance(longest, int) else window
    if not isinstance(longest, int):
        return None
    for path, module in model.named_modules():
        padding = getattr(module, "padding_idx", None)
        if path.endswith("position_embeddings") and isinstance(padding, int):
            return longest - padding - 1
    return longest


def _check_weights(report: Mapping[str, Any], *, family: Family, name: str) -> None:
    """Refuses random blocks or a random stem beside loaded weights; a new head is as it should be."""
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
