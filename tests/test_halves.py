"""Blocks in halves: what a block computes, in two units that a pipeline may cut apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from laws import SHRINK_AND_GROW, TWO_RANKS, Case, Weights, deviation, elastic_run, gradient_deviation, reference
from ranks import RankPool
from test_models import (
    DISTILBERT,
    GPT2,
    LLAMA,
    MODELS,
    MODERNBERT,
    OPT,
    WITH_DROPOUT,
    check_every_cut,
    inputs_of,
    of_transformers,
    own_forward,
    run,
    timm_model,
)
from test_models import bert as tiny_encoder
from tiny import tiny_bert, tiny_squad, tiny_sst2, tiny_text_model
from torch import Tensor, nn

from pipetransformer.errors import UserError
from pipetransformer.models import Chain
from pipetransformer.models import halves as halves_module
from pipetransformer.process.world import World

DEVICE = torch.device("cpu")


def in_halves(build: Callable[[], nn.Module], *, precision: str = "float32") -> tuple[Chain, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    chain = Chain(model, name="tiny", precision=precision, device=DEVICE, units_per_block=2, head_row_only=False)
    inputs = {k: v.to(chain.dtype) if v.is_floating_point() else v for k, v in inputs_of(chain).items()}
    chain.learn_shapes(inputs)
    return chain, inputs


VARIANTS: dict[str, Callable[[], nn.Module]] = {
    **MODELS,
    "beit, unscaled": lambda: timm_model("beit_base_patch16_224", init_values=None),
    "eva, scaled": lambda: timm_model("eva02_tiny_patch14_224", init_values=0.1),
    "bert, fed in chunks": lambda: tiny_encoder(chunk_size_feed_forward=4),
}
DROPPING: dict[str, Callable[[], nn.Module]] = {
    **WITH_DROPOUT,
    "beit": lambda: timm_model("beit_base_patch16_224", proj_drop_rate=0.5, drop_path_rate=0.5),
    "eva": lambda: timm_model("eva02_tiny_patch14_224", init_values=0.1, proj_drop_rate=0.5, drop_path_rate=0.5),
    "distilbert": lambda: of_transformers("DistilBert", **DISTILBERT, dropout=0.5, attention_dropout=0.5),
    "gpt2": lambda: of_transformers("GPT2", **GPT2, resid_pdrop=0.5, attn_pdrop=0.5),
    "llama": lambda: of_transformers("Llama", **LLAMA, attention_dropout=0.5),
    "opt": lambda: of_transformers("OPT", **OPT, dropout=0.5),
    "modernbert": lambda: of_transformers("ModernBert", **MODERNBERT, attention_dropout=0.5, mlp_dropout=0.5),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_cut_at_any_half_it_is_the_library_s_own_forward_and_backward(name: str) -> None:
    """float64: 1e-12 is far above rounding and far below any mistake."""
    chain, inputs = in_halves(VARIANTS[name], precision="float64")
    assert chain.num_units == 2 * chain.num_blocks + 2
    check_every_cut(chain, inputs, logits_to=1e-12, gradients_to=1e-10)


@pytest.mark.parametrize("name", MODELS)
def test_each_parameter_of_a_block_belongs_to_one_half(name: str) -> None:
    chain, _ = in_halves(MODELS[name])
    units = [list(chain.named_parameters([unit])) for unit in range(chain.num_units)]
    assert all(units)
    assert sorted(key for unit in units for key in unit) == sorted(key for key, _ in chain.model.named_parameters())
    for block in range(chain.num_blocks):
        attention, mlp = units[2 * block + 1], units[2 * block + 2]
        assert all(f".{block}." in key for key in (*attention, *mlp))
        assert any("attn" in key or "attention" in key for key in attention)
        assert not any("attn." in key or ".attention." in key for key in mlp)
        assert any(word in key for key in mlp for word in ("mlp", "intermediate", "ffn", "fc"))


@pytest.mark.parametrize("name", DROPPING)
def test_halves_drop_what_the_block_drops(name: str) -> None:
    chain, inputs = in_halves(DROPPING[name])
    chain.train()
    torch.manual_seed(3)
    expected = own_forward(chain, inputs)
    torch.manual_seed(3)
    assert torch.equal(run(chain, inputs, cut=2), expected)
    assert not torch.equal(run(chain, inputs, cut=2), expected), "nothing is dropped"
    chain.freeze(2)
    chain.train()
    side, main = {key: inputs[key] for key in chain.input_keys}, inputs[chain.family.main_input]
    prefix = range(chain.numbering.behind(2))
    assert torch.equal(chain.run(prefix, main, side), chain.run(prefix, main, side)), "both halves stay in eval mode"
    for key, parameter in chain.model.named_parameters():
        assert parameter.requires_grad == (chain.unit_of(key) >= prefix.stop), key


def test_a_released_half_leaves_the_other_one_at_work() -> None:
    chain, inputs = in_halves(MODELS["vit"])
    kept = {key: value.clone() for key, value in chain.model.state_dict().items()}
    logits = run(chain, inputs, cut=4)
    chain.release([4])
    away = {key for key, parameter in chain.model.named_parameters() if parameter.is_meta}
    assert away == {key for key in kept if key.startswith(("blocks.1.norm2", "blocks.1.mlp"))}
    chain.run(range(3, 4), torch.zeros(chain.boundary(2, rows=3, length=1).shape), {})
    chain.materialize([4])
    with torch.no_grad():
        for key in away:
            chain.model.get_parameter(key).copy_(kept[key])
    assert torch.equal(run(chain, inputs, cut=4), logits)


def test_the_proof_leaves_the_model_as_it_was() -> None:
    torch.manual_seed(0)
    model = WITH_DROPOUT["vit"]()
    kept = {key: value.clone() for key, value in model.state_dict().items()}
    chain = Chain(model, name="tiny", device=DEVICE, units_per_block=2)
    state = torch.get_rng_state()
    chain.learn_shapes({"pixel_values": torch.zeros(1, 3, 16, 16)})
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(kept[key], value) for key, value in model.state_dict().items())
    assert not any(module.training for module in model.modules())


# ---- what has no halves ----------------------------------------------------------------------------------------------


def crossing() -> nn.Module:
    return of_transformers("GPT2", **GPT2, add_cross_attention=True)


def scaled_residual(build: Callable[[], nn.Module]) -> nn.Module:
    """Its blocks have the usual modules and add them up in another way, which only numbers can tell."""
    model = build()

    class Scaled(type(model.blocks[1])):  # type: ignore[misc]
        def forward(self, x: Tensor, **arguments: Any) -> Tensor:
            return super().forward(x, **arguments) + 0.01 * x

    model.blocks[1].__class__ = Scaled
    return model


def dropping_more() -> nn.Module:
    """Differs from its kind in training alone."""
    model = timm_model("vit_tiny_patch16_224")

    class Dropping(type(model.blocks[1])):  # type: ignore[misc]
        def forward(self, x: Tensor, **arguments: Any) -> Tensor:
            return nn.functional.dropout(super().forward(x, **arguments), 0.5, self.training)

    model.blocks[1].__class__ = Dropping
    return model


def of_blocks(name: str, module: str = "vision_transformer", **settings: object) -> nn.Module:
    import timm

    block = getattr(getattr(timm.models, module), name)
    return timm_model("vit_tiny_patch16_224", block_fn=block, **settings)


INDIVISIBLE: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "parallel halves": (lambda: of_blocks("ParallelScalingBlock"), "neither half owns blocks.0.in_norm.weight"),
    "parallel attentions": (lambda: of_blocks("ParallelThingsBlock"), "neither half owns blocks.0.attns.0.norm.weight"),
    "norms behind": (lambda: of_blocks("ResPostBlock"), "AttributeError: 'ResPostBlock' object has no attribute 'ls1'"),
    "eva, norms behind": (
        lambda: timm_model("eva02_tiny_patch14_224", use_post_norm=True),
        "AttributeError: 'EvaBlockPostNorm' object has no attribute 'gamma_1'",
    ),
    "cross-attention": (crossing, "neither half owns transformer.h.0.crossattention.c_attn.weight"),
    "another sum": (lambda: scaled_residual(MODELS["vit"]), "other outputs than the whole"),
    "another sum, eva": (lambda: scaled_residual(MODELS["eva"]), "other outputs than the whole"),
    "another sum, beit": (lambda: scaled_residual(MODELS["beit"]), "other outputs than the whole"),
    "another dropout": (dropping_more, "other outputs than the whole"),
}


@pytest.mark.parametrize("name", INDIVISIBLE)
def test_a_block_that_divides_in_another_way_is_refused_in_halves_alone(name: str) -> None:
    build, found = INDIVISIBLE[name]
    whole = Chain(build(), name="tiny", device=DEVICE)
    whole.learn_shapes(inputs_of(whole))
    with pytest.raises(UserError) as error:
        in_halves(build)
    assert str(error.value) == f"pipe.units: half cannot cut the blocks of tiny ({found}); give block"


def test_a_difference_that_small_layer_scales_hide_is_found() -> None:
    """They start at 1e-6: whatever a block does to its input is below any tolerance then."""
    torch.manual_seed(0)
    model = MODELS["deit 3, scaled layers"]()

    class Twice(type(model.blocks[1])):  # type: ignore[misc]
        def forward(self, x: Tensor, **arguments: Any) -> Tensor:
            x = super().forward(x, **arguments)
            return x + self.ls2(self.mlp(self.norm2(x)))

    model.blocks[1].__class__ = Twice
    chain = Chain(model, name="tiny", device=DEVICE, units_per_block=2)
    with pytest.raises(
        UserError, match="^pipe.units: half cannot cut the blocks of tiny .other outputs than the whole"
    ):
        chain.learn_shapes(inputs_of(chain))


def test_a_family_without_halves_is_refused() -> None:
    model = MODELS["vit"]()
    chain = Chain(model, name="tiny", device=DEVICE)
    with (
        mock.patch("pipetransformer.models.chain.family_of", return_value=replace(chain.family, halves=None)),
        pytest.raises(UserError, match="^pipe.units: half .* timm ViT and DeiT, has no halves.; give block$"),
    ):
        Chain(model, name="tiny", device=DEVICE, units_per_block=2)


# ---- law 1 -----------------------------------------------------------------------------------------------------------

FAMILIES = {"roberta": "Roberta", "electra": "Electra", "distilbert": "DistilBert", "gpt2": "GPT2", "llama": "Llama"}
FAMILIES |= {"bert-qa": "Bert-qa", "distilbert-qa": "DistilBert-qa"}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("texts")
    tiny_bert(folder / "bert", layers=6)
    tiny_sst2(folder / "sst2", 150, num_eval_samples=40)
    tiny_squad(folder / "squad", 120, num_eval_questions=20)
    for name, family in FAMILIES.items():
        tiny_text_model(folder / name, family)
    return str(folder)


def assert_plain(case: Case, ranks: RankPool, texts: str, folder: Path) -> None:
    assert all(unit % 2 == 0 for plan in case.plans().values() for unit in plan.boundaries), (
        "every cut is inside a block: even units are the second halves"
    )
    weights, gradients = reference(case, texts)
    answers = ranks.run(case.world_size, elastic_run, case, texts, str(folder))
    assert gradient_deviation([g for _, g in answers], gradients) < 1e-10
    assert deviation(answers[0][0], weights) < 1e-10


QUICK = ("vit", "bert", "gpt2")
OTHERS = ("llama", "beit", "eva", "distilbert", "deit", "roberta", "electra", "bert-qa", "distilbert-qa")


@pytest.mark.parametrize("model", [*QUICK, *(pytest.param(model, marks=pytest.mark.full) for model in OTHERS)])
def test_halves_are_plain_for_every_family(model: str, ranks: RankPool, texts: str, tmp_path: Path) -> None:
    assert_plain(Case(model, 2, TWO_RANKS, 4, cached=True, units="half"), ranks, texts, tmp_path)


ON_FOUR_RANKS = list(product(("vit", "bert", "eva", "gpt2"), (False, True), ("never", "always", "selective")))


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "cached", "recompute"),
    ON_FOUR_RANKS,
)
def test_halves_are_plain_on_four_ranks(
    model: str, cached: bool, recompute: str, ranks: RankPool, texts: str, tmp_path: Path
) -> None:
    case = Case(
        *(model, 4, SHRINK_AND_GROW, 4), optimizer="sgd", clip=None, cached=cached, recompute=recompute, units="half"
    )
    assert_plain(case, ranks, texts, tmp_path)


WAYS = (
    ((0, 0, 2), (3, 1, 2), (6, 2, 2), (9, 3, 2), (12, 5, 1), (15, 0, 2)),
    (("interleaved", 2), ("zero_bubble", 1), ("zero_bubble", 2), ("gpipe", 1), ("1f1b", 1), ("zero_bubble", 2)),
)


@pytest.mark.parametrize("model", ["vit", pytest.param("bert", marks=pytest.mark.full)])
def test_halves_are_plain_in_every_schedule(model: str, ranks: RankPool, texts: str, tmp_path: Path) -> None:
    moves, ways = WAYS
    case = Case(
        model, 2, moves, 4, optimizer="sgd", clip=None, cached=True, ways=ways, recompute="always", units="half"
    )
    assert_plain(case, ranks, texts, tmp_path)


@contextmanager
def residual_cut_short() -> Iterator[None]:
    """A hundredth of one half's residual; the proofs, which would refuse it, are switched off."""
    mlp = halves_module.VIT.mlp

    def without(block: Any, hidden: Tensor, **arguments: Any) -> Tensor:
        return mlp(block, hidden, **arguments) - 0.01 * hidden

    found = mock.patch("pipetransformer.models.chain.halves_differ", return_value=False)
    outputs = mock.patch("pipetransformer.models.chain.differ", return_value=False)
    broken = mock.patch("pipetransformer.models.families.VIT", replace(halves_module.VIT, mlp=without))
    with found, outputs, broken:
        yield


def run_with_bug(world: World, case: Case, folder: str) -> tuple[Weights | None, object]:
    return elastic_run(world, case, "", folder, residual_cut_short())


def test_a_residual_that_is_cut_short_breaks_the_law(ranks: RankPool, tmp_path: Path) -> None:
    case = Case("vit", 2, TWO_RANKS, 4, cached=True, units="half")
    weights, _ = reference(case, "")
    answers = ranks.run(2, run_with_bug, case, str(tmp_path))
    assert deviation(answers[0][0], weights) > 1e-4
