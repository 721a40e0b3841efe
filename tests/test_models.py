"""A model seen as a chain is the library's own: same outputs, same names, and what is saved loads with one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from entries import EntryServer
from laws import configuration
from test_bad_input import IMAGES, TEXTS
from tiny import tiny_bert, tiny_sst2
from torch import Tensor, nn

from pipetransformer.data import alone
from pipetransformer.errors import UserError
from pipetransformer.models import MASK, Chain, Stage
from pipetransformer.process.world import World
from pipetransformer.run.job import build_job

ROWS, LENGTH = 3, 12


def timm_model(name: str, **settings: object) -> nn.Module:
    import timm

    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 3, "num_heads": 2, "num_classes": 5}
    return timm.create_model(name, **{**sizes, **settings})


def bert(**settings: object) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"vocab_size": 30, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    return BertForSequenceClassification(BertConfig(**{**sizes, "num_hidden_layers": 3, "num_labels": 5, **settings}))


SIZES = {"vocab_size": 30, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 3}


def of_transformers(name: str, task: str = "SequenceClassification", **settings: object) -> nn.Module:
    """A tiny random model: ``of_transformers("Roberta")`` is a RobertaForSequenceClassification of 5 classes."""
    import transformers

    labels = {"num_labels": 5} if task == "SequenceClassification" else {}
    config = getattr(transformers, f"{name}Config")(**{**labels, **settings})
    return getattr(transformers, f"{name}For{task}")(config)


DISTILBERT = {"vocab_size": 30, "dim": 16, "hidden_dim": 32, "n_layers": 3, "n_heads": 2}
GPT2 = {"vocab_size": 30, "n_embd": 16, "n_layer": 3, "n_head": 2, "pad_token_id": 0, "n_positions": 64}
LLAMA = {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
OPT = {**SIZES, "num_attention_heads": 4, "ffn_dim": 32, "pad_token_id": 0, "max_position_embeddings": 64}
MODERNBERT = {**SIZES, "pad_token_id": 0, "local_attention": 4, "global_attn_every_n_layers": 2}
ROBERTA = {**SIZES, "pad_token_id": 0, "max_position_embeddings": 40, "type_vocab_size": 2}

MODELS: dict[str, Callable[[], nn.Module]] = {
    "vit": lambda: timm_model("vit_tiny_patch16_224"),
    "vit without class token, averaged": lambda: timm_model(
        "vit_tiny_patch16_224", class_token=False, global_pool="avg"
    ),
    "vit with registers": lambda: timm_model("vit_tiny_patch16_224", reg_tokens=4, no_embed_class=True),
    "vit of clip, normed before": lambda: timm_model("vit_base_patch16_clip_224"),
    "vit with attention pooling": lambda: timm_model("vit_base_patch16_siglip_224"),
    "deit": lambda: timm_model("deit_tiny_patch16_224"),
    "deit, distilled": lambda: timm_model("deit_tiny_distilled_patch16_224"),
    "deit 3, scaled layers": lambda: timm_model("deit3_small_patch16_224"),
    "beit": lambda: timm_model("beit_base_patch16_224"),
    "eva": lambda: timm_model("eva02_tiny_patch14_224"),
    "bert for questions": lambda: of_transformers("Bert", "QuestionAnswering", **SIZES),
    "roberta": lambda: of_transformers("Roberta", **ROBERTA),
    "roberta for questions": lambda: of_transformers("Roberta", "QuestionAnswering", **ROBERTA),
    "electra": lambda: of_transformers("Electra", **SIZES, embedding_size=8),
    "electra for questions": lambda: of_transformers("Electra", "QuestionAnswering", **SIZES, embedding_size=8),
    "distilbert": lambda: of_transformers("DistilBert", **DISTILBERT),
    "distilbert for questions": lambda: of_transformers("DistilBert", "QuestionAnswering", **DISTILBERT),
    "gpt2": lambda: of_transformers("GPT2", **GPT2),
    "llama": lambda: of_transformers("Llama", **LLAMA),
    "mistral, by structure": lambda: of_transformers("Mistral", **LLAMA),
    "camembert, by structure": lambda: of_transformers("Camembert", **ROBERTA),
    "qwen2": lambda: of_transformers("Qwen2", **LLAMA),
    "qwen3": lambda: of_transformers("Qwen3", **LLAMA, head_dim=4),
    "opt": lambda: of_transformers("OPT", **OPT),
    "opt, projected": lambda: of_transformers("OPT", **OPT, word_embed_proj_dim=8),
    "modernbert": lambda: of_transformers("ModernBert", **MODERNBERT),
    "modernbert, averaged": lambda: of_transformers("ModernBert", **MODERNBERT, classifier_pooling="mean"),
    "bert": bert,
    "bert, eager attention": lambda: bert(attn_implementation="eager"),
}
WITH_DROPOUT = {
    "vit": lambda: timm_model("vit_tiny_patch16_224", pos_drop_rate=0.5, proj_drop_rate=0.5, drop_path_rate=0.5),
    "bert": lambda: bert(hidden_dropout_prob=0.5, attention_probs_dropout_prob=0.5),
}


def inputs_of(chain: Chain) -> dict[str, Tensor]:
    torch.manual_seed(1)
    if chain.family.main_input == "pixel_values":
        return {"pixel_values": torch.randn(ROWS, 3, 16, 16)}
    real = torch.arange(LENGTH) < torch.tensor([[LENGTH], [7], [3]])
    types = (torch.arange(LENGTH) >= 5).long().expand(ROWS, LENGTH)
    return {
        "input_ids": torch.randint(1, 30, (ROWS, LENGTH)) * real,
        "attention_mask": real.long(),
        "token_type_ids": types * real,
    }


def own_forward(chain: Chain, inputs: dict[str, Tensor]) -> Tensor:
    if "pixel_values" in inputs:
        return chain.model(inputs["pixel_values"])
    told = chain.model(**{key: inputs[key] for key in (chain.family.main_input, *chain.input_keys)})
    return told.logits if "logits" in told else torch.stack((told.start_logits, told.end_logits), dim=-1)


def some_loss(outputs: Tensor) -> Tensor:
    """Of classes or of spans; a square would not tell a sign."""
    return (outputs * torch.linspace(-1, 1, outputs.numel()).view_as(outputs)).sum() + outputs.square().mean()


def wrapped(
    build: Callable[[], nn.Module], *, precision: str = "float32", head_row_only: bool = False
) -> tuple[Chain, dict[str, Tensor]]:
    """A chain in eval mode that knows its shapes, and a batch for it."""
    torch.manual_seed(0)
    model = build()
    with torch.no_grad():  # else what starts at zero, as class tokens and scaled layers may, would hide a mistake
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    device = torch.device("cpu")
    chain = Chain(model, name="tiny", precision=precision, device=device, head_row_only=head_row_only)
    inputs = inputs_of(chain)
    chain.learn_shapes(inputs)
    return chain, inputs


def run(chain: Chain, inputs: dict[str, Tensor], *, cut: int) -> Tensor:
    """Through all units, in two pieces, as stages run them."""
    side, hidden = {key: inputs[key] for key in chain.input_keys}, inputs[chain.family.main_input]
    for units in (range(cut), range(cut, chain.num_units)):
        hidden = Stage(chain, units)(hidden, **side)
    return hidden


def check_every_cut(chain: Chain, inputs: dict[str, Tensor], *, logits_to: float, gradients_to: float) -> None:
    """In two pieces, cut between any units, a chain gives the library's own logits and gradients.

    Args:
        logits_to: relative and absolute tolerance. gradients_to: relative one.
    """
    logits = own_forward(chain, inputs)
    some_loss(logits).backward()
    expected = {key: parameter.grad for key, parameter in chain.model.named_parameters()}
    for cut in range(1, chain.num_units):
        chain.model.zero_grad()
        cut_logits = run(chain, inputs, cut=cut)
        torch.testing.assert_close(cut_logits, logits, rtol=logits_to, atol=logits_to)
        some_loss(cut_logits).backward()
        for key, parameter in chain.model.named_parameters():
            torch.testing.assert_close(parameter.grad, expected[key], rtol=gradients_to, atol=logits_to, msg=key)


@pytest.mark.parametrize("name", MODELS)
def test_a_chain_cut_anywhere_is_the_library_s_own_forward_and_backward(name: str) -> None:
    check_every_cut(*wrapped(MODELS[name]), logits_to=1e-6, gradients_to=1e-4)


@pytest.mark.parametrize("head_row_only", [False, True])
@pytest.mark.parametrize("name", [name for name in MODELS if not name.startswith(("vit", "deit", "beit", "eva"))])
def test_texts_without_padding_need_no_mask(name: str, head_row_only: bool) -> None:
    chain, inputs = wrapped(MODELS[name], head_row_only=head_row_only)
    inputs |= {MASK: torch.ones_like(inputs[MASK]), "input_ids": inputs["input_ids"].clamp(min=1)}
    expected = own_forward(chain, inputs)
    side = {key: inputs[key] for key in chain.input_keys if key != MASK}
    first = chain.run(range(1), inputs[chain.family.main_input], side)
    torch.testing.assert_close(chain.run(range(1, chain.num_units), first, side), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["vit", "bert"])
@pytest.mark.parametrize(("precision", "dtype"), [("float64", torch.float64), ("bfloat16", torch.bfloat16)])
def test_precisions(name: str, precision: str, dtype: torch.dtype) -> None:
    chain, inputs = wrapped(MODELS[name], precision=precision)
    inputs = {key: value.to(chain.dtype) if value.is_floating_point() else value for key, value in inputs.items()}
    with chain.autocast():
        expected = own_forward(chain, inputs)
    logits = run(chain, inputs, cut=2)
    assert logits.dtype == expected.dtype == dtype
    assert torch.equal(logits, expected)
    assert {parameter.dtype for parameter in chain.model.parameters()} == {chain.dtype}


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_belongs_to_one_unit_under_its_own_name(name: str) -> None:
    chain, _ = wrapped(MODELS[name])
    units = [list(chain.named_parameters([unit])) for unit in range(chain.num_units)]
    assert all(units)
    names = [key for unit in units for key in unit]
    assert sorted(names) == sorted(key for key, _ in MODELS[name]().named_parameters())
    assert all(chain.unit_of(key) == unit for unit, keys in enumerate(units) for key in keys)
    assert all(f".{unit - 1}." in key for unit in range(1, chain.num_units - 1) for key in units[unit])


@pytest.mark.parametrize("name", ["vit", "deit, distilled", "bert"])
def test_boundaries_are_as_wide_as_what_crosses_them(name: str) -> None:
    chain, inputs = wrapped(MODELS[name])
    side = {key: inputs[key] for key in chain.input_keys}
    hidden = inputs[chain.family.main_input]
    for unit in range(chain.num_units):
        hidden = chain.run(range(unit, unit + 1), hidden, side)
        boundary = chain.boundary(unit, rows=ROWS, length=LENGTH)
        assert (boundary.shape, boundary.dtype) == (hidden.shape, hidden.dtype)


@pytest.mark.parametrize("name", ["vit", "bert"])
def test_units_are_released_and_come_back_as_they_were(name: str) -> None:
    chain, inputs = wrapped(MODELS[name])
    logits, kept = run(chain, inputs, cut=2), {k: v.clone() for k, v in chain.model.state_dict().items()}
    away = [0, 2, chain.num_units - 1]
    chain.release(away)
    assert {chain.unit_of(key) for key, p in chain.model.named_parameters() if p.is_meta} == set(away)
    assert list(chain.model.state_dict()) == list(kept)
    side = {key: inputs[key] for key in chain.input_keys}
    chain.run(range(1, 2), torch.zeros(chain.boundary(0, rows=ROWS, length=LENGTH).shape), side)
    chain.materialize(away)
    assert not any(parameter.is_meta for parameter in chain.model.parameters())
    with torch.no_grad():
        for key, parameter in chain.named_parameters(away).items():
            parameter.copy_(kept[key])
    assert torch.equal(run(chain, inputs, cut=2), logits)


@pytest.mark.parametrize("name", WITH_DROPOUT)
def test_frozen_units_stay_frozen_through_train(name: str) -> None:
    chain, inputs = wrapped(WITH_DROPOUT[name])
    side, main = {key: inputs[key] for key in chain.input_keys}, inputs[chain.family.main_input]
    chain.train()
    F.cross_entropy(chain.run(range(chain.num_units), main, side), torch.arange(ROWS)).backward()
    chain.freeze(2)
    for _ in range(2):
        chain.train()
        frozen = [chain.run(range(3), main, side) for _ in range(2)]
        assert torch.equal(*frozen), "the stem and two blocks are in eval mode"
        active = [chain.run(range(3, chain.num_units), frozen[0], side) for _ in range(2)]
        assert not torch.equal(*active), "the third block is not"
    for key, parameter in chain.model.named_parameters():
        assert parameter.requires_grad == (chain.unit_of(key) > 2), key
        assert parameter.requires_grad or parameter.grad is None, key
    chain.freeze(0)
    chain.train()
    assert all(parameter.requires_grad for parameter in chain.model.parameters())
    assert not torch.equal(*(chain.run(range(3), main, side) for _ in range(2)))


def test_a_variant_that_computes_something_else_between_its_parts_is_refused() -> None:
    import timm

    class Halving(timm.models.VisionTransformer):
        def forward_features(self, x: Tensor, **masks: object) -> Tensor:
            return super().forward_features(x, **masks) / 2

    with pytest.raises(UserError, match=r"tiny looks like timm ViT and DeiT but computes something else .* \(other"):
        wrapped(lambda: Halving(img_size=16, patch_size=4, embed_dim=16, depth=2, num_heads=2, num_classes=5))


def test_a_model_with_batch_normalisation_is_refused() -> None:
    import timm

    class Normed(timm.models.VisionTransformer):
        def __init__(self, **settings: object) -> None:
            super().__init__(**settings)
            self.bn = nn.BatchNorm1d(2)

    with pytest.raises(UserError, match="^model.name: tiny has batch normalisation, whose statistics would depend"):
        wrapped(lambda: Normed(img_size=16, patch_size=4, embed_dim=16, depth=2, num_heads=2, num_classes=5))


def test_a_stage_whose_output_is_not_as_announced_is_refused() -> None:
    chain, inputs = wrapped(lambda: timm_model("vit_tiny_patch16_224", patch_drop_rate=0.5))
    stage, (main,) = Stage(chain, range(2)), inputs.values()
    chain.train(False)
    stage(main)
    chain.train()
    with pytest.raises(UserError, match=r"unit 1 of tiny gave \[3, 9, 16\] in training and \[3, 17, 16\] in eval"):
        stage(main)


def test_the_bits_of_a_text_do_not_depend_on_its_neighbours_padding() -> None:
    """Masks are made also where no row is padded: without one, attention may take another path."""
    chain, inputs = wrapped(bert)
    hidden = torch.zeros(ROWS, LENGTH, 16)
    full = {**inputs, "attention_mask": torch.ones(ROWS, LENGTH, dtype=torch.int64)}
    assert chain.family.block_arguments(chain.model, hidden, full)["attention_mask"] is not None


# ---- what a run saves ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def entries() -> EntryServer:
    return EntryServer()


def figures(logits: Tensor, labels: Tensor) -> dict[str, float]:
    accuracy = (logits.argmax(dim=1) == labels).double().mean()
    return {"accuracy": float(accuracy), "loss": float(F.cross_entropy(logits, labels))}


@pytest.mark.parametrize(
    ("overrides", "channels", "tolerance"),
    [
        ([], 1, 1e-5),
        # Pillow and torch round a resized picture's pixels differently here and there.
        (["data.image_size=16", "model.kwargs={patch_size: 4, embed_dim: 16, depth: 2, num_heads: 2}"], 3, 5e-3),
    ],
)
def test_a_saved_image_model_loads_with_one_line_of_timm(
    entries: EntryServer, tmp_path: Path, overrides: list[str], channels: int, tolerance: float
) -> None:
    import timm
    from PIL import Image
    from timm.data import create_transform, resolve_model_data_config

    from pipetransformer.data.digits import DIGIT_NAMES, read_digits
    from pipetransformer.data.reading import drawn

    (tmp_path / "config.yaml").write_text(IMAGES.replace("FOLDER", str(tmp_path)))
    length = ("train.epochs=3", "train.lr=3e-2", "data.max_eval_samples=64")
    if channels == 3:
        overrides = [*overrides, "model.kwargs.in_chans=3"]
    assert entries.run("image_classification", tmp_path / "config.yaml", *length, *overrides).exit_code == 0
    summary = json.loads((tmp_path / "runs" / "x" / "summary.json").read_text())
    rows = drawn(360, max_samples=64)
    pictures, labels = (array[rows] for array in read_digits(train=False))
    mode = {1: "L", 3: "RGB"}[channels]
    for name, told in (("final", summary["metrics"]), ("best", summary["best_metrics"])):
        model = timm.create_model(f"local-dir:{tmp_path / 'runs' / 'x' / 'model' / name}", pretrained=True).eval()
        assert model.pretrained_cfg["label_names"] == list(DIGIT_NAMES)
        transform = create_transform(**resolve_model_data_config(model))
        batch = torch.stack([transform(Image.fromarray(picture[0]).convert(mode)) for picture in pictures])
        with torch.no_grad():
            assert figures(model(batch), torch.from_numpy(labels)) == pytest.approx(told, abs=tolerance)


def test_a_model_that_is_trained_further_from_a_saved_one_loads_again(tmp_path: Path) -> None:
    """It keeps the arguments that only the first configuration has told."""
    import timm

    first = configuration("vit", ["data.max_train_samples=16", "data.max_eval_samples=8"])
    world = World(0, 1, 0, 1, torch.device("cpu"))
    small = first.with_overrides({"model.kwargs": {"patch_size": 2, "embed_dim": 16, "depth": 2, "num_heads": 2}})
    job = build_job(small, world, lead=alone)
    for number in range(2):
        folder = tmp_path / str(number)
        weights = {name: value + number for name, value in job.whole_model().state_dict().items()}
        job.built.save(folder, weights.items())
        loaded = timm.create_model(f"local-dir:{folder}", pretrained=True)
        assert all(torch.equal(value, weights[name].float()) for name, value in loaded.state_dict().items())
        further = first.with_overrides({"model.name": str(folder), "model.pretrained": True, "model.kwargs": {}})
        job = build_job(further, world, lead=alone)


def test_a_saved_text_model_loads_with_one_line_of_transformers(entries: EntryServer, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tiny_bert(tmp_path / "bert", initializer_range=0.2)
    tiny_sst2(tmp_path / "sst2", 64, num_eval_samples=16)
    (tmp_path / "config.yaml").write_text(TEXTS.replace("FOLDER", str(tmp_path)))
    assert entries.run("text_classification", tmp_path / "config.yaml", "train.epochs=3").exit_code == 0
    summary = json.loads((tmp_path / "runs" / "x" / "summary.json").read_text())
    lines = [line.split("\t") for line in (tmp_path / "sst2" / "dev.tsv").read_text().splitlines()[1:]]
    for name, told in (("final", summary["metrics"]), ("best", summary["best_metrics"])):
        folder = tmp_path / "runs" / "x" / "model" / name
        model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert model.config.id2label == {0: "negative", 1: "positive"}
        texts = [sentence for sentence, _ in lines]
        batch = tokenizer(texts, padding=True, truncation=True, max_length=64, return_tensors="pt")
        with torch.no_grad():
            logits = model(**batch).logits
        labels = torch.tensor([int(label) for _, label in lines])
        assert figures(logits, labels) == pytest.approx(told, abs=1e-5)
