"""What differs between model families, one table entry each: where the blocks are and what goes into them.

A family says how to run the stem, one block and the head of a model *through the model's own modules*, so that
parameter names, dropout and masks are the library's. ``chain.py`` proves each wrapped model equal to its own forward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn

from pipetransformer.errors import UserError

__all__ = ["FAMILIES", "Family", "family_of"]

Inputs = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Family:
    """How one family is a chain.

    Attributes:
        matches: whether a model belongs to the family, by its structure.
        blocks: attribute path of the block list.
        stem_prefixes: prefixes of the parameter and module names that the stem owns; what neither stem nor blocks own
            is the head's.
        main_input: the batch entry that enters the stem; ``stem_inputs`` are further ones that only the stem reads,
            ``block_inputs`` those that every block needs (each rank derives block arguments from them by itself).
        stem, head: ``stem(model, inputs) -> hidden [batch, tokens, width]``, ``head(model, hidden) -> logits``.
        block_arguments: ``(model, hidden, inputs) -> keyword arguments`` of every block.
    """

    name: str
    matches: Callable[[nn.Module], bool]
    blocks: str
    stem_prefixes: tuple[str, ...]
    main_input: str
    stem_inputs: tuple[str, ...]
    block_inputs: tuple[str, ...]
    stem: Callable[[Any, Inputs], Tensor]
    block_arguments: Callable[[Any, Tensor, Inputs], dict[str, Any]]
    head: Callable[[Any, Tensor], Tensor]


def _has(*names: str) -> Callable[[nn.Module], bool]:
    def matches(model: nn.Module) -> bool:
        return all(_attribute(model, name) is not None for name in names)

    return matches


def _attribute(model: nn.Module, path: str) -> Any:
    found: Any = model
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


def _no_arguments(model: Any, hidden: Tensor, inputs: Inputs) -> dict[str, Any]:
    return {}


def _vit_stem(model: Any, inputs: Inputs) -> Tensor:
    hidden = model.patch_embed(inputs["pixel_values"])
    hidden = model.norm_pre(model.patch_drop(model._pos_embed(hidden)))
    return cast(Tensor, hidden)


def _vit_head(model: Any, hidden: Tensor) -> Tensor:
    return cast(Tensor, model.forward_head(model.norm(hidden)))


def _bert_stem(model: Any, inputs: Inputs) -> Tensor:
    hidden = model.bert.embeddings(input_ids=inputs["input_ids"], token_type_ids=inputs["token_type_ids"])
    return cast(Tensor, hidden)


def _bidirectional_mask(model: Any, hidden: Tensor, inputs: Inputs) -> dict[str, Any]:
    from transformers.masking_utils import create_bidirectional_mask

    # Note: without a padded row the mask may be skipped, and one sample's bits would depend on its neighbours'.
    mask = create_bidirectional_mask(model.config, hidden, inputs["attention_mask"], allow_is_bidirectional_skip=False)
    return {"attention_mask": mask}


def _bert_head(model: Any, hidden: Tensor) -> Tensor:
    return cast(Tensor, model.classifier(model.dropout(model.bert.pooler(hidden))))


FAMILIES: tuple[Family, ...] = (
    Family(
        name="timm ViT and DeiT",
        matches=_has("patch_embed", "blocks", "norm", "forward_head", "_pos_embed", "patch_drop", "norm_pre"),
        blocks="blocks",
        stem_prefixes=(
            *("cls_token", "reg_token", "dist_token", "pos_embed"),
            *("patch_embed.", "pos_drop.", "patch_drop.", "norm_pre."),
        ),
        main_input="pixel_values",
        stem_inputs=(),
        block_inputs=(),
        stem=_vit_stem,
        block_arguments=_no_arguments,
        head=_vit_head,
    ),
    Family(
        name="BERT for sequence classification",
        matches=_has("bert.embeddings", "bert.encoder.layer", "bert.pooler", "classifier", "dropout"),
        blocks="bert.encoder.layer",
        stem_prefixes=("bert.embeddings.",),
        main_input="input_ids",
        stem_inputs=("token_type_ids",),
        block_inputs=("attention_mask",),
        stem=_bert_stem,
        block_arguments=_bidirectional_mask,
        head=_bert_head,
    ),
)


def family_of(model: nn.Module, *, name: str) -> Family:
    """The table entry that fits ``model``. Raises UserError where none does."""
    for family in FAMILIES:
        blocks = _attribute(model, family.blocks)
        if family.matches(model) and isinstance(blocks, (nn.ModuleList, nn.Sequential)):
            if not len(blocks):
                raise UserError(f"model.name: {name} has no blocks; give it at least 1")
            return family
    known = ", ".join(family.name for family in FAMILIES)
    raise UserError(
        f"model.name: {name} ({type(model).__name__}) is no chain of stem, blocks and head that is known here; "
        f"use one of: {known}, or add its entry to FAMILIES in pipetransformer/models/families.py"
    )
