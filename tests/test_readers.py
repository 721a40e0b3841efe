"""Readers of GLUE, tables, archives and folders: what is read, what is kept for the next run, what is refused."""

from __future__ import annotations

import json
import os
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from tiny import tiny_tokenizer

from pipetransformer.config import DataConfig
from pipetransformer.data import Dataset, ImagePreprocessing, describe, load_image_data, load_text_data
from pipetransformer.data.glue import GLUE
from pipetransformer.data.metrics import METRICS
from pipetransformer.errors import UserError

GREY = ImagePreprocessing(size=8, channels=1, mean=(0.5,), std=(0.25,), interpolation="bicubic")
COLOUR = ImagePreprocessing(size=32, channels=3, mean=(0.5,) * 3, std=(0.25,) * 3, interpolation="bicubic")


def texts(name: str, folder: Path, **values: Any) -> dict[str, Dataset]:
    data = DataConfig(**{"name": name, "path": str(folder), "max_length": 32, **values})
    return load_text_data(data, info=describe(data), tokenizer=tiny_tokenizer())


def pictures(
    name: str, folder: Path | None, preprocessing: ImagePreprocessing = COLOUR, **values: Any
) -> dict[str, Dataset]:
    data = DataConfig(**{"name": name, "path": folder and str(folder), **values})
    return load_image_data(data, info=describe(data), preprocessing=preprocessing, seed=0)


def refused(message: str, load: Callable[[], object]) -> None:
    with pytest.raises(UserError, match=message) as caught:
        load()
    assert "\n" not in str(caught.value)


# ---- GLUE ------------------------------------------------------------------------------------------------------------

# Header (None: the file has none), two rows, their labels, tokens of the first row, as the official files are.
OFFICIAL: dict[str, tuple[str | None, list[str], list[float], int]] = {
    "cola": (None, ["gj04\t1\t\tthe film is good", "gj04\t0\t*\tis film the"], [1, 0], 6),
    "mrpc": (
        "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String",
        ["1\t7\t8\tthe film\tthe plot", '0\t9\t3\t"the cast\tis dull'],
        *([1, 0], 7),
    ),
    "stsb": (
        "index\tgenre\tsource1\tsource2\tsentence1\tsentence2\tscore",
        ["0\tnews\tx\ty\tthe film\tthe plot\t4.250", "1\tnews\tx\ty\tthe cast\tis dull\t0.000"],
        *([4.25, 0.0], 7),
    ),
    "qqp": (
        "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate",
        ["0\t1\t2\tis the film\tthe plot\t1", "5\ttorn line", "1\t3\t4\tthe cast\tis dull\t0"],
        *([1, 0], 8),
    ),
    "mnli": (
        "index\tsentence1\tsentence2\tlabel1\tgold_label",
        ["0\tthe film\tthe plot\tneutral\tneutral", "1\tthe cast\tis dull\tneutral\tcontradiction"],
        *([1, 2], 7),
    ),
    "qnli": (
        "index\tquestion\tsentence\tlabel",
        ["0\tis the film\tthe plot\tentailment", "1\tthe cast\tis dull\tnot_entailment"],
        *([0, 1], 8),
    ),
    "rte": (
        "index\tsentence1\tsentence2\tlabel",
        ["0\tthe film\tthe plot\tnot_entailment", "1\tthe cast\tis dull\tentailment"],
        *([1, 0], 7),
    ),
    "wnli": ("index\tsentence1\tsentence2\tlabel", ["0\tthe film\tthe plot\t1", "1\tthe cast\tis dull\t0"], [1, 0], 7),
    "sst2": ("sentence\tlabel", ["the film is good\t1", "the film is dull\t0"], [1, 0], 6),
}


def write_glue(name: str, folder: Path, rows: list[str] | None = None) -> Path:
    header, known, _, _ = OFFICIAL[name]
    lines = [*([header] if header is not None else []), *(known if rows is None else rows)]
    for file, _ in GLUE[name].splits.values():
        (folder / file).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


@pytest.mark.parametrize("name", GLUE)
def test_every_task_of_glue_is_read_from_its_official_files(name: str, tmp_path: Path) -> None:
    _, _, labels, num_tokens = OFFICIAL[name]
    splits = texts(name, write_glue(name, tmp_path))
    assert list(splits) == ["train", "eval", *(["mismatched"] if name == "mnli" else [])]
    for dataset in splits.values():
        assert dataset.labels.tolist() == labels
        assert dataset.num_tokens is not None and dataset.num_tokens[0] == num_tokens
        assert dataset.kind == ("scores" if name == "stsb" else "classes")
    pair = len(GLUE[name].columns) == 2
    types = splits["train"].inputs(np.array([0]), length=16, epoch=0)["token_type_ids"][0]
    assert bool(types.any()) == pair


