"""Datasets: what a row is depends on its sample alone; what is wrong with a file is told in one line."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from pipetransformer import data
from pipetransformer.data import (
    Dataset,
    ImagePreprocessing,
    describe,
    epoch_batches,
    loader,
    replica_share,
)
from pipetransformer.data.cifar import CIFAR100_NAMES
from pipetransformer.data.reader import PictureSplit
from pipetransformer.data.reading import drawn
from pipetransformer.errors import UserError

SHARED = Path(__file__).parents[2] / "shared"
COLOUR = ImagePreprocessing(size=32, channels=3, mean=(0.5,) * 3, std=(0.25,) * 3, interpolation="bicubic")
GREY = ImagePreprocessing(size=8, channels=1, mean=(0.5,), std=(0.5,), interpolation="bicubic")
HEADER = "sentence\tlabel\n"
WORDS = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "good", "bad", "film"]


def _settings(name: str, path: object = None, **changes: Any) -> Any:
    defaults: dict[str, Any] = dict(
        name=name, path=None if path is None else str(path), max_train_samples=None, max_eval_samples=None,
        max_length=16, stride=4, image_size=None, text_columns=("text",), label_column="label", augment="none",
        num_workers=0, splits={}, eval_fraction=None, kind=None,
    )  # fmt: skip
    return SimpleNamespace(**{**defaults, **changes})


def load_image_data(settings: Any, *, preprocessing: ImagePreprocessing, seed: int) -> dict[str, Dataset]:
    return data.load_image_data(settings, info=describe(settings), preprocessing=preprocessing, seed=seed)


def load_text_data(settings: Any, *, tokenizer: PreTrainedTokenizerFast) -> dict[str, Dataset]:
    return data.load_text_data(settings, info=describe(settings), tokenizer=tokenizer)


def _png(value: int, *, size: tuple[int, int] = (32, 32)) -> bytes:
    buffer = io.BytesIO()
    random = np.random.default_rng(value)
    Image.fromarray(random.integers(0, 256, (*size, 3), dtype=np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def _cifar(
    folder: Path, labels: list[Any], *, split: str = "train", pictures: list[Any] | None = None,
    names: list[str] | None = None, file: str | None = None,
) -> None:  # fmt: skip
    encoded = [_png(row) for row in range(len(labels))] if pictures is None else pictures
    table = pa.table(
        {
            "img": pa.array(
                [{"bytes": picture, "path": None} for picture in encoded],
                pa.struct([("bytes", pa.binary()), ("path", pa.string())]),
            ),
            "fine_label": pa.array(labels, pa.int64()),
        }
    )
    if names is not None:
        features = {"info": {"features": {"fine_label": {"names": names, "_type": "ClassLabel"}}}}
        table = table.replace_schema_metadata({"huggingface": json.dumps(features)})
    pq.write_table(table, folder / (file or f"{split}.parquet"))


def _sst2(folder: Path, train: str | bytes, dev: str = HEADER + "good\t1\n") -> None:
    (folder / "train.tsv").write_bytes(train if isinstance(train, bytes) else train.encode())
    (folder / "dev.tsv").write_text(dev)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()
    words.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)])
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        model_max_length=64,
    )  # fmt: skip


def _real(path: str) -> Path:
    if not (SHARED / path).exists():
        pytest.skip(f"the real file {path} is not beside the repository")
    return SHARED / path


# Digits


def test_digits_are_split_in_two_without_a_gap() -> None:
    train, evaluation = load_image_data(_settings("digits"), preprocessing=GREY, seed=0).values()
    assert (len(train), len(evaluation)) == (1437, 360)
    assert describe(_settings("digits")).label_names == tuple("0123456789")
    counts = torch.bincount(torch.cat([train.labels, evaluation.labels]))
    assert counts.tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    rows = torch.cat([_pixels(split, np.arange(len(split))) for split in (train, evaluation)])
    assert (rows.min(), rows.max()) == (-1.0, 1.0)


def test_digits_take_the_models_channels_and_size() -> None:
    _, evaluation = load_image_data(_settings("digits", max_eval_samples=3), preprocessing=COLOUR, seed=0).values()
    pixels = _pixels(evaluation, np.arange(3))
    assert pixels.shape == (3, 3, 32, 32) and pixels.dtype == torch.float32
    assert torch.equal(pixels[:, 0], pixels[:, 2])


# Pictures


def _pixels(dataset: Dataset, ids: np.ndarray, *, epoch: int = 0) -> torch.Tensor:
    return dataset.inputs(ids, length=int(dataset.lengths[0]), epoch=epoch)["pixel_values"]


def test_pictures_are_scaled_and_normalised(tmp_path: Path) -> None:
    for split in ("train", "test"):
        _cifar(tmp_path, [7, 3], split=split)
    train, _ = load_image_data(_settings("cifar100", tmp_path), preprocessing=COLOUR, seed=0).values()
    raw = np.asarray(Image.open(io.BytesIO(_png(1)))).transpose(2, 0, 1) / 255
    torch.testing.assert_close(_pixels(train, np.array([1]))[0], torch.from_numpy((raw - 0.5) / 0.25).float())
    assert train.labels.tolist() == [7, 3] and train.num_tokens is None and set(train.lengths) == {32}


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
@pytest.mark.parametrize("size", [20, 48])
def test_resizing_is_pillows(tmp_path: Path, size: int, interpolation: str) -> None:
    for split in ("train", "test"):
        _cifar(tmp_path, [0], split=split)
    preprocessing = ImagePreprocessing(size, 3, mean=(0.0,) * 3, std=(1.0,) * 3, interpolation=interpolation)
    train, _ = load_image_data(_settings("cifar100", tmp_path), preprocessing=preprocessing, seed=0).values()
    expected = Image.open(io.BytesIO(_png(0))).resize((size, size), getattr(Image.Resampling, interpolation.upper()))
    difference = _pixels(train, np.array([0]))[0] - torch.from_numpy(np.asarray(expected) / 255).permute(2, 0, 1)
    assert difference.abs().max() < 2.5 / 255


@pytest.mark.parametrize("size", [32, 48])
def test_augmentation_depends_on_seed_epoch_and_sample_alone(size: int) -> None:
    preprocessing = ImagePreprocessing(size, 1, mean=(0.5,), std=(0.5,), interpolation="bilinear")

    def load(seed: int) -> Dataset:
        settings = _settings("digits", augment="basic", max_train_samples=64)
        return load_image_data(settings, preprocessing=preprocessing, seed=seed)["train"]

    train = load(seed=3)
    together = _pixels(train, np.arange(64), epoch=5)
    random = np.random.default_rng(0)
    for batch_size in (1, 5, 32):
        ids = random.choice(64, batch_size, replace=False)
        assert torch.equal(_pixels(train, ids, epoch=5), together[ids])
    assert not torch.equal(_pixels(train, np.arange(64), epoch=6), together)
    assert not torch.equal(_pixels(load(seed=4), np.arange(64), epoch=5), together)
    assert train.views is None


def test_augmentation_shifts_by_an_eighth_and_mirrors(tmp_path: Path) -> None:
    for split in ("train", "test"):
        _cifar(tmp_path, [0] * 40, split=split, pictures=[_png(0)] * 40)
    settings = _settings("cifar100", tmp_path, augment="basic")
    preprocessing = ImagePreprocessing(32, 3, mean=(0.0,) * 3, std=(1.0,) * 3, interpolation="bicubic")
    train, evaluation = load_image_data(settings, preprocessing=preprocessing, seed=0).values()
    original = _pixels(evaluation, np.array([0]))[0]
    padded = torch.nn.functional.pad(original, (4, 4, 4, 4))
    crops = [padded[:, row : row + 32, column : column + 32] for row in range(9) for column in range(9)]
    possible = torch.stack(crops + [crop.flip(-1) for crop in crops])
    found = [(possible == row).flatten(1).all(1).nonzero().flatten().tolist() for row in _pixels(train, np.arange(40))]
    assert all(len(matches) == 1 for matches in found)
    assert len({match for matches in found for match in matches}) > 20
    assert {matches[0] >= 81 for matches in found} == {True, False}
    assert evaluation.views == 1


def test_image_fingerprint_follows_contents_and_preprocessing() -> None:
    def fingerprint(count: int = 5, preprocessing: ImagePreprocessing = GREY, **changes: Any) -> str:
        settings = _settings("digits", max_train_samples=count, **changes)
        return load_image_data(settings, preprocessing=preprocessing, seed=0)["train"].fingerprint

    other_mean = ImagePreprocessing(8, 1, mean=(0.4,), std=(0.5,), interpolation="bicubic")
    prints = [fingerprint(), fingerprint(6), fingerprint(augment="basic"), fingerprint(preprocessing=other_mean)]
    assert len(set(prints)) == 4 and prints[0] == fingerprint()


def test_timm_preprocessing() -> None:
    config = {"input_size": (3, 224, 224), "mean": (0.1, 0.2, 0.6), "std": (0.5,) * 3, "interpolation": "bicubic"}
    assert ImagePreprocessing.from_timm(config, size=32).mean == (0.1, 0.2, 0.6)
    grey = ImagePreprocessing.from_timm({**config, "input_size": (1, 224, 224)}, size=32)
    assert (grey.channels, grey.size, grey.mean, grey.std) == (1, 32, (pytest.approx(0.3),), (0.5,))


# Draws


def test_a_draw_is_a_fixed_fair_part_of_the_file() -> None:
    blocks = np.repeat(np.arange(10), 1000)  # a file that is sorted by class
    rows = drawn(10_000, max_samples=200)
    assert len(set(rows)) == 200 and (np.diff(rows) > 0).all()
    assert np.bincount(blocks[rows], minlength=10).min() >= 10  # of 20 that are expected
    assert rows.tolist() == drawn(10_000, max_samples=200).tolist()
    assert set(rows) < set(drawn(10_000, max_samples=300))
    assert drawn(1000, max_samples=5).tolist() == [298, 553, 672, 859, 993]  # of another version too
    for most in (7, 8, None):
        assert drawn(7, max_samples=most).tolist() == list(range(7))


# CIFAR-100 files


def test_cifar_draws_from_several_files(tmp_path: Path) -> None:
    _cifar(tmp_path, [1, 2], file="train-00000-of-00002.parquet", names=["a", "b", "c", "d"])
    _cifar(tmp_path, [3, 0, 2], file="train-00001-of-00002.parquet")
    _cifar(tmp_path, [0], split="test")
    labels = np.array([1, 2, 3, 0, 2])
    for count in range(1, 6):
        settings = _settings("cifar100", tmp_path, max_train_samples=count)
        train, _ = load_image_data(settings, preprocessing=GREY, seed=0).values()
        assert train.labels.tolist() == labels[drawn(5, max_samples=count)].tolist()
    assert describe(settings).label_names == ("a", "b", "c", "d")


def test_cifar_rows_that_are_not_drawn_are_not_decoded(tmp_path: Path) -> None:
    (wanted,) = drawn(2, max_samples=1)
    for split in ("train", "test"):
        pictures = [b"broken", b"broken"]
        pictures[wanted] = _png(0)
        _cifar(tmp_path, [0, 1], split=split, pictures=pictures)
    settings = _settings("cifar100", tmp_path, max_train_samples=1, max_eval_samples=1)
    assert [len(split) for split in load_image_data(settings, preprocessing=COLOUR, seed=0).values()] == [1, 1]


def test_real_cifar() -> None:
    settings = _settings("cifar100", _real("data/cifar100"), max_train_samples=300, max_eval_samples=200)
    train, evaluation = load_image_data(settings, preprocessing=COLOUR, seed=0).values()
    info = describe(settings)
    assert (len(train), len(evaluation)) == (300, 200)
    assert info.label_names == CIFAR100_NAMES and info.channels == 3
    assert len(train.labels.unique()) > 80


def _no_file(folder: Path) -> None:
    (folder / "other.parquet").touch()


def _not_parquet(folder: Path) -> None:
    (folder / "train.parquet").write_text("no parquet at all")


def _no_column(folder: Path) -> None:
    pq.write_table(pa.table({"image": [1], "fine_label": [1]}), folder / "train.parquet")


def _text_label(folder: Path) -> None:
    _cifar(folder, [0])
    table = pq.read_table(folder / "train.parquet").set_column(1, "fine_label", pa.array(["cat"]))
    pq.write_table(table, folder / "train.parquet")


def _number_picture(folder: Path) -> None:
    pq.write_table(pa.table({"img": [1], "fine_label": [1]}), folder / "train.parquet")


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (_no_file, r"data.path: .* holds neither train.parquet nor train-\*.parquet"),
        (_not_parquet, r"train.parquet: not a readable parquet file"),
        (_no_column, r"train.parquet: no column img; there are image, fine_label"),
        (_text_label, r"train.parquet: column fine_label is string; whole numbers are needed"),
        (_number_picture, r"train.parquet: column img is int64; a struct"),
        (lambda folder: _cifar(folder, []), r"train\): holds no samples"),
        (lambda folder: _cifar(folder, [0, 100]), r"train.parquet: row 1: label 100 is not allowed; give 0 to 99"),
        (lambda folder: _cifar(folder, [0, -1]), r"train.parquet: row 1: label -1 is not allowed; give 0 to 99"),
        (lambda folder: _cifar(folder, [None]), r"train.parquet: row 0: label None is not allowed; give 0 to 99"),
        (lambda folder: _cifar(folder, [0, 1], pictures=[_png(0), b"x"]), r"row 1: the picture cannot be decoded"),
        (lambda folder: _cifar(folder, [0], pictures=[_png(0)[:-900]]), r"row 0: the picture cannot be decoded"),
        (lambda folder: _cifar(folder, [0], pictures=[None]), r"row 0: there is no picture"),
        (
            lambda folder: _cifar(folder, [0, 1], pictures=[_png(0), _png(1, size=(16, 24))]),
            r"row 1: the picture is 24 x 16, not 32 x 32",
        ),
        (lambda folder: _cifar(folder, [0]), r"holds neither test.parquet nor"),
    ],
)
def test_bad_picture_files(tmp_path: Path, write: Callable[[Path], None], message: str) -> None:
    write(tmp_path)
    _refused(message, lambda: load_image_data(_settings("cifar100", tmp_path), preprocessing=COLOUR, seed=0))


# Texts


def test_texts_are_tokenized_truncated_and_padded(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    _sst2(tmp_path, HEADER + "good film\t1\n" + "bad " * 30 + "\t0\r\nunseen\t0")
    train, evaluation = load_text_data(_settings("sst2", tmp_path), tokenizer=tokenizer).values()
    assert train.labels.tolist() == [1, 0, 0] and len(evaluation) == 1
    assert train.num_tokens.tolist() == [4, 16, 3] and train.lengths.tolist() == [4, 16, 4]
    rows = train.inputs(np.array([2, 0]), length=8, epoch=0)
    assert rows["input_ids"].tolist() == [[1, 3, 2, 0, 0, 0, 0, 0], [1, 4, 6, 2, 0, 0, 0, 0]]
    assert rows["attention_mask"].tolist() == [[1, 1, 1, 0, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0, 0, 0]]
    assert rows["token_type_ids"].tolist() == [[0] * 8] * 2
    assert {tensor.dtype for tensor in rows.values()} == {torch.int64}
    assert train.inputs(np.array([1]), length=16, epoch=0)["input_ids"].tolist() == [[1] + [5] * 14 + [2]]
    assert describe(_settings("sst2", tmp_path)).label_names == ("negative", "positive")


def test_text_columns_are_found_by_name_and_rows_limited(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    _sst2(tmp_path, "id\tlabel\tsentence\n7\t1\tgood\n8\t0\tbad\n9\t0\tgood film")
    settings = _settings("sst2", tmp_path, max_train_samples=2)
    train, _ = load_text_data(settings, tokenizer=tokenizer).values()
    rows = drawn(3, max_samples=2)
    assert train.labels.tolist() == np.array([1, 0, 0])[rows].tolist()
    assert train.num_tokens.tolist() == np.array([3, 3, 4])[rows].tolist()


def test_text_fingerprint_follows_contents_and_padding(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    def fingerprint(text: str, max_length: int = 16) -> str:
        _sst2(tmp_path, HEADER + text)
        settings = _settings("sst2", tmp_path, max_length=max_length)
        return load_text_data(settings, tokenizer=tokenizer)["train"].fingerprint

    prints = [fingerprint("good\t1\nbad\t1"), fingerprint("good\t1\nfilm\t1"), fingerprint("good\t1\nbad\t1", 4)]
    assert len(set(prints)) == 3 and prints[0] == fingerprint("good\t1\nbad\t1")


def test_real_sst2() -> None:
    from transformers import AutoTokenizer

    real_tokenizer = AutoTokenizer.from_pretrained(_real("models/minilm-l6"))
    settings = _settings("sst2", _real("data/glue/SST-2"), max_train_samples=500, max_length=128)
    train, evaluation = load_text_data(settings, tokenizer=real_tokenizer).values()
    assert (len(train), len(evaluation)) == (500, 872)
    for dataset in (train, evaluation):
        batches = epoch_batches(dataset.lengths, batch_size=32, seed=0, epoch=0, shuffle=False)
        masks = [
            dataset.inputs(share.ids[: share.num_real], length=batch.length, epoch=0)["attention_mask"]
            for batch in batches
            for share in [replica_share(batch, dp=2, replica=replica, num_microbatches=4) for replica in range(2)]
        ]
        assert sum(int(mask.sum()) for mask in masks) == dataset.num_tokens.sum()


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ("", r"train.tsv:1: no column sentence, label; there are"),
        ("text\tlabel\n", r"train.tsv:1: no column sentence; there are text, label"),
        (HEADER, r"train.tsv: holds no samples"),
        (HEADER + "good\t1\nbad\n", r"train.tsv:3: 1 columns between tabs; the header has 2"),
        (HEADER + "good\t1\t2\n", r"train.tsv:2: 3 columns between tabs; the header has 2"),
        (HEADER + "good\t1\nbad\t2\n", r"train.tsv:3: label '2' is not allowed; give 0 or 1"),
        (HEADER + "good\tyes\n", r"train.tsv:2: label 'yes' is not allowed; give 0 or 1"),
        (HEADER.encode() + b"\xff\t1\n", r"train.tsv:2: not UTF-8 text"),
    ],
)
def test_bad_text_files(tmp_path: Path, tokenizer: PreTrainedTokenizerFast, train: str | bytes, message: str) -> None:
    _sst2(tmp_path, train)
    _refused(message, lambda: load_text_data(_settings("sst2", tmp_path), tokenizer=tokenizer))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(max_length=2), r"data.max_length: 2 is not allowed; .* at least 3"),
        (dict(max_length=65), r"data.max_length: 65 is not allowed; .* at most 64"),
        (dict(path="./nowhere"), r"data.path: there is no folder ./nowhere"),
        (dict(path=__file__), r"is a file; give the folder"),
        (dict(path=str(Path(__file__).parent)), r"data.path: .* holds no train.tsv"),
    ],
)
def test_bad_text_settings(tokenizer: PreTrainedTokenizerFast, changes: dict[str, Any], message: str) -> None:
    settings = _settings(**{"name": "sst2", **changes})
    _refused(message, lambda: load_text_data(settings, tokenizer=tokenizer))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(name="digits", path="digits"), r"data.path: digits is not allowed"),
        (dict(name="cifar100", path="../nowhere"), r"data.path: there is no folder ../nowhere"),
    ],
)
def test_bad_picture_settings(changes: dict[str, Any], message: str) -> None:
    _refused(message, lambda: load_image_data(_settings(**changes), preprocessing=COLOUR, seed=0))


# The hub


def _hub(monkeypatch: pytest.MonkeyPatch, columns: dict[str, Any] | Exception) -> list[tuple[Any, ...]]:
    """Stand in for the hub: answers every request with these columns, or fails; returns the requests."""
    requests = []

    def load(hub_id: str, config_name: str | None, *, split: str) -> datasets.Dataset:
        requests.append((hub_id, config_name, split))
        if isinstance(columns, Exception):
            raise columns
        return datasets.Dataset.from_dict(columns)

    monkeypatch.setattr(datasets, "load_dataset", load)
    return requests


def test_texts_from_the_hub(monkeypatch: pytest.MonkeyPatch, tokenizer: PreTrainedTokenizerFast) -> None:
    requests = _hub(monkeypatch, {"idx": [0, 1], "sentence": ["good", "bad film"], "label": [1, 0]})
    settings = _settings("sst2", max_eval_samples=1)
    train, evaluation = load_text_data(settings, tokenizer=tokenizer).values()
    (row,) = drawn(2, max_samples=1)
    assert (train.num_tokens.tolist(), evaluation.labels.tolist()) == ([3, 4], [[1, 0][row]])
    assert requests == [("nyu-mll/glue", "sst2", "train"), ("nyu-mll/glue", "sst2", "validation")]


def test_pictures_from_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    pictures = datasets.Dataset.from_dict(
        {"img": [{"bytes": _png(0), "path": None}] * 3, "fine_label": [5, 6, 7], "coarse_label": [0, 0, 0]},
        features=datasets.Features(
            img=datasets.Image(), fine_label=datasets.Value("int64"), coarse_label=datasets.Value("int64")
        ),
    )
    monkeypatch.setattr(datasets, "load_dataset", lambda hub_id, config_name, *, split: pictures)
    settings = _settings("cifar100", "owner/pictures", max_train_samples=2)
    train, evaluation = load_image_data(settings, preprocessing=COLOUR, seed=0).values()
    assert train.labels.tolist() == np.array([5, 6, 7])[drawn(3, max_samples=2)].tolist()
    assert evaluation.labels.tolist() == [5, 6, 7]


def test_a_reader_that_reads_more_than_is_drawn_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PictureSplit, "rows", lambda wanted, number: np.arange(number))
    message = "data.name: the reader of digits gave 1437 pictures of train where 20 are wanted; read PictureSplit.rows"
    _refused(message, lambda: load_image_data(_settings("digits", max_train_samples=20), preprocessing=GREY, seed=0))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            ConnectionError("no route\nto host"),
            r"data.path: nyu-mll/glue .* \(ConnectionError: no route\); give data.path a local folder",
        ),
        ({"text": ["a"], "label": [0]}, r"nyu-mll/glue \(train\): no column sentence; there are text, label"),
        ({"sentence": [1.5], "label": [0]}, r"column sentence is double; texts are needed"),
        ({"sentence": ["a", None], "label": [0, 1]}, r"row 1: there is no text in column sentence"),
        ({"sentence": ["a", "b"], "label": [0, -1]}, r"row 1: label -1 is not allowed; give 0 to 1"),
        (dict.fromkeys(["sentence", "label"], []), r"nyu-mll/glue \(train\): holds no samples"),
    ],
)
def test_bad_hub_data(
    monkeypatch: pytest.MonkeyPatch, tokenizer: PreTrainedTokenizerFast, columns: Any, message: str
) -> None:
    _hub(monkeypatch, columns)
    _refused(message, lambda: load_text_data(_settings("sst2"), tokenizer=tokenizer))


def _refused(message: str, load: Callable[[], object]) -> None:
    with pytest.raises(UserError, match=message) as caught:
        load()
    assert "\n" not in str(caught.value)


# The loader


def _ids_and_pixels(dataset: Dataset, ids: tuple[int, ...]) -> tuple[np.ndarray, torch.Tensor]:
    return np.array(ids), _pixels(dataset, np.array(ids))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loader_keeps_order_and_ends_its_workers(num_workers: int) -> None:
    dataset, _ = load_image_data(_settings("digits", max_train_samples=20), preprocessing=GREY, seed=0).values()
    items = [(0, 1), (7,), (3, 2, 1), (9,)]
    fetched = list(loader(dataset, items=items, fetch=_ids_and_pixels, num_workers=num_workers))
    assert [tuple(ids) for ids, _ in fetched] == items and isinstance(fetched[0][0], np.ndarray)
    assert all(torch.equal(pixels, _pixels(dataset, ids)) for ids, pixels in fetched)
    before = len(psutil.Process().children())
    started = loader(dataset, items=items * 10, fetch=_ids_and_pixels, num_workers=num_workers)
    next(started)
    assert len(psutil.Process().children()) == before + num_workers
    del started
    assert len(psutil.Process().children()) == before


@pytest.mark.parametrize("num_workers", [0, 1])
def test_loader_leaves_the_global_random_stream_alone(num_workers: int) -> None:
    dataset, _ = load_image_data(_settings("digits", max_train_samples=2), preprocessing=GREY, seed=0).values()
    state = torch.get_rng_state()
    list(loader(dataset, items=[(0, 1)], fetch=_ids_and_pixels, num_workers=num_workers))
    assert torch.equal(torch.get_rng_state(), state)
