"""The last block for the one row that the head reads: the library's own logits and gradients, from less work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import pytest
import torch
from test_halves import DROPPING
from test_models import (
    DISTILBERT,
    GPT2,
    MODELS,
    check_every_cut,
    inputs_of,
    of_transformers,
    own_forward,
    run,
    timm_model,
)
from torch import Tensor, nn

from pipetransformer.models import Chain, rows
from pipetransformer.models import halves as halves_module

DEVICE = torch.device("cpu")
ONE_ROW = {
    *("vit", "vit with registers", "vit of clip, normed before", "deit", "deit 3, scaled layers"),
    *("roberta", "electra", "distilbert", "gpt2", "llama", "mistral, by structure", "camembert, by structure"),
    "qwen2",
    *("bert", "bert, eager attention", "vit, normed queries", "gpt2, scaled by layer"),
}
VARIANTS: dict[str, Callable[[], nn.Module]] = {
    **MODELS,
    "vit, normed queries": lambda: timm_model("vit_tiny_patch16_224", qk_norm=True, qkv_bias=False),
    "gpt2, scaled by layer": lambda: of_transformers("GPT2", **GPT2, scale_attn_by_inverse_layer_idx=True),
}


def wrapped(build: Callable[[], nn.Module], *, units_per_block: int = 1, only: bool = True) -> Chain:
    torch.manual_seed(0)
    model = build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    chain = Chain(
        model,
        name="tiny",
        precision="float64",
        device=DEVICE,
        units_per_block=units_per_block,
        head_row_only=only,
    )
    chain.learn_shapes(inputs_for(chain))
    return chain


def inputs_for(chain: Chain) -> dict[str, Tensor]:
    return {k: v.to(chain.dtype) if v.is_floating_point() else v for k, v in inputs_of(chain).items()}


@pytest.mark.parametrize("units_per_block", [1, 2])
@pytest.mark.parametrize("name", VARIANTS)
def test_logits_and_gradients_are_the_library_s_own(name: str, units_per_block: int) -> None:
    """float64: 1e-12 is far above rounding and far below any mistake. Texts of three lengths, two of them padded."""
    chain = wrapped(VARIANTS[name], units_per_block=units_per_block)
    inputs = inputs_for(chain)
    assert chain.leaves_one_row(chain.num_blocks) == (name in ONE_ROW)
    assert not chain.leaves_one_row(chain.num_blocks - 1)
    check_every_cut(chain, inputs, logits_to=1e-12, gradients_to=1e-10)


@pytest.mark.parametrize("units_per_block", [1, 2])
def test_one_row_leaves_the_last_block(units_per_block: int) -> None:
    chain, whole = (wrapped(MODELS["bert"], units_per_block=units_per_block, only=only) for only in (True, False))
    first = chain.numbering.first_of(chain.num_blocks)
    for unit in range(chain.num_units - 1):
        shapes = [tuple(c.boundary(unit, rows=2, length=9).shape) for c in (chain, whole)]
        assert shapes == [(2, 1 if unit >= first else 9, 16), (2, 9, 16)]


@pytest.mark.parametrize("name", [name for name in DROPPING if name not in ("beit", "eva", "opt", "modernbert")])
def test_in_training_each_dropout_is_where_the_block_has_it(name: str) -> None:
    chain = wrapped(DROPPING[name])
    assert chain.leaves_one_row(chain.num_blocks)
    chain.train()
    inputs = inputs_for(chain)
    outputs = [run(chain, inputs, cut=1) for _ in range(2)]
    assert not torch.equal(*outputs), "nothing is dropped"


def without_dropout(block: nn.Module, hidden: Tensor, at: Tensor | None, **arguments: Tensor) -> Tensor:
    output = block.attention.output
    with mock.patch.object(output.dropout, "training", False):
        return rows.encoder_attention(block, hidden, at, **arguments)


def without_attention_dropout(block: nn.Module, hidden: Tensor, at: Tensor | None, **arguments: Tensor) -> Tensor:
    with mock.patch.object(block.attention.self.dropout, "training", False):
        return rows.encoder_attention(block, hidden, at, **arguments)


def of_the_wrong_row(block: nn.Module, hidden: Tensor, at: Tensor | None, **arguments: Tensor) -> Tensor:
    return rows.encoder_attention(block, hidden, torch.ones(len(hidden), dtype=torch.int64), **arguments)


@pytest.mark.parametrize("wrong", [without_dropout, without_attention_dropout, of_the_wrong_row])
def test_a_block_that_computes_something_else_is_computed_whole(wrong: Callable[..., Tensor]) -> None:
    build = DROPPING["bert"]
    with mock.patch("pipetransformer.models.families.ENCODER", replace(halves_module.ENCODER, attention_of_row=wrong)):
        chain = wrapped(build)
    assert not chain.leaves_one_row(chain.num_blocks)
    torch.testing.assert_close(run(chain, inputs_for(chain), cut=2), own_forward(chain, inputs_for(chain)))


def test_a_head_that_reads_more_rows_gets_them() -> None:
    def distilled() -> nn.Module:
        return timm_model("deit_tiny_distilled_patch16_224")

    chain = wrapped(distilled)
    assert not chain.leaves_one_row(chain.num_blocks)


def test_the_proof_leaves_dropouts_as_they_were() -> None:
    model = of_transformers("DistilBert", **DISTILBERT, dropout=0.25, attention_dropout=0.5)
    before = [module.p for module in model.modules() if isinstance(module, nn.Dropout)]
    chain = Chain(model, name="tiny", device=DEVICE)
    chain.learn_shapes(inputs_of(chain))
    assert [module.p for module in model.modules() if isinstance(module, nn.Dropout)] == before
    assert chain.leaves_one_row(3) and not any(module.training for module in model.modules())
