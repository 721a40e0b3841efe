"""Saved weights: what our writer writes, safetensors and the libraries read, in one file or in many."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from tiny import tiny_bert
from torch import Tensor

from pipetransformer.models.weight_files import write_weights

TYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.uint8, torch.bool]


def tensors(sizes: list[tuple[int, torch.dtype]]) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(0)
    return {
        f"layer.{number}.weight": torch.randint(0, 2, (size,), generator=random).to(dtype)
        for number, (size, dtype) in enumerate(sizes)
    }


def on_meta(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.to("meta") for name, tensor in weights.items()}


@given(
    sizes=st.lists(st.tuples(st.integers(0, 9), st.sampled_from(TYPES)), min_size=1, max_size=12),
    largest=st.sampled_from([None, 1, 40, 100]),
    order=st.randoms(use_true_random=False),
)
def test_safetensors_reads_what_is_written_in_any_order(
    sizes: list[tuple[int, torch.dtype]],
    largest: int | None,
    order: object,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder, weights = tmp_path_factory.mktemp("weights"), tensors(sizes)
    arriving = [*weights.items()]
    order.shuffle(arriving)  # type: ignore[attr-defined]
    write_weights(folder, arriving, like=on_meta(weights), largest=largest)
    files = sorted(folder.glob("*.safetensors"))
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert found.keys() == weights.keys()
    assert all(found[name].dtype == tensor.dtype and found[name].equal(tensor) for name, tensor in weights.items())
    if largest is not None:
        assert all(
            len(held := load_file(file)) == 1 or sum(t.nbytes for t in held.values()) <= largest for file in files
        )


def test_shards_are_named_and_indexed_as_the_libraries_do(tmp_path: Path) -> None:
    weights = tensors([(10, torch.float32), (20, torch.float32), (5, torch.float32)])
    write_weights(tmp_path, weights.items(), like=on_meta(weights), largest=100)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    assert index == {
        "metadata": {"total_size": 140},
        "weight_map": {"layer.0.weight": names[0], "layer.1.weight": names[1], "layer.2.weight": names[1]},
    }
    with safe_open(tmp_path / names[0], framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_transformers_reads_shards(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    tiny_bert(tmp_path / "bert")
    given = AutoModelForSequenceClassification.from_pretrained(tmp_path / "bert")
    weights = {name: torch.randn_like(weight) for name, weight in given.named_parameters()}
    (tmp_path / "sharded").mkdir()
    given.config.save_pretrained(tmp_path / "sharded")
    write_weights(tmp_path / "sharded", weights.items(), like=on_meta(weights), largest=2000)
    assert len([*(tmp_path / "sharded").glob("model-*")]) > 2
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "sharded")
    assert all(weight.equal(weights[name]) for name, weight in loaded.named_parameters())


def test_one_tensor_at_a_time_is_held(tmp_path: Path) -> None:
    weights = tensors([(3, torch.float32)] * 5)
    alive: list[str] = []

    def one_by_one() -> Iterator[tuple[str, Tensor]]:
        for name in weights:
            assert not alive
            alive.append(name)
            yield name, weights[name]
            alive.clear()  # the writer has come back for more

    write_weights(tmp_path, one_by_one(), like=on_meta(weights))
    assert load_file(tmp_path / "model.safetensors").keys() == weights.keys()


@pytest.mark.parametrize("wrong", ["missing", "shape"])
def test_weights_that_are_not_those_of_the_model_are_a_mistake_of_ours(tmp_path: Path, wrong: str) -> None:
    weights = tensors([(3, torch.float32), (4, torch.float32)])
    given = {**weights, "layer.1.weight": torch.zeros(5)} if wrong == "shape" else {"layer.0.weight": torch.zeros(3)}
    with pytest.raises(AssertionError, match="layer.1.weight"):
        write_weights(tmp_path, given.items(), like=on_meta(weights))