@pytest.mark.parametrize(
    ("name", "rows", "message"),
    [
        (
            "mnli",
            ["0\ta\tb\t-\t-"],
            r"train.tsv:2: label '-' is not allowed; give entailment, neutral or con",
        ),
        ("stsb", ["0\tn\tx\ty\ta\tb\tmuch"], r"train.tsv:2: score 'much' is not allowed; give a number"),
        ("rte", ["0\ta\tb"], r"train.tsv:2: 3 columns between tabs; the header has 4"),
        ("cola", ["gj04\t2\t\tthe film"], r"train.tsv:1: label '2' is not allowed; give 0 or 1"),
        ("qqp", ["torn"], r"train.tsv: holds no samples; at least 1 is needed"),
    ],
)
def test_bad_rows_of_glue(name: str, rows: list[str], message: str, tmp_path: Path) -> None:
    refused(message, lambda: texts(name, write_glue(name, tmp_path, rows)))


def test_metrics_against_hand_computed_values() -> None:
    classes, labels = (
        np.array([0, 1, 1, 0, 1]),
        np.array([0, 1, 0, 1, 1]),
    )  # true positives 2, false 1 and 1, negatives 1
    assert METRICS["accuracy"](classes, labels) == pytest.approx(3 / 5)
    assert METRICS["f1"](classes, labels) == pytest.approx(4 / 6)
    assert METRICS["matthews_correlation"](classes, labels) == pytest.approx((2 * 1 - 1) / 6)
    scores, true = np.array([1.0, 2.0, 4.0]), np.array([1.0, 3.0, 5.0])
    assert METRICS["spearman"](scores, true) == pytest.approx(1.0)
    assert METRICS["pearson"](scores, true) == pytest.approx(np.corrcoef(scores, true)[0, 1])
    assert METRICS["pearson"](np.ones(3), true) == 0.0


# ---- tables ----------------------------------------------------------------------------------------------------------

ROWS = [
    {"one": "the film, it is", "two": "the plot", "mood": "good"},
    {"one": "the cast", "two": "is dull", "mood": "bad"},
    {"one": "every joke", "two": "is weak", "mood": "so so"},
]
COLUMNS = {"text_columns": ["one", "two"], "label_column": "mood"}


def write_table(path: Path, rows: list[dict[str, Any]]) -> None:
    if path.suffix in (".csv", ".tsv"):
        mark = "\t" if path.suffix == ".tsv" else ","
        lines = [mark.join(rows[0]), *(mark.join(f'"{value}"' for value in row.values()) for row in rows)]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows), encoding="utf-8")
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)


@pytest.mark.parametrize("suffix", ["csv", "tsv", "jsonl", "json", "parquet"])
def test_a_table_of_any_format_is_read_by_its_columns(suffix: str, tmp_path: Path) -> None:
    write_table(tmp_path / f"train.{suffix}", ROWS)
    write_table(tmp_path / f"validation.{suffix}", ROWS[1:])
    splits = texts("table", tmp_path, **COLUMNS, max_train_samples=2)
    data = DataConfig(name="table", path=str(tmp_path), **COLUMNS)
    assert describe(data).label_names == ("bad", "good", "so so")
    assert [splits[name].labels.tolist() for name in ("train", "eval")] == [[0, 2], [0, 2]]
    assert splits["train"].inputs(np.array([0]), length=16, epoch=0)["token_type_ids"].any()


