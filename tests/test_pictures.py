"""Pictures: transformed and mixed alike wherever they are, and decoded when they are needed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image
from test_extras import run_of, train_config
from test_readers import pictures, write_folder

from pipetransformer.config import DataConfig
from pipetransformer.data import Batch, ImagePreprocessing, Mixing, describe, load_image_data
from pipetransformer.data.reading import decoded
from pipetransformer.errors import UserError

PLAIN = ImagePreprocessing(size=16, channels=3, mean=(0.5,) * 3, std=(0.5,) * 3, interpolation="bilinear")


def test_a_batch_is_mixed_alike_however_it_is_cut() -> None:
    """Each row with its partner of the whole batch, by one share; targets too where there is no picture."""
    mixing = Mixing(train_config(mixup=0.8, label_smoothing=0.1, seed=3), num_classes=4)
    batch = Batch(5, (np.array([7, 1, 4]), np.array([2, 9])), 8)
    partners = mixing.partners(batch.ids, batch, epoch=2)
    assert sorted(partners) == sorted(batch.ids)
    assert list(mixing.partners(np.array([9, 4, 9]), batch, epoch=2)) == [partners[4], partners[2], partners[4]]
    pictures, labels = torch.rand(10, 3, 8, 8), torch.arange(10) % 4

    def mixed(rows: slice, *, hidden: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        ids, others = torch.from_numpy(batch.ids[rows]), torch.from_numpy(partners[rows])
        given = (torch.empty(len(ids), 1, 8, 8, device="meta"),) * 2 if hidden else (pictures[ids], pictures[others])
        return mixing.mixed(given, (labels[ids], labels[others]), epoch=2, index=5)

    before = np.random.get_state()[1].copy()  # type: ignore[union-attr]
    whole, targets = mixed(slice(5))
    parts = [mixed(slice(0, 2)), mixed(slice(2, 5))]
    assert torch.equal(torch.cat([part for part, _ in parts]), whole)
    assert torch.equal(torch.cat([target for _, target in parts]), targets)
    assert torch.equal(mixed(slice(5), hidden=True)[1], targets)
    assert (np.random.get_state()[1] == before).all()  # type: ignore[union-attr]
    assert targets.sum(1).tolist() == pytest.approx([1.0] * 5) and targets.min() == pytest.approx(0.025)
    share = (whole[0] - pictures[partners[0]]) / (pictures[batch.ids[0]] - pictures[partners[0]])
    assert share.std() < 1e-4 or batch.ids[0] == partners[0]
    with pytest.raises(UserError, match="train.mixup: the model does not say"):
        Mixing(train_config(mixup=0.8), num_classes=0)


@pytest.mark.parametrize("channels", [1, 3])
def test_timms_transforms_depend_on_seed_view_and_sample_alone(channels: int) -> None:
    settings = {"augment": "timm", "rand_augment": "rand-m9-mstd0.5-inc1", "erasing": 0.5, "max_train_samples": 12}
    data = DataConfig.model_validate({"name": "digits", **settings})
    used = replace(PLAIN, channels=channels, mean=(0.5,) * channels, std=(0.5,) * channels)

    def pictures(seed: int) -> torch.Tensor:
        train = load_image_data(data, info=describe(data), preprocessing=used, seed=seed)["train"]
        before = torch.get_rng_state()
        first, second = (train.inputs(np.arange(12), length=16, epoch=epoch)["pixel_values"] for epoch in (0, 1))
        assert first.shape == (12, channels, 16, 16) and not torch.equal(first, second)
        alone = train.inputs(np.array([7, 3]), length=16, epoch=1)["pixel_values"]
        assert torch.equal(alone, second[[7, 3]]) and torch.equal(torch.get_rng_state(), before)
        assert train.views is None
        noise = Image.fromarray(np.random.default_rng(0).integers(255, size=(16, 16, 3), dtype=np.uint8))
        with mock.patch.object(train, "_pictures", mock.Mock(one=lambda number: noise)):
            alike = train.inputs(np.arange(12), length=16, epoch=0)["pixel_values"]
        assert len({picture.numpy().tobytes() for picture in alike}) > 6, "each sample has draws of its own"
        return second

    assert torch.equal(pictures(1), pictures(1)) and not torch.equal(pictures(1), pictures(2))


def test_shards_of_a_stream_are_told(tmp_path: Path) -> None:
    (tmp_path / "train-0000.tar").touch()
    with pytest.raises(UserError, match="shards of WebDataset are not read, as a stream has no order to resume by"):
        pictures("image_folder", tmp_path)


def test_folders_of_other_pictures_are_other_data(tmp_path: Path) -> None:
    """Of the same names and sizes: what is cached, or resumed, of one is not of the other."""
    prints = []
    for shade in (10, 200):
        folder = tmp_path / str(shade)
        for split, name in (("train", "a"), ("train", "b"), ("val", "a")):
            (folder / split / name).mkdir(parents=True)
            Image.new("RGB", (32, 32), (shade, 0, 0)).save(folder / split / name / "0.bmp")
        prints.append({split: data.fingerprint for split, data in pictures("image_folder", folder).items()})
    assert prints[0]["train"] != prints[1]["train"] and prints[0]["eval"] != prints[1]["eval"]


def test_pictures_are_decoded_when_they_are_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPETRANSFORMER_CACHE", str(tmp_path / "kept"))
    train = pictures("image_folder", write_folder(tmp_path / "data"))["train"]
    assert sum(path.stat().st_size for path in (tmp_path / "kept").rglob("*.npy")) < 2000, "names, no pictures"
    with mock.patch("pipetransformer.data.pictures.decoded", side_effect=decoded) as seen:
        train.inputs(np.array([5, 2]), length=32, epoch=0)
    assert [call.args[0].name for call in seen.call_args_list] == ["1.png", "2.png"]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_torn_picture_is_named_whoever_decodes_it(workers: int, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "data")
    torn = folder / "train" / "dog" / "2.png"
    torn.write_bytes(torn.read_bytes()[:60])
    few = ("model.name=vit_tiny_patch16_224", "model.pretrained=false", "data.image_size=32")
    tiny = "model.kwargs={depth: 2, embed_dim: 16, num_heads: 2}"
    own = (f"data.path={folder}", f"data.num_workers={workers}", *few, tiny, "freeze.policy=none", "train.batch_size=4")
    _, cause = run_of(tmp_path, "image_folder", *own)
    assert f"{torn}: the picture cannot be decoded" in cause and "Traceback" not in cause
