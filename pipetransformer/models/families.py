"""The differences between model families, one table entry each: the place of the blocks and their arguments.

A family says how to run the stem, one block and the head of a model *through the model's own modules*: names, dropout
and masks are the library's. ``chain.py`` proves each wrapped model equal to its own forward: structure alone is enough.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipetransformer.errors import UserError
from pipetransformer.models.halves import DISTILBERT, ENCODER, GPT2, LLAMA, MODERNBERT, OPT, SCALED, VIT, Halves
from pipetransformer.models.rows import row_of

Inputs = Mapping[str, Tensor]
OWN, MASK = "_pipetransformer_family", "attention_mask"
"""Attribute of a module that is in no table (``traced.py``); the batch entry that is 1 at a text's tokens and 0 at its
padding, which texts without padding may do without."""


@dataclass(frozen=True, slots=True)
class Family:
    """A family as a chain.

    Attributes:
        blocks: attribute path of the block list.
        stem_prefixes: prefixes of the stem's parameter and module names; the rest outside blocks is the head's.
        main_input: the batch entry that enters the stem.
        stem: ``(model, inputs) -> hidden [batch, tokens, width]``.
        head: ``(model, hidden, inputs) -> outputs``.
        block_arguments: ``(model, hidden, inputs) -> keyword arguments`` of the blocks.
        of_block: ``(block, arguments) -> arguments`` of one block, from those of all; None where all have the same.
        halves: the two parts of a block; None where it does not divide.
        stem_inputs: batch entries beside ``main_input`` for the stem alone.
        side_inputs: batch entries for every rank: it derives its blocks' arguments and the head's from them.
        row: ``(hidden, inputs) -> at`` (``rows.row_of``), the one row of each sample that the head reads; None where it
            may read all. Such a head takes this row alone as well [batch, 1, width].
    """

    name: str
    blocks: str
    stem_prefixes: tuple[str, ...]
    main_input: str
    stem: Callable[[Any, Inputs], Tensor]
    head: Callable[[Any, Tensor, Inputs], Tensor]
    block_arguments: Callable[[Any, Tensor, Inputs], dict[str, Any]]
    halves: Halves | None = None
    stem_inputs: tuple[str, ...] = ()
    side_inputs: tuple[str, ...] = ()
    row: Callable[[Tensor, Inputs], Tensor | None] | None = None
    of_block: Callable[[Any, Mapping[str, Any]], Mapping[str, Any]] | None = None


def _find(model: nn.Module, path: str) -> Any:
    found: Any = model
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


def _has(model: nn.Module, *paths: str) -> bool:
    return all(_find(model, path) is not None for path in paths)


# ---- timm ------------------------------------------------------------------------------------------------------------

_VIT_STEM = (
    *("cls_token", "reg_token", "dist_token", "pos_embed"),
    *("patch_embed.", "pos_drop.", "patch_drop.", "norm_pre."),
)
_pictures = partial(
    Family,
    blocks="blocks",
    stem_prefixes=_VIT_STEM,
    main_input="pixel_values",
    head=lambda model, hidden, inputs: model.forward_head(model.norm(hidden)),
)


def _vit(model: nn.Module) -> Family | None:
    if not _has(model, "patch_embed", "blocks", "norm", "forward_head", "_pos_embed", "patch_drop", "norm_pre"):
        return None
    if _has(model, "rope"):
        return None

    def stem(model: Any, inputs: Inputs) -> Tensor:
        hidden = model.patch_embed(inputs["pixel_values"])
        return model.norm_pre(model.patch_drop(model._pos_embed(hidden)))  # type: ignore[no-any-return]

    by_token = getattr(model, "global_pool", "") == "token" and getattr(model, "attn_pool", None) is None
    row = _first_row if by_token else None
    return _pictures(name="timm ViT and DeiT", stem=stem, block_arguments=_no_arguments, halves=VIT, row=row)


def _eva(model: nn.Module) -> Family | None:
    """EVA; its rotary tables depend on the grid of patches alone, so that every rank makes its own."""
    if not (_has(model, "patch_embed", "blocks", "norm", "forward_head", "_pos_embed", "norm_pre", "rope")):
        return None
    if getattr(model, "rope_mixed", False) or getattr(model, "dynamic_img_size", False) or _has(model, "patch_drop"):
        return None

    def stem(model: Any, inputs: Inputs) -> Tensor:
        hidden, _ = model._pos_embed(model.patch_embed(inputs["pixel_values"]))
        return model.norm_pre(hidden)  # type: ignore[no-any-return]

    def arguments(model: Any, hidden: Tensor, inputs: Inputs) -> dict[str, Any]:
        known = hasattr(model.rope, "feat_shape")
        return {"rope": model.rope.get_embed() if known else model.rope.get_embed(shape=model.patch_embed.grid_size)}

    return _pictures(name="timm EVA", stem=stem, block_arguments=arguments, halves=SCALED)


def _beit(model: nn.Module) -> Family | None:
    """BEiT with relative positions in the blocks; ``rel_pos_bias`` would be shared by all blocks."""
    if not _has(model, "patch_embed", "cls_token", "pos_drop", "blocks", "norm", "forward_head"):
        return None
    if _has(model, "_pos_embed") or not hasattr(model, "rel_pos_bias") or _has(model, "rel_pos_bias"):
        return None

    def stem(model: Any, inputs: Inputs) -> Tensor:
        hidden = model.patch_embed(inputs["pixel_values"])
        hidden = torch.cat((model.cls_token.expand(len(hidden), -1, -1), hidden), dim=1)
        return model.pos_drop(hidden if model.pos_embed is None else hidden + model.pos_embed)  # type: ignore[no-any-return]

    return _pictures(name="timm BEiT", stem=stem, block_arguments=_no_arguments, halves=SCALED)


def _no_arguments(model: Any, hidden: Tensor, inputs: Inputs) -> dict[str, Any]:
    return {}


# ---- transformers ----------------------------------------------------------------------------------------------------

_texts = partial(Family, main_input="input_ids", side_inputs=(MASK,))


def _encoder(model: nn.Module) -> Family | None:
    """BERT, RoBERTa, ELECTRA and their like: embeddings, encoder.layer, a head that reads all tokens."""
    base = getattr(model, "base_model_prefix", "")
    if not (base and _has(model, f"{base}.embeddings", f"{base}.encoder.layer")):
        return None
    head = _encoder_head(model, base)
    if head is None:
        return None

    def stem(model: Any, inputs: Inputs) -> Tensor:
        encoder = _find(model, base)
        hidden = encoder.embeddings(input_ids=inputs["input_ids"], token_type_ids=inputs["token_type_ids"])
        projected: Tensor = encoder.embeddings_project(hidden) if hasattr(encoder, "embeddings_project") else hidden
        return projected

    return _texts(
        name="encoders of transformers (BERT, RoBERTa, ELECTRA)",
        blocks=f"{base}.encoder.layer",
        stem_prefixes=(f"{base}.embeddings.", f"{base}.embeddings_project."),
        stem=stem,
        head=head,
        block_arguments=_bidirectional_mask,
        halves=ENCODER,
        stem_inputs=("token_type_ids",),
        row=None if _has(model, "qa_outputs") else _first_row,
    )


def _encoder_head(model: nn.Module, base: str) -> Callable[[Any, Tensor, Inputs], Tensor] | None:
    if _has(model, "qa_outputs"):
        return lambda model, hidden, inputs: model.qa_outputs(hidden)
    if _has(model, f"{base}.pooler", "dropout", "classifier"):
        return lambda model, hidden, inputs: model.classifier(model.dropout(_find(model, f"{base}.pooler")(hidden)))
    if _has(model, "classifier.out_proj"):  # a classification head of its own, which takes the first token
        return lambda model, hidden, inputs: model.classifier(hidden)
    return None


def _distilbert(model: nn.Module) -> Family | None:
    if not _has(model, "distilbert.embeddings", "distilbert.transformer.layer", "dropout"):
        return None

    def classify(model: Any, hidden: Tensor, inputs: Inputs) -> Tensor:
        pooled = torch.relu(model.pre_classifier(hidden[:, 0]))
        return model.classifier(model.dropout(pooled))  # type: ignore[no-any-return]

    def answer(model: Any, hidden: Tensor, inputs: Inputs) -> Tensor:
        return model.qa_outputs(model.dropout(hidden))  # type: ignore[no-any-return]

    return _texts(
        name="DistilBERT",
        blocks="distilbert.transformer.layer",
        stem_prefixes=("distilbert.embeddings.",),
        stem=lambda model, inputs: model.distilbert.embeddings(inputs["input_ids"]),
        head=answer if _has(model, "qa_outputs") else classify,
        block_arguments=_bidirectional_mask,
        halves=DISTILBERT,
        row=None if _has(model, "qa_outputs") else _first_row,
    )


def _gpt2(model: nn.Module) -> Family | None:
    if not _has(model, "transformer.wte", "transformer.wpe", "transformer.h", "transformer.ln_f", "score"):
        return None

    def stem(model: Any, inputs: Inputs) -> Tensor:
        decoder, ids = model.transformer, inputs["input_ids"]
        positions = torch.arange(ids.shape[1], device=ids.device)
        return decoder.drop(decoder.wte(ids) + decoder.wpe(positions))  # type: ignore[no-any-return]

    return _texts(
        name="GPT-2",
        blocks="transformer.h",
        stem_prefixes=("transformer.wte.", "transformer.wpe.", "transformer.drop."),
        stem=stem,
        head=lambda model, hidden, inputs: _last_token(model.score(model.transformer.ln_f(hidden)), inputs),
        block_arguments=_causal_mask,
        halves=GPT2,
        row=_last_row,
    )


def _decoder(model: nn.Module) -> Family | None:
    """Llama and its like: rotary tables, made by every rank itself, and a ``score`` of the last token."""
    if not _has(model, "model.embed_tokens", "model.layers", "model.norm", "model.rotary_emb", "score"):
        return None

    def arguments(model: Any, hidden: Tensor, inputs: Inputs) -> dict[str, Any]:
        positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
        tables = model.model.rotary_emb(hidden, position_ids=positions)
        return {**_causal_mask(model, hidden, inputs), "position_ids": positions, "position_embeddings": tables}

    return _texts(
        name="decoders of transformers (Llama)",
        blocks="model.layers",
        stem_prefixes=("model.embed_tokens.",),
        stem=lambda model, inputs: model.model.embed_tokens(inputs["input_ids"]),
        head=lambda model, hidden, inputs: _last_token(model.score(model.model.norm(hidden)), inputs),
        block_arguments=arguments,
        halves=LLAMA,
        row=_last_row,
    )


def _opt(model: nn.Module) -> Family | None:
    if not _has(model, "model.decoder.embed_tokens", "model.decoder.embed_positions", "model.decoder.layers", "score"):
        return None
    if model.model.decoder.layerdrop:  # type: ignore[union-attr]
        return None

    def positions(inputs: Inputs) -> Tensor:
        """Of the real tokens, from 0 on; padding has one of its own."""
        mask = inputs[MASK] if MASK in inputs else torch.ones_like(inputs["input_ids"])
        return (mask.cumsum(dim=1) * mask - 1).long()

    def stem(model: Any, inputs: Inputs) -> Tensor:
        decoder = model.model.decoder
        hidden = decoder.embed_tokens(inputs["input_ids"])
        hidden = hidden if decoder.project_in is None else decoder.project_in(hidden)
        # Note: the mask is not looked at where the positions are given.
        return hidden + decoder.embed_positions(None, 0, position_ids=positions(inputs))  # type: ignore[no-any-return]

    def head(model: Any, hidden: Tensor, inputs: Inputs) -> Tensor:
        for part in (model.model.decoder.final_layer_norm, model.model.decoder.project_out, model.score):
            hidden = hidden if part is None else part(hidden)
        return _last_token(hidden, inputs)

    return _texts(
        name="OPT",
        blocks="model.decoder.layers",
        stem_prefixes=tuple(f"model.decoder.{part}." for part in ("embed_tokens", "embed_positions", "project_in")),
        stem=stem,
        head=head,
        block_arguments=_causal_mask,
        halves=OPT,
        row=_last_row,
    )


def _modernbert(model: nn.Module) -> Family | None:
    """ModernBERT: most blocks see a window of the text, some all of it, each kind with rotary tables of its own."""
    if not _has(model, "model.embeddings", "model.layers", "model.final_norm", "model.rotary_emb", "head", "drop"):
        return None

    def arguments(model: Any, hidden: Tensor, inputs: Inputs) -> dict[str, Any]:
        from transformers.masking_utils import create_bidirectional_sliding_window_mask

        given, positions = inputs.get(MASK), torch.arange(hidden.shape[1], device=hidden.device)[None]
        kinds = sorted(set(model.config.layer_types))
        masks = {"full_attention": _bidirectional_mask(model, hidden, inputs)["attention_mask"]}
        if "sliding_attention" in kinds:
            masks["sliding_attention"] = create_bidirectional_sliding_window_mask(
                model.config, hidden, given, allow_is_bidirectional_skip=given is None
            )
        tables = {kind: model.model.rotary_emb(hidden, positions, kind) for kind in kinds}
        return {"attention_mask": masks, "position_embeddings": tables}

    def head(model: Any, hidden: Tensor, inputs: Inputs) -> Tensor:
        hidden = model.model.final_norm(hidden)
        if by_token:
            pooled = hidden[:, 0]
        else:
            weights = inputs[MASK] if MASK in inputs else hidden.new_ones(hidden.shape[:2])
            pooled = (hidden * weights.unsqueeze(-1)).sum(dim=1) / weights.sum(dim=1, keepdim=True)
        return model.classifier(model.drop(model.head(pooled)))  # type: ignore[no-any-return]

    by_token = model.config.classifier_pooling == "cls"  # type: ignore[union-attr]
    return _texts(
        name="ModernBERT",
        blocks="model.layers",
        stem_prefixes=("model.embeddings.",),
        stem=lambda model, inputs: model.model.embeddings(input_ids=inputs["input_ids"]),
        head=head,
        block_arguments=arguments,
        halves=MODERNBERT,
        of_block=lambda block, arguments: {key: of[block.attention_type] for key, of in arguments.items()},
    )


def _bidirectional_mask(model: Any, hidden: Tensor, inputs: Inputs) -> dict[str, Any]:
    from transformers.masking_utils import create_bidirectional_mask

    # Note: the library's own skip looks at the mask: a GPU waits, and a sample's bits depend on its neighbours'.
    given = inputs.get(MASK)
    mask = create_bidirectional_mask(model.config, hidden, given, allow_is_bidirectional_skip=given is None)
    return {"attention_mask": mask}


def _causal_mask(model: Any, hidden: Tensor, inputs: Inputs) -> dict[str, Any]:
    from transformers.masking_utils import create_causal_mask

    positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
    given = inputs.get(MASK)
    mask = create_causal_mask(
        config=model.config,
        inputs_embeds=hidden,
        attention_mask=given,
        past_key_values=None,
        position_ids=positions,
        allow_is_causal_skip=given is None,
    )
    return {"attention_mask": mask, "use_cache": False}


def _first_row(hidden: Tensor, inputs: Inputs) -> None:
    return None


def _last_row(hidden: Tensor, inputs: Inputs) -> Tensor:
    """The last token of each text, padded on the right whatever side the tokenizer would take."""
    if MASK not in inputs:
        return torch.full((hidden.shape[0],), hidden.shape[1] - 1, device=hidden.device)
    return inputs[MASK].sum(dim=1) - 1


def _last_token(outputs: Tensor, inputs: Inputs) -> Tensor:
    """Outputs at the last token of each text: of all of its rows, or of that one alone."""
    return row_of(outputs, None if outputs.shape[1] == 1 else _last_row(outputs, inputs))[:, 0]


FAMILIES: tuple[tuple[str, Callable[[nn.Module], Family | None]], ...] = (
    ("timm ViT and DeiT", _vit),
    ("timm EVA", _eva),
    ("timm BEiT", _beit),
    ("DistilBERT", _distilbert),
    ("BERT, RoBERTa, ELECTRA and encoders built like them", _encoder),
    ("GPT-2", _gpt2),
    ("Llama, Mistral, Qwen2, Qwen3 and decoders built like them", _decoder),
    ("OPT", _opt),
    ("ModernBERT", _modernbert),
)
"""Name for the user, and test of a model. Put an entry of your own first."""

_NO_CHAINS = (
    ("albert.encoder.albert_layer_groups", "its blocks are one and the same, so that none can be frozen alone"),
    ("deberta.encoder.rel_embeddings", "all of its blocks train the same relative positions, which no block owns"),
)
"""Attribute paths of models that look like chains, and why they are none."""


def family_of(model: nn.Module, *, name: str) -> Family:
    """The table entry that fits ``model``, or its own. Raises UserError where none does."""
    if (own := model.__dict__.get(OWN)) is not None:
        return own  # type: ignore[no-any-return]
    for path, reason in _NO_CHAINS:
        if _find(model, path) is not None:
            raise UserError(f"model.name: {name} is no chain: {reason}; use another model")
    for _, recognise in FAMILIES:
        family = recognise(model)
        if family is not None and isinstance(blocks := _find(model, family.blocks), (nn.ModuleList, nn.Sequential)):
            if not len(blocks):
                raise UserError(f"model.name: {name} has no blocks; give it at least 1")
            return family
    known = "; ".join(shown for shown, _ in FAMILIES)
    raise UserError(
        f"model.name: {name} ({type(model).__name__}) is no chain of stem, blocks and head that is known here; "
        f"use one of: {known}; or name its list of blocks, model.blocks=PATH"
    )