def test_numbers_are_classes_in_their_order(tmp_path: Path) -> None:
    for name in ("train", "dev"):
        write_table(tmp_path / f"{name}.jsonl", [{"text": "a", "label": label} for label in (10, 2, 0)])
    assert describe(DataConfig(name="table", path=str(tmp_path))).label_names == ("0", "2", "10")
    assert texts("table", tmp_path)["train"].labels.tolist() == [2, 1, 0]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"dev.csv": ROWS}, r"holds no train file; give one in csv, tsv, jsonl, json or parquet"),
        (
            {"train.csv": ROWS},
            r"holds no dev or validation or valid or val or eval file; give one, or data.eval_fraction=0.1",
        ),
        ({"train.csv": ROWS, "train.tsv": ROWS}, r"holds both train.csv and train.tsv; leave one"),
        ({"train.csv": [{"one": "a", "mood": "x"}]}, r"train.csv: no column two; there are one, mood"),
        ({"train.csv": ROWS, "dev.csv": [{**ROWS[0], "mood": "new"}]}, r"dev.csv: row 0: label 'new' is not in the"),
        ({"train.jsonl": [{**ROWS[0], "mood": 0.5}]}, r"column mood is double; names or whole numbers are needed"),
        ({"train.jsonl": [ROWS[0], {**ROWS[1], "mood": None}]}, r"row 1: there is no label in column mood"),
        ({"train.jsonl": [ROWS[0], {**ROWS[1], "two": None}], "dev.csv": ROWS}, r"row 1: there is no text in column"),
        ({"train.jsonl": [{**row, "one": 3} for row in ROWS], "dev.csv": ROWS}, r"column one is int64; texts are"),
        ({"train.csv": ROWS[:1]}, r"data.label_column: mood has one label alone; at least 2 are needed"),
        ({"train.csv": ROWS, "dev.csv": ROWS, "valid.csv": ROWS}, r"holds both dev.csv and valid.csv; leave one"),
    ],
)
def test_bad_tables(files: dict[str, list[dict[str, Any]]], message: str, tmp_path: Path) -> None:
    for name, rows in files.items():
        write_table(tmp_path / name, rows)
    refused(message, lambda: texts("table", tmp_path, **COLUMNS))


def test_odd_tables(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("one,two,mood,mood\na,b,x,y\n")
    refused(r"train.csv: two columns are called mood; rename one", lambda: texts("table", tmp_path, **COLUMNS))
    (tmp_path / "train.csv").write_text("one,two,mood\n")
    refused(r"train.csv: holds no samples; at least 1 is needed", lambda: texts("table", tmp_path, **COLUMNS))
    for name in ("train", "dev", "test"):  # a test split beside dev is left alone
        write_table(tmp_path / f"{name}.csv", [{"one": "a", "two": "b", "mood": mood} for mood in ("--5", "2\u00b2")])
    assert describe(DataConfig(name="table", path=str(tmp_path), **COLUMNS)).label_names == ("--5", "2\u00b2")
    assert len(texts("table", tmp_path, **COLUMNS)["eval"]) == 2


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "json", "parquet"])
def test_garbled_tables(suffix: str, tmp_path: Path) -> None:
    (tmp_path / f"train.{suffix}").write_bytes(b'{"one": \x00 \xff "two", "a\n1,2,3\n"')
    refused(
        rf"train.{suffix}: (cannot be read as {suffix}|is no UTF-8 text)", lambda: texts("table", tmp_path, **COLUMNS)
    )


def test_tables_that_are_too_deep_or_of_another_encoding(tmp_path: Path) -> None:
    (tmp_path / "train.json").write_text("[" * 100_000)
    refused(r"train.json: cannot be read as json", lambda: texts("table", tmp_path, **COLUMNS))
    (tmp_path / "train.json").unlink()
    write_table(tmp_path / "dev.csv", ROWS)
    for column in ("one", "mood"):
        table = pa.Table.from_pylist(ROWS)
        latin = pa.array([b"caf\xe9"] * len(ROWS), pa.binary()).view(pa.string())
        pq.write_table(table.set_column(table.column_names.index(column), column, latin), tmp_path / "train.parquet")
        told = rf"train.parquet: column {column} holds a text that is not UTF-8"
        refused(told, lambda: texts("table", tmp_path, **COLUMNS))


def test_texts_in_another_encoding_or_between_semicolons(tmp_path: Path) -> None:
    write_table(tmp_path / "dev.csv", ROWS)
    lines = "one,two,mood\nthe film,caf\xe9,good\n"
    for encoding, said in (
        (
            "latin-1",
            r"is no UTF-8 text: line 2 is not \(invalid continuation byte\); it may be Latin-1; save it as UTF-8",
        ),
        ("utf-16", r"is no UTF-8 text: it is UTF-16; save it as UTF-8"),
    ):
        (tmp_path / "train.csv").write_bytes(lines.encode(encoding))
        refused(rf"train.csv: {said}", lambda: texts("table", tmp_path, **COLUMNS))
    (tmp_path / "train.csv").write_text(lines.replace(",", ";"), encoding="utf-8")
    refused(
        r"train.csv: its columns are separated by semicolons \(one;two;mood\); save it with commas, or tabs",
        lambda: texts("table", tmp_path, **COLUMNS),
    )


