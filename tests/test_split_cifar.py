"""CIFAR-100 in two halves: its classes and files, and the model that is pre-trained on one half, once, and kept."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import timm
import torch
from laws import REPOSITORY
from PIL import Image

sys.path.insert(0, str(REPOSITORY))

from benchmarks.elastic import split_cifar
from benchmarks.elastic.split_cifar import CONFIG, Pretrained, class_split, pretrained, without_head, write_classes
from pipetransformer.config import Config, DataConfig, load_config
from pipetransformer.data import alone
from pipetransformer.data.images import ImagePreprocessing, load_image_data
from pipetransformer.data.info import describe
from pipetransformer.errors import UserError
from pipetransformer.models.timm_model import TimmModel

NAMES = ["ant", "bee", "cat", "dog"]
PLAIN = ImagePreprocessing(32, 3, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0), "bicubic")
TINY = (
    *("model.name=vit_tiny_patch16_224", "model.pretrained=false", "data.image_size=32"),
    "model.kwargs={patch_size: 8, embed_dim: 12, depth: 2, num_heads: 2}",
)


def picture(number: int) -> bytes:
    """Of one colour, which tells its number."""
    buffer = io.BytesIO()
    Image.new("RGB", (32, 32), (number, 0, 0)).save(buffer, "PNG")
    return buffer.getvalue()


def write(path: Path, labels: Sequence[int], *, first: int = 0, as_struct: bool = True) -> None:
    """Pictures ``first``, ``first`` + 1, ..., with these labels."""
    encoded: list[Any] = [picture(first + row) for row in range(len(labels))]
    kind = pa.binary()
    if as_struct:
        encoded = [{"bytes": each, "path": None} for each in encoded]
        kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    table = pa.table({"img": pa.array(encoded, kind), "fine_label": pa.array(labels, pa.int64())})
    told = {"info": {"features": {"fine_label": {"names": NAMES}}}}
    path.parent.mkdir(exist_ok=True)
    pq.write_table(table.replace_schema_metadata({"huggingface": json.dumps(told)}), path)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "cifar100"
    write(folder / "train-00000-of-00002.parquet", [3, 0, 1])
    write(folder / "train-00001-of-00002.parquet", [2, 3], first=3)
    write(folder / "test.parquet", [1, 3, 0], first=10)
    return folder


# ---- halves ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_each_class_is_in_one_half(seed: int) -> None:
    first, others = class_split(100, seed=seed)
    assert len(first) == len(others) == 50 and sorted(first + others) == list(range(100))
    assert first == tuple(sorted(first)) and others == tuple(sorted(others))
    assert class_split(100, seed=seed) == (first, others) != class_split(100, seed=seed + 1)


def test_a_half_is_read_like_cifar(source: Path, tmp_path: Path) -> None:
    write_classes(source, tmp_path / "half", classes=(1, 3))
    data = DataConfig(name="cifar100", path=str(tmp_path / "half"))
    info = describe(data)
    assert info.label_names == ("bee", "dog"), "numbered anew, by name"
    found = load_image_data(data, info=info, preprocessing=PLAIN, seed=0, lead=alone)
    for split, labels, numbers in (("train", [1, 0, 1], [0, 2, 4]), ("eval", [0, 1], [10, 11])):
        pixels = found[split].inputs(np.arange(len(labels)), length=32, epoch=None)["pixel_values"]
        assert found[split].labels.tolist() == labels
        assert (255 * pixels[:, 0, 0, 0]).round().int().tolist() == numbers, "in their order"


def test_a_recipe_is_chosen_by_other_pictures(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the test pictures none, and of those trained on none that the judged rows are trained on."""
    few = {
        "judged": {"train": ("train", slice(1)), "test": ("test", slice(None))},
        "tuned": {"train": ("train", slice(1, 2)), "test": ("train", slice(2, None))},
    }
    assert [len(parts) for parts in split_cifar._PARTS.values()] == [2, 2, 2]
    wanted = split_cifar._PARTS["judged"]["train"][1].stop, split_cifar._PARTS["tuned"]["train"][1]
    assert wanted == (12_500, slice(12_500, 22_500)), "disjoint"
    monkeypatch.setattr(split_cifar, "_PARTS", few)
    for part, numbers in (("judged", ([0], [10, 11])), ("tuned", ([2], [4]))):
        write_classes(source, tmp_path / part, classes=(1, 3), part=part)
        data = DataConfig(name="cifar100", path=str(tmp_path / part))
        found = load_image_data(data, info=describe(data), preprocessing=PLAIN, seed=0, lead=alone)
        for split, values in zip(("train", "eval"), numbers):
            pixels = found[split].inputs(np.arange(len(values)), length=32, epoch=None)["pixel_values"]
            assert (255 * pixels[:, 0, 0, 0]).round().int().tolist() == values


