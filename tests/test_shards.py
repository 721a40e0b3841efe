"""A folder of weights in several files: what its index says is there, once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_resting import job_of
from tiny import tiny_bert, tiny_sst2

from pipetransformer.errors import UserError
from pipetransformer.models.shards import check_shards
from pipetransformer.models.weight_files import write_weights

INDEX = "model.safetensors.index.json"


def sharded(folder: Path) -> Path:
    """A model of which three files hold the weights."""
    tiny_bert(folder / "bert", layers=6)
    whole = load_file(folder / "bert" / "model.safetensors")
    (folder / "bert" / "model.safetensors").unlink()
    largest = sum(tensor.nbytes for tensor in whole.values()) // 3 + 1000
    write_weights(folder / "bert", whole.items(), like=whole, largest=largest)
    return folder / "bert"


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def without_a_tensor(folder: Path) -> str:
    file = files_of(folder)[1]
    kept = load_file(file)
    gone = next(iter(kept))
    del kept[gone]
    save_file(kept, file, metadata={"format": "pt"})
    return f"{file.name} has no {gone}, which {INDEX} says that it has"


def with_two_values(folder: Path) -> str:
    """The library would take one of both without a word."""
    first, second, *_ = files_of(folder)
    with safe_open(first, framework="pt") as file:
        twice = next(iter(file.keys()))
        other = torch.zeros_like(file.get_tensor(twice))
    save_file({**load_file(second), twice: other}, second, metadata={"format": "pt"})
    return f"has {twice} in two files, {first.name} and {second.name}"


def without_a_file(folder: Path) -> str:
    file = files_of(folder)[2]
    file.unlink()
    return f"{file.name} is missing, and {INDEX} names it"


def cut_off(folder: Path) -> str:
    file = files_of(folder)[0]
    file.write_bytes(file.read_bytes()[:-100])
    return f"{file.name} cannot be read"


def without_a_map(folder: Path) -> str:
    (folder / INDEX).write_text(json.dumps({"weights": {}}))
    return f"{INDEX} is no index of weights"


@pytest.mark.parametrize("damage", [without_a_tensor, with_two_values, without_a_file, cut_off, without_a_map])
def test_damage_is_one_line(damage: Callable[[Path], str], tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    said = damage(folder)
    tiny_sst2(tmp_path / "sst2", 40, num_eval_samples=10)
    with pytest.raises(UserError, match="^model.name: .*; copy the folder anew$") as refused:
        job_of("bert", str(tmp_path))
    assert said in str(refused.value)


def test_a_whole_folder_is_read(tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    assert len(files_of(folder)) >= 3
    check_shards(folder)
    tiny_sst2(tmp_path / "sst2", 40, num_eval_samples=10)
    expected = {name: tensor for file in files_of(folder) for name, tensor in load_file(file).items()}
    network = job_of("bert", str(tmp_path), "train.precision=float32").whole_model()
    body = {name: p for name, p in network.named_parameters() if name.startswith("bert.")}
    assert body and all(torch.equal(parameter, expected[name]) for name, parameter in body.items())