def test_a_reader_tells_how_much_it_took(tmp_path: Path) -> None:
    """Of what, and of how many lines: a reader that glues lines together would show."""
    write_table(tmp_path / "train.csv", ROWS)
    write_table(tmp_path / "dev.parquet", ROWS)
    splits = texts("table", tmp_path, **COLUMNS, max_train_samples=2)
    assert [str(split.extent) for split in splits.values()] == ["2 of 3 (4 lines)", "3"]
    assert splits["train"].place.endswith("train.csv")
    qqp = tmp_path / "qqp"
    qqp.mkdir()
    assert str(texts("qqp", write_glue("qqp", qqp))["train"].extent) == "2 (4 lines, 1 left out)"
    assert str(pictures("digits", None, GREY, max_train_samples=9)["train"].extent) == "9 of 1,437"


def test_the_folder_above_a_task_of_glue(tmp_path: Path) -> None:
    (tmp_path / "RTE").mkdir()
    write_glue("rte", tmp_path / "RTE")
    refused(r"holds no train.tsv; give .*/RTE, if it is the task", lambda: texts("rte", tmp_path))
    (tmp_path / "RTE" / "train.tsv").unlink()
    refused(r"holds no train.tsv; give the folder that holds the task's files", lambda: texts("rte", tmp_path))


# ---- CIFAR's archives ------------------------------------------------------------------------------------------------


def write_archive(folder: Path, name: str, *, count: int = 3) -> dict[str, np.ndarray]:
    """The official layout; returns the pictures by file."""
    random = np.random.default_rng(0)
    root = folder / ("cifar-10-batches-py" if name == "cifar10" else "cifar-100-python")
    root.mkdir(parents=True)
    files = [*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"] if name == "cifar10" else ["train", "test"]
    written = {}
    for number, file in enumerate(files):
        data = random.integers(0, 256, (count, 3072), dtype=np.uint8)
        labels = [(number + row) % 10 for row in range(count)]
        key = b"labels" if name == "cifar10" else b"fine_labels"
        content = {b"data": data, key: labels, b"filenames": [b"x"] * count, b"batch_label": b"y"}
        (root / file).write_bytes(pickle.dumps(content, protocol=2))
        written[file] = data.reshape(-1, 3, 32, 32)
    return written


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_official_archives(name: str, packed: bool, tmp_path: Path) -> None:
    written = write_archive(tmp_path, name)
    root = next(tmp_path.iterdir())
    if packed:
        with tarfile.open(tmp_path / f"{name.replace('cifar', 'cifar-')}-python.tar.gz", "w:gz") as archive:
            archive.add(root, root.name)
        for path in root.iterdir():
            path.unlink()
        root.rmdir()
    splits = pictures(name, tmp_path)
    expected = np.concatenate([rows for file, rows in written.items() if not file.startswith("test")])
    assert len(splits["train"]) == len(expected) and len(splits["eval"]) == 3
    shown = splits["train"].inputs(np.arange(len(expected)), length=32, epoch=0)["pixel_values"].numpy()
    np.testing.assert_allclose(shown, (expected / 255 - 0.5) / 0.25, atol=1e-5)
    assert splits["train"].labels.tolist()[:3] == [0, 1, 2]
    assert len(pictures(name, tmp_path, max_train_samples=2)["train"]) == 2


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.putenv, ("PICKLE_WAS_RUN", "1")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            pickle.dumps(Evil()),
            r"data_batch_1: cannot be read \(UnpicklingError: it names posix.putenv, which no",
        ),
        (b"garbled", r"data_batch_1: cannot be read \(UnpicklingError"),
        (pickle.dumps([1]), r"data_batch_1: is not as CIFAR's archives are \(no dictionary\)"),
        (
            pickle.dumps({b"data": np.zeros((2, 5), np.uint8), b"labels": [0, 1]}),
            r"is not as CIFAR's archives are \(V",
        ),
        (
            pickle.dumps({b"data": np.zeros((1, 3072), np.uint8), b"labels": [10]}),
            r"a label is not allowed; give 0 to",
        ),
    ],
)
def test_bad_archives_are_refused_and_never_run(content: bytes, message: str, tmp_path: Path) -> None:
    write_archive(tmp_path, "cifar10")
    (tmp_path / "cifar-10-batches-py" / "data_batch_1").write_bytes(content)
    refused(message, lambda: pictures("cifar10", tmp_path))


