"""Data of a user's own: one file or a folder, with or without a split, and the recipes that are shipped for them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from PIL import Image
from test_readers import COLOUR, pictures, refused, texts, write_glue
from tiny import tiny_bert

from benchmarks.soak.forked import ForkedJob, running
from pipetransformer.config import DataConfig
from pipetransformer.data import describe
from pipetransformer.data.glue import GLUE
from pipetransformer.data.reader import parted

COLUMNS = {"text_columns": ("question",), "label_column": "topic"}
TOPICS = ("bills", "cards", "loans")


def write_tickets(path: Path, *, num: int = 60) -> Path:
    """Texts of three classes, of which one is rare."""
    rows = ["question,topic"]
    for number in range(num):
        topic = TOPICS[2] if number % 10 == 0 else TOPICS[number % 2]
        rows.append(f'"what about my {topic}, number {number}",{topic}')
    path.write_text("\n".join(rows) + "\n")
    return path


def test_one_file_is_parted_by_class_and_alike_in_every_run(tmp_path: Path) -> None:
    path = write_tickets(tmp_path / "tickets.csv")
    first, again = (texts("table", path, eval_fraction=0.2, **COLUMNS) for _ in range(2))
    assert {split: len(data) for split, data in first.items()} == {"train": 48, "eval": 12}
    assert [first[s].fingerprint for s in first] == [again[s].fingerprint for s in again]
    assert first["train"].fingerprint != first["eval"].fingerprint
    counts = Counter(first["eval"].labels.tolist())
    assert counts[2] == 1 and abs(counts[0] - counts[1]) <= 1, "of each class its share"
    assert texts("table", path, eval_fraction=0.5, **COLUMNS)["eval"].fingerprint != first["eval"].fingerprint


def test_no_sample_is_in_both_parts() -> None:
    found = parted(["a", "b"] * 25, fraction=0.3)
    assert sorted([*found["train"], *found["eval"]]) == list(range(50)) and len(found["eval"]) == 15


def test_a_class_of_one_sample_may_be_there() -> None:
    found = parted(["a"] * 9 + ["b"], fraction=0.2)
    assert len(found["eval"]) == 2 and sorted([*found["train"], *found["eval"]]) == list(range(10))


def test_a_folder_without_evaluation_data_is_parted(tmp_path: Path) -> None:
    write_tickets(tmp_path / "train.csv")
    assert len(texts("table", tmp_path, eval_fraction=0.1, **COLUMNS)["eval"]) == 6


def test_a_test_set_chooses_nothing_unless_it_is_told_to(tmp_path: Path) -> None:
    write_tickets(tmp_path / "train.csv")
    write_tickets(tmp_path / "test.csv", num=20)
    load = lambda **more: texts("table", tmp_path, **COLUMNS, **more)  # noqa: E731
    refused(r"or data.splits=\{eval: test\} to choose the best weights by the test set", load)
    assert len(load(splits={"eval": "test"})["eval"]) == 20
    assert len(load(eval_fraction=0.1)["eval"]) == 6


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, r"tickets.csv is one file; give data.eval_fraction=0.2 to keep a fifth"),
        ({"path": "FOLDER/both", "eval_fraction": 0.1}, r"data.eval_fraction: .*dev.csv is there to evaluate on"),
        ({"path": "FOLDER/both", "splits": {"eval": "held_out"}}, r"data.splits: .*both holds no file held_out.csv"),
        ({"path": "FOLDER/latin.csv", "eval_fraction": 0.5}, r"latin.csv: is no UTF-8 text: line 2 is not .* Latin-1"),
        ({"path": "FOLDER/semicolons.csv", "eval_fraction": 0.5}, r"its columns are separated by semicolons"),
        (
            {"path": "FOLDER/both.csv", "eval_fraction": 0.5},
            r"its columns are separated by semicolons \(question;topic",
        ),
        ({"path": "FOLDER/nowhere.csv"}, r"data.path: there is no file .*nowhere.csv"),
    ],
)
def test_a_mistake_is_one_line(values: dict[str, object], message: str, tmp_path: Path) -> None:
    write_tickets(tmp_path / "tickets.csv")
    (tmp_path / "both").mkdir()
    for name in ("train", "dev"):
        write_tickets(tmp_path / "both" / f"{name}.csv")
    (tmp_path / "latin.csv").write_bytes("question,topic\ncaf\xe9,bills\n".encode("latin-1"))
    (tmp_path / "both.csv").write_text("question;topic\nwell, a;bills\nb;cards\n")
    (tmp_path / "semicolons.csv").write_text("question;topic\na;bills\n")
    path = Path(str(values.get("path", "FOLDER/tickets.csv")).replace("FOLDER", str(tmp_path)))
    others = {key: value for key, value in values.items() if key != "path"}
    refused(message, lambda: texts("table", path, **COLUMNS, **others))


def write_classes(folder: Path, *, num: int = 10) -> Path:
    for label, name in enumerate(("cat", "dog")):
        (folder / name).mkdir(parents=True)
        for number in range(num):
            Image.new("RGB", (8, 8), (200 * label, number, 0)).save(folder / name / f"{number}.png")
    return folder


def test_a_folder_of_classes_is_parted(tmp_path: Path) -> None:
    folder = write_classes(tmp_path / "pictures")
    found = pictures("image_folder", folder, COLOUR, eval_fraction=0.2)
    assert {split: Counter(data.labels.tolist()) for split, data in found.items()} == {
        "train": {0: 8, 1: 8},
        "eval": {0: 2, 1: 2},
    }
    assert describe(DataConfig(name="image_folder", path=str(folder), eval_fraction=0.2)).label_names == ("cat", "dog")
    refused(
        r"holds no folder train; if its folders are the classes, give data.eval_fraction=0.2",
        lambda: pictures("image_folder", folder, COLOUR),
    )


def test_a_folder_of_pictures_evaluates_on_no_test_set(tmp_path: Path) -> None:
    for name in ("train", "test"):
        write_classes(tmp_path / name)
    refused(r"holds no folder val .*or data.splits=\{eval: test\}", lambda: pictures("image_folder", tmp_path, COLOUR))
    assert len(pictures("image_folder", tmp_path, COLOUR, splits={"eval": "test"})["eval"]) == 20


def run(folder: Path, name: str, *settings: str) -> dict[str, object]:
    """A run of a shipped configuration; its summary."""
    task = "image_classification" if name == "image_folder" else "text_classification"
    common = ("train.epochs=1", "run.id=x", f"run.dir={folder / 'runs'}", "log.wandb=disabled", "log.report=false")
    job = ForkedJob(task, [name, *common, "pipe.measure=false", "train.precision=float32", *settings], num_ranks=1)
    with running(job):
        ended = job.supervise()
    assert ended.exit_code == 0, ended.cause
    found: dict[str, object] = json.loads((folder / "runs" / "x" / "summary.json").read_text())
    return found


def test_the_recipe_of_a_table_trains_on_one_file(tmp_path: Path) -> None:
    path, model = write_tickets(tmp_path / "tickets.csv"), tiny_bert(tmp_path / "bert")
    settings = (
        f"data.path={path}",
        "data.eval_fraction=0.2",
        "data.text_columns=[question]",
        "data.label_column=topic",
    )
    assert run(tmp_path, "table", f"model.name={model}", *settings)["dataset"] == "table"


def test_the_recipe_of_pictures_trains_on_a_folder(tmp_path: Path) -> None:
    folder = write_classes(tmp_path / "pictures", num=12)
    small = ("model.pretrained=false", "model.kwargs={patch_size: 4, embed_dim: 12, depth: 2, num_heads: 2}")
    settings = (f"data.path={folder}", "data.eval_fraction=0.25", "data.image_size=8", "train.batch_size=6")
    assert run(tmp_path, "image_folder", *small, *settings)["steps"] == 3


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "stsb" else pytest.mark.full) for n in GLUE])
def test_the_recipe_of_glue_runs_every_task_by_its_name(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "task"
    folder.mkdir()
    write_glue(name, folder)
    model = tiny_bert(tmp_path / "bert")
    summary = run(tmp_path, "glue", f"data.name={name}", f"data.path={folder}", f"model.name={model}")
    assert set(GLUE[name].metrics) < set(summary["metrics"])  # type: ignore[call-overload]
