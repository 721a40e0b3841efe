"""Weights before training: those that the library's own constructors give, by name, in no memory until they are asked
for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from tiny import tiny_text_model
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSequenceClassification

from pipetransformer.adapter import Deferred, NotDeferred
from pipetransformer.models import Chain
from pipetransformer.models.values import Values, built_with_values

CPU = torch.device("cpu")


class Holder:
    def __init__(self, model: nn.Module) -> None:
        self.model = model


def values_of(build: Callable[[], nn.Module], *, seed: int = 0) -> tuple[nn.Module, Values]:
    built, values = built_with_values(lambda: Holder(build()), seed=seed)
    return built.model, values


def _timm(name: str) -> Callable[[], nn.Module]:
    return lambda: timm.create_model(name, img_size=32, depth=2, num_classes=10)


def _transformers(**settings: Any) -> Callable[[], nn.Module]:
    return lambda: AutoModelForSequenceClassification.from_config(AutoConfig.for_model(**settings))


_SMALL = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
RANDOM_MODELS = {
    "vit": _timm("vit_tiny_patch16_224"),
    "deit": _timm("deit_tiny_distilled_patch16_224"),
    "eva": _timm("eva02_tiny_patch14_224"),
    "beit": _timm("beit_base_patch16_224"),
    "bert": _transformers(model_type="bert", vocab_size=500, **_SMALL),
    "roberta": _transformers(model_type="roberta", vocab_size=500, pad_token_id=1, **_SMALL),
    "electra": _transformers(model_type="electra", vocab_size=500, **_SMALL),
    "distilbert": _transformers(
        model_type="distilbert", vocab_size=500, dim=128, hidden_dim=256, n_layers=2, n_heads=4
    ),
    "gpt2": _transformers(model_type="gpt2", vocab_size=500, n_embd=128, n_layer=2, n_head=4),
    "llama": _transformers(model_type="llama", vocab_size=500, **_SMALL),
}


@pytest.mark.parametrize("name", RANDOM_MODELS)
def test_drawn_weights_are_distributed_as_the_library_s(name: str) -> None:
    """Mean and spread within four standard errors, and equal where nothing is random."""
    torch.manual_seed(1)
    own, (model, values) = RANDOM_MODELS[name](), values_of(RANDOM_MODELS[name])
    assert all(parameter.is_meta for parameter in model.parameters() if parameter.numel() > 2000)
    for key, parameter in own.named_parameters():
        drawn, wanted = values.of(key), parameter.detach()
        assert (drawn.shape, drawn.dtype) == (wanted.shape, wanted.dtype), key
        if not wanted.std(correction=0):
            assert drawn.equal(wanted), key
        elif wanted.numel() > 100:
            spread, error = float(wanted.std()), 4 * (2 / wanted.numel()) ** 0.5
            assert abs(float(drawn.std()) / spread - 1) < error, key
            assert abs(float(drawn.mean() - wanted.mean())) < error * spread, key
            widest = [float(value.abs().flatten().quantile(0.99)) for value in (drawn, wanted)]
            assert abs(widest[0] / widest[1] - 1) < 3 * error, key
    buffers = dict(model.named_buffers())
    assert all(buffers[key].equal(wanted) for key, wanted in own.named_buffers())


def test_a_weight_depends_on_the_seed_and_its_name_alone() -> None:
    def linears(*names: str) -> Callable[[], nn.Module]:
        return lambda: nn.ModuleDict({name: nn.Linear(4, 4) for name in names})

    (_, both), (_, one), (_, other) = (
        values_of(linears("a", "b")),
        values_of(linears("b")),
        values_of(linears("b"), seed=1),
    )
    weight = both.of("b.weight")
    assert weight.equal(both.of("b.weight")) and weight.equal(one.of("b.weight"))
    assert not weight.equal(both.of("a.weight")) and not weight.equal(other.of("b.weight"))


def test_saved_weights_are_those_of_the_file(tmp_path: Path) -> None:
    """Also where the head is new, and where the library itself has copied them."""
    folder = tiny_text_model(tmp_path / "bert", "Bert", layers=2)
    saved = load_file(folder / "model.safetensors")
    model, values = values_of(
        lambda: AutoModelForSequenceClassification.from_pretrained(folder, num_labels=7, ignore_mismatched_sizes=True)
    )
    found = {key: values.of(key) for key, _ in model.named_parameters()}
    assert all(found[key].equal(value) for key, value in saved.items() if not key.startswith("classifier."))
    assert found["classifier.weight"].shape == (7, saved["classifier.weight"].shape[1])
    network = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, num_classes=3)
    kept = {key: torch.randn_like(value) for key, value in network.state_dict().items()}
    save_file(kept, tmp_path / "vit.safetensors")

    def loaded() -> nn.Module:
        network = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, num_classes=3)
        network.load_state_dict(load_file(tmp_path / "vit.safetensors"))
        return network

    model, values = values_of(loaded)
    assert all(p.is_meta and values.of(key).equal(kept[key]) for key, p in model.named_parameters())


def test_a_constructor_that_looks_at_its_weights_is_run_as_it_is() -> None:
    class Looking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)
            self.weight = nn.Parameter(self.layer.weight / self.layer.weight.norm().item())

    model, values = values_of(Looking)
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert values.of("weight").norm().item() == pytest.approx(1.0)


def test_values_of_values_that_are_not_there_are_refused() -> None:
    with pytest.raises(NotDeferred, match="whose values are not there"), Deferred():
        nn.Linear(3, 3).weight.data.copy_(nn.Linear(3, 3).weight.data)
    with pytest.raises(NotDeferred, match="nothing is known of weight"):
        with Deferred() as deferred:
            module = nn.Module()
            module.weight = nn.Parameter(torch.empty(3))
        Values(module, deferred=deferred, seed=0)


def chain_of(family: str, folder: Path) -> tuple[Chain, dict[str, Tensor]]:
    source = tiny_text_model(folder / family, family, layers=2)
    model, values = values_of(lambda: AutoModelForSequenceClassification.from_pretrained(source))
    return Chain(model, name="tiny", device=CPU, values=values), load_file(source / "model.safetensors")


def test_a_chain_begins_with_shapes_and_lends_units(tmp_path: Path) -> None:
    chain, saved = chain_of("Bert", tmp_path)
    assert not any(chain.holds(unit) for unit in range(chain.num_units))
    with chain.lent([1], awake=True):
        assert [chain.holds(unit) for unit in range(4)] == [False, True, False, False]
        lent = chain.named_parameters([1])
        assert all(p.requires_grad and p.detach().equal(saved[key]) for key, p in lent.items())
    assert not chain.holds(1)
    chain.fill([2])
    with chain.lent([1, 2]):
        pass
    assert chain.holds(2) and not chain.holds(1), "what it has it keeps"


@pytest.mark.parametrize("units_per_block", [1, 2])
def test_a_chain_is_proven_with_a_block_at_a_time(tmp_path: Path, units_per_block: int) -> None:
    source = tiny_text_model(tmp_path / "bert", "Bert", layers=3)
    model, values = values_of(lambda: AutoModelForSequenceClassification.from_pretrained(source))
    chain = Chain(model, name="tiny", device=CPU, values=values, units_per_block=units_per_block)
    held: list[int] = []
    for block in chain.blocks:
        block.register_forward_hook(lambda *_: held.append(sum(map(chain.holds, range(chain.num_units)))))
    ids = torch.randint(5, 20, (2, 6))
    chain.learn_shapes({"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": 0 * ids})
    assert held and max(held) == 2 + units_per_block, "stem, head and the block"
    assert not any(chain.holds(unit) for unit in range(chain.num_units))
    assert chain.boundary(1, rows=4, length=6).shape[:2] == (4, 6)


def test_tied_weights_stay_tied() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)
            self.two.weight = self.one.weight

    from pipetransformer.models.values import empty

    model, values = values_of(Tied)
    empty(model, device=CPU, dtype=torch.float64)
    assert model.one.weight is model.two.weight and model.one.weight.dtype == torch.float64
    assert [*dict(model.named_parameters())] == ["one.weight", "one.bias", "two.bias"]
    assert values.of("one.weight").shape == (3, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_what_is_kept_lies_in_a_file_and_comes_back(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIPETRANSFORMER_CACHE", str(tmp_path / "cache"))
    _, values = values_of(lambda: nn.Linear(300, 200))
    weight = torch.randn(200, 300).to(dtype)
    values.put("weight", weight)
    kept = values.of("weight")
    assert kept.equal(weight) and kept.dtype == dtype and kept.data_ptr() != weight.data_ptr()
    assert [*(tmp_path / "cache").iterdir()] == [], "the file has no name"
    values.put("weight", torch.zeros(0, 3))
    assert values.of("weight").shape == (0, 3)


def test_what_is_kept_stays_in_memory_where_there_is_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").write_text("no folder")
    monkeypatch.setenv("PIPETRANSFORMER_CACHE", str(tmp_path / "cache"))
    _, values = values_of(lambda: nn.Linear(3, 2))
    weight = torch.randn(2, 3)
    values.put("weight", weight)
    assert values.of("weight").equal(weight) and values.of("weight").data_ptr() != weight.data_ptr()