def test_archives_without_pictures(tmp_path: Path) -> None:
    write_archive(tmp_path, "cifar10")
    nothing = pickle.dumps({b"data": np.zeros((0, 3072), np.uint8), b"labels": []})
    for path in (tmp_path / "cifar-10-batches-py").glob("data_batch_*"):
        path.write_bytes(nothing)
    refused(r"cifar-10-batches-py \(train\): holds no samples", lambda: pictures("cifar10", tmp_path))


# ---- folders of pictures ---------------------------------------------------------------------------------------------


def write_folder(folder: Path) -> Path:
    for split, count in (("train", 4), ("val", 2)):
        for number, name in enumerate(("cat", "dog")):
            (folder / split / name).mkdir(parents=True)
            for picture in range(count):
                colour = (50 * number, 40 * picture, 100)
                Image.new("RGB", (40 + 10 * picture, 64), colour).save(folder / split / name / f"{picture}.png")
    return folder


def test_a_folder_of_pictures(tmp_path: Path) -> None:
    splits = pictures("image_folder", write_folder(tmp_path))
    assert describe(DataConfig(name="image_folder", path=str(tmp_path))).label_names == ("cat", "dog")
    train = splits["train"]
    assert sorted(train.labels.tolist()) == [0] * 4 + [1] * 4 and len(splits["eval"]) == 4
    shown = train.inputs(np.arange(8), length=32, epoch=0)["pixel_values"]
    assert shown.shape == (8, 3, 32, 32)
    red = ((shown[:, 0, 16, 16] * 0.25 + 0.5) * 255).round().int()
    assert red.tolist() == [50 * label for label in train.labels.tolist()]


def test_bad_folders_of_pictures(tmp_path: Path) -> None:
    refused(r"data.path: missing; give the folder that holds", lambda: pictures("image_folder", tmp_path, path=None))
    refused(r"holds no folder train", lambda: pictures("image_folder", tmp_path))
    write_folder(tmp_path)
    (tmp_path / "val" / "bird").mkdir()
    refused(r"bird: is no class of the training split", lambda: pictures("image_folder", tmp_path))
    (tmp_path / "val" / "bird").rmdir()
    for hidden in ("train", "val"):
        (tmp_path / hidden / ".ipynb_checkpoints").mkdir()
    assert describe(DataConfig(name="image_folder", path=str(tmp_path))).label_names == ("cat", "dog")
    (tmp_path / "train" / "emu").mkdir()
    refused(r"emu: holds no pictures; give the class some, or leave", lambda: pictures("image_folder", tmp_path))
    (tmp_path / "train" / "emu").rmdir()
    (tmp_path / "train" / "cat" / "0.png").write_bytes(b"no picture")
    refused(r"cat/0.png: the picture cannot be decoded", lambda: pictures("image_folder", tmp_path))
    Image.new("L", (6000, 1)).save(tmp_path / "train" / "cat" / "0.png")
    refused(r"cat/0.png: 6000 x 1 pixels are too long a strip", lambda: pictures("image_folder", tmp_path))
    (tmp_path / "train" / "cat" / "0.png").unlink()
    (tmp_path / "train" / "cat" / "0.png").symlink_to(tmp_path / "gone")
    refused(r"cat/0.png: is no file; delete it", lambda: pictures("image_folder", tmp_path))
    (tmp_path / "train" / "cat" / "0.png").unlink()
    os.mkfifo(tmp_path / "train" / "cat" / "0.png")
    refused(r"cat/0.png: is no file; delete it", lambda: pictures("image_folder", tmp_path))


# ---- what is kept for the next run -----------------------------------------------------------------------------------


def test_texts_are_tokenized_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPETRANSFORMER_CACHE", str(tmp_path / "kept"))
    write_glue("sst2", tmp_path)
    first = texts("sst2", tmp_path)
    with monkeypatch.context() as broken:
        broken.setattr("pipetransformer.data.text._tokenized", None)
        second = texts("sst2", tmp_path)
        assert first["train"].fingerprint == second["train"].fingerprint
        assert isinstance(second["train"]._token_ids, np.memmap)
        with pytest.raises(TypeError):
            texts("sst2", tmp_path, max_length=16)
    write_glue("sst2", tmp_path, ["the film is weak\t0"])
    assert len(texts("sst2", tmp_path)["train"]) == 1
    assert not list((tmp_path / "kept").glob("*.part"))


def test_a_cache_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPETRANSFORMER_CACHE", "/dev/null/kept")
    write_glue("sst2", tmp_path)
    refused(r"^PIPETRANSFORMER_CACHE: /dev/null/kept cannot be written", lambda: texts("sst2", tmp_path))