def test_the_digest_is_of_the_content(source: Path, tmp_path: Path) -> None:
    """Wherever the files lie, and however many there are."""
    whole = tmp_path / "whole"
    write(whole / "train.parquet", [3, 0, 1, 2, 3])
    write(whole / "test.parquet", [1, 3, 0], first=10)
    one = write_classes(source, tmp_path / "a", classes=(1, 3))
    assert write_classes(whole, tmp_path / "b", classes=(1, 3)) == one
    assert write_classes(whole, tmp_path / "c", classes=(0, 1)) != one
    write(whole / "test.parquet", [1, 3, 0], first=11)
    assert write_classes(whole, tmp_path / "d", classes=(1, 3)) != one


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "test.parquet").unlink(), "holds neither test.parquet nor test-*.parquet; give"),
        (lambda folder: (folder / "test.parquet").write_text("PAR1"), "test.parquet cannot be read as a file of CIFAR"),
        (lambda folder: write(folder / "test.parquet", [1], as_struct=False), "test.parquet cannot be read as a file"),
        (
            lambda folder: pq.write_table(pa.table({"img": [1]}), folder / "test.parquet"),
            "test.parquet cannot be read as a file of CIFAR-100",
        ),
    ],
)
def test_other_files_are_refused(spoil: Any, message: str, source: Path, tmp_path: Path) -> None:
    spoil(source)
    with pytest.raises(UserError, match="^--cifar100: ") as caught:
        write_classes(source, tmp_path / "half", classes=(0, 1))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="^--cifar100: .* holds neither train.parquet nor train-"):
        split_cifar.class_names(tmp_path)


# ---- the model -------------------------------------------------------------------------------------------------------


def built(config: Config) -> TimmModel:
    return TimmModel(config, describe(config.data))


def saved(source: Path, folder: Path) -> dict[str, torch.Tensor]:
    """A tiny model with its head, as a run of ours leaves it; returns its weights."""
    config = load_config(CONFIG, (*TINY, f"data.path={source}"))
    with torch.random.fork_rng():
        torch.manual_seed(20261124)  # that no other test begins with: the new head must not be the same
        model = built(config)
    weights = {name: weight.detach().clone() for name, weight in model.model.state_dict().items()}
    model.save(folder, weights.items())
    return weights


def test_a_model_without_head_gets_a_new_one_of_as_many_classes(source: Path, tmp_path: Path) -> None:
    """By our own loader and by timm's, which would keep a head of as many classes."""
    weights = saved(source, tmp_path / "saved")
    (tmp_path / "headless").mkdir()
    without_head(tmp_path / "saved", tmp_path / "headless")
    ours = built(load_config(CONFIG, (f"data.path={source}", f"model.name={tmp_path / 'headless'}")))
    theirs = timm.create_model(f"local-dir:{tmp_path / 'headless'}", pretrained=True, num_classes=4, img_size=32)
    for model in (ours.model, theirs):
        found = model.state_dict()
        assert found.keys() == weights.keys()
        same = {name for name, weight in weights.items() if torch.equal(found[name], weight)}
        assert "head.weight" not in same and weights.keys() - {"head.weight", "head.bias"} <= same
    assert ours.preprocessing.size == 32 and ours.label_names == tuple(NAMES)


@pytest.fixture
def launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    """The command lines of trainings, each of which leaves a tiny model; the cache's folder is a new one."""
    lines: list[Sequence[str]] = []

    def launch(arguments: Sequence[str], *, ranks: int, name: str) -> str:
        lines.append(arguments)
        told = dict(each.split("=", 1) for each in arguments if "=" in each)
        run = Path(told["run.dir"]) / told["run.id"]
        saved(Path(told["data.path"]), run / "model" / "final")
        (run / "summary.json").write_text('{"metrics": {"accuracy": 0.5}}')
        return ""

    monkeypatch.setattr(split_cifar, "launch", launch)
    monkeypatch.setenv("PIPETRANSFORMER_CACHE", str(tmp_path / "cache"))
    return lines


def once(source: Path, scratch: Path, *, precision: str = "float32", classes: Sequence[int] = (0, 2)) -> Pretrained:
    return pretrained(source, classes=classes, precision=precision, scratch=scratch)


def test_a_model_is_pre_trained_once(source: Path, tmp_path: Path, launched: list[Sequence[str]]) -> None:
    one = once(source, tmp_path / "a")
    assert one == once(source, tmp_path / "b") and len(launched) == 1
    assert one.accuracy == 0.5 and one.folder.parent == tmp_path / "cache"
    assert [path.name for path in one.folder.parent.iterdir()] == [one.folder.name], "no part of it is left"
    assert launched[0][0].endswith("main_cv.py") and "freeze.policy=none" in launched[0]
    others = [
        once(source, tmp_path / "c", precision="bfloat16"),
        once(source, tmp_path / "d", classes=(1, 2)),
    ]
    assert len({one.folder, *(other.folder for other in others)}) == 3 and len(launched) == 3


def test_its_settings_are_a_configuration(source: Path) -> None:
    config = load_config(CONFIG, (*split_cifar.SETTINGS, f"data.path={source}"))
    assert (config.model.kwargs["depth"], config.train.epochs, config.freeze.policy) == (12, split_cifar.EPOCHS, "none")


def test_what_is_damaged_is_named(source: Path, tmp_path: Path, launched: list[Sequence[str]]) -> None:
    one = once(source, tmp_path / "a")
    weights = one.folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(UserError, match="^PIPETRANSFORMER_CACHE: .* is damaged; delete it"):
        once(source, tmp_path / "b")


def test_a_training_that_fails_leaves_nothing(
    source: Path, tmp_path: Path, launched: list[Sequence[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch(arguments: Sequence[str], *, ranks: int, name: str) -> str:
        raise UserError(f"{name} failed: ...")

    monkeypatch.setattr(split_cifar, "launch", launch)
    with pytest.raises(UserError, match="^the pre-training of --cifar100 failed"):
        once(source, tmp_path / "a")
    assert list((tmp_path / "cache").iterdir()) == []
