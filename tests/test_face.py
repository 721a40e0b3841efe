"""The console command, as somebody uses it who has no clone: train by name, predict, evaluate, export, look around."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from test_launch import ROOT

from benchmarks.soak.forked import ForkedJob, running
from pipetransformer import commands
from pipetransformer.commands import doctor
from pipetransformer.config.foreign import ours
from pipetransformer.config.schema import Config
from pipetransformer.config.shipped import found_config, shipped
from pipetransformer.config.words import keys_of

SMALL = (
    *("train.epochs=2", "train.precision=float32", "log.wandb=disabled", "run.id=x", "pipe.measure=false"),
    *("freeze.policy=none", "data.max_train_samples=400", "data.max_eval_samples=60", "train.batch_size=16"),
)
TASKS = {
    "digits": ("image_classification", "accuracy"),
    "demo_text": ("text_classification", "accuracy"),
    "demo_qa": ("question_answering", "f1"),
}


def say(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a command prints, which must end well."""
    assert commands.main(list(arguments)) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line of a mistake."""
    assert commands.main(list(arguments)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """A small run of each task."""
    folder = tmp_path_factory.mktemp("runs")
    for name, (task, _) in TASKS.items():
        job = ForkedJob(task, [name, *SMALL, f"run.dir={folder / name}"], num_ranks=1)
        with running(job):
            assert job.supervise().exit_code == 0
    yield {name: folder / name / "x" for name in TASKS}


@pytest.mark.parametrize("name", TASKS)
def test_evaluate_finds_the_metrics_of_the_run(
    name: str, runs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Through the saved folder and the model's own library."""
    told = json.loads(say(capsys, "evaluate", str(runs[name]), "--json"))
    summary = json.loads((runs[name] / "summary.json").read_text())
    metric = TASKS[name][1]
    assert told["metrics"][metric] == pytest.approx(summary["best_metrics"][metric], abs=1e-6)
    if told["confusion"]:
        confusion = np.array(told["confusion"])
        assert confusion.trace() / confusion.sum() == pytest.approx(told["metrics"]["accuracy"])
        assert [line["count"] for line in told["classes"]] == confusion.sum(axis=1).tolist()


def test_texts_are_predicted_from_a_table_and_from_lines(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["the film is wonderful", "a bad, boring story", "the film is wonderful"]
    (tmp_path / "new.csv").write_text("id,text\n" + "".join(f'{n},"{text}"\n' for n, text in enumerate(texts)))
    rows = list(csv.DictReader(io.StringIO(say(capsys, "predict", str(runs["demo_text"]), str(tmp_path / "new.csv")))))
    assert [row["sample"] for row in rows] == ["1", "2", "3"] and rows[0]["score"] == rows[2]["score"]
    names = list(rows[0])[3:]
    assert len(names) >= 2 and all(
        sum(float(row[name]) for name in names) == pytest.approx(1, abs=1e-4) for row in rows
    )
    assert all(float(row["score"]) == max(float(row[name]) for name in names) for row in rows)
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(texts)))
    told = [json.loads(line) for line in say(capsys, "predict", str(runs["demo_text"]), "-", "--json").splitlines()]
    assert [each["prediction"] for each in told] == [row["prediction"] for row in rows]


def test_pictures_are_predicted_and_judged_by_their_folders(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for label in (0, 7):
        (tmp_path / str(label)).mkdir()
        for number in range(2):
            pixels = np.random.default_rng(number).integers(0, 255, (8, 8), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / str(label) / f"{number}.png")
    rows = list(csv.DictReader(io.StringIO(say(capsys, "predict", str(runs["digits"]), str(tmp_path)))))
    assert [Path(row["sample"]).parent.name for row in rows] == ["0", "0", "7", "7"]
    assert rows[0]["prediction"] == rows[2]["prediction"], "the same picture"
    told = json.loads(say(capsys, "evaluate", str(runs["digits"]), str(tmp_path), "--json"))
    right = [row["prediction"] == Path(row["sample"]).parent.name for row in rows]
    assert told["metrics"]["accuracy"] == pytest.approx(np.mean(right))


def test_a_question_is_answered(runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "asked.csv").write_text('question,context\n"Where does Anna live?","Anna lives in Oslo."\n')
    told = json.loads(say(capsys, "predict", str(runs["demo_qa"]), str(tmp_path / "asked.csv"), "--json"))
    assert told["prediction"] in "Anna lives in Oslo." and told["prediction"]


def test_an_export_loads_and_tells_its_figures(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    say(capsys, "export", str(runs["demo_text"]), str(tmp_path / "mine"))
    card = (tmp_path / "mine" / "README.md").read_text()
    best = json.loads((runs["demo_text"] / "summary.json").read_text())["best_metrics"]["accuracy"]
    assert f"| accuracy | {best:.4f} |" in card and "freeze policy none" in card
    (tmp_path / "new.txt").write_text("the film is wonderful\n")
    alone = json.loads(say(capsys, "predict", str(tmp_path / "mine"), str(tmp_path / "new.txt"), "--json"))
    there = json.loads(say(capsys, "predict", str(runs["demo_text"]), str(tmp_path / "new.txt"), "--json"))
    assert alone == there
    config = tmp_path / "mine" / "config.json"
    kept = json.loads(config.read_text())
    assert (kept["text_columns"], kept["label_column"]) == (["text"], "label")
    config.write_text(json.dumps(kept | {"text_columns": ["review"]}))
    (tmp_path / "new.csv").write_text("review,stars\nthe film is wonderful,5\n")
    told = say(capsys, "predict", str(tmp_path / "mine"), str(tmp_path / "new.csv"), "--json")
    assert json.loads(told)["prediction"] == alone["prediction"], "a table needs no --columns"
    assert "is there; give a folder that is not" in refused(
        capsys, "export", str(runs["demo_text"]), str(tmp_path / "mine")
    )


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("predict", "RUN", "nowhere.csv"), "nowhere.csv: there is no such file"),
        (("predict", "nowhere", "-"), "nowhere: there is no such folder; give that of a run, or of a saved model"),
        (("predict", "FOLDER", "-"), "holds no model; give the folder of a run that has ended"),
        (
            ("predict", "RUN", "FOLDER/other.csv"),
            "no column text; there are words, label; name the texts with --columns",
        ),
        (("evaluate", "RUN", "FOLDER/text.csv"), "no column label; there are text; name the labels with --label"),
        (("evaluate", "RUN", "FOLDER/strange.csv"), "label 'odd': the model knows "),
        (
            (
                "evaluate",
                "RUN/model/bests",
            ),
            "bests: there is no such folder",
        ),
        (("train", "digitz"), "digitz: no such file, and no shipped configuration; did you mean digits?"),
        (("train", "digits", "--epochs", "3"), "--epochs is not known; settings are key=value: train.epochs="),
        (
            ("train", "table", "data.text_columns=[question,", "answer]"),
            "answer]: settings are key=value; quote what has",
        ),
        (
            ("train", "digits", "train.num_train_epochs=3"),
            "train.num_train_epochs: no such key; did you mean train.epochs?",
        ),
        (("train", "digits", "train.precision=fp16"), 'train.precision: "fp16" is not allowed; give one of '),
        (("train", "demo_qa", "--no-freeze"), "--no-freeze: demo_qa has no twin without freezing"),
        (("train", "digits", "--no-freeze", "freeze.policy=paper"), "--no-freeze: freeze.policy=paper may freeze"),
        (("configs", "--keys", "trian"), "--keys: trian is no section; give one of task, model"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: tuple[str, ...], line: str, runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other.csv").write_text("words,label\na film,good\n")
    (tmp_path / "text.csv").write_text("text\na film\n")
    (tmp_path / "strange.csv").write_text("text,label\na film,odd\n")
    places = {"RUN": str(runs["demo_text"]), "FOLDER": str(tmp_path)}
    given = [next((a.replace(word, to) for word, to in places.items() if a.startswith(word)), a) for a in arguments]
    assert line in refused(capsys, *given)


def test_train_finds_a_configuration_by_its_name_and_runs_it_anywhere(tmp_path: Path) -> None:
    """Another folder, ranks of its own; a module of the user's is looked for where the command is given."""
    (tmp_path / "mine.py").write_text(
        "from pipetransformer.freeze.static import StaticPolicy\n\n\nclass Mine(StaticPolicy):\n    pass\n"
    )
    command = [sys.executable, "-m", "pipetransformer", "train", "digits", "--ranks", "2", *SMALL]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    options = {"cwd": tmp_path, "env": env, "capture_output": True, "text": True}
    ended = subprocess.run(
        [*command, "train.epochs=1", "freeze.policy=mine:Mine", "freeze.options={max_frozen: 1}"], **options
    )
    assert ended.returncode == 0, ended.stderr
    assert json.loads((tmp_path / "runs" / "x" / "summary.json").read_text())["world_size"] == 2
    ended = subprocess.run([*command, "train.lr=1e9", "train.epochs=1", "run.overwrite=true"], **options)
    assert ended.returncode == 1 and ended.stderr.splitlines()[-1].startswith("rank ")


def test_a_folder_hides_no_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of data that is called like it: ``train squad data.path=squad``."""
    (tmp_path / "squad").mkdir()
    monkeypatch.chdir(tmp_path)
    assert found_config("squad").name == "train_config_squad_all_in_one.yaml"


@pytest.mark.parametrize(
    ("data", "line"),
    [("-", "-: holds no labels to judge by"), ("FOLDER/lines.txt", "lines.txt: holds no labels to judge by")],
)
def test_what_has_no_labels_judges_nothing(
    data: str, line: str, runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lines.txt").write_text("a film\n")
    given = data.replace("FOLDER", str(tmp_path))
    assert line in refused(capsys, "evaluate", str(runs["demo_text"]), given)


def test_help_is_there_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    began = time.monotonic()
    told = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "pipetransformer", "--help"],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert told.returncode == 0 and time.monotonic() - began < 2.0, "half a second on a machine that does nothing else"
    assert " torch" not in told.stderr and all(name in told.stdout for name in commands._COMMANDS)
    with pytest.raises(SystemExit):
        commands.main(["train", "--help"])
    told_of_train = capsys.readouterr().out
    assert "pipetransformer train digits --no-freeze" in told_of_train and "freeze.policy" in told_of_train


def test_configurations_are_listed_and_printed(capsys: pytest.CaptureFixture[str]) -> None:
    told = say(capsys, "configs")
    assert [line.split()[0] for line in told.splitlines()] == list(shipped())
    assert all(line.endswith("; without freezing") == ("_no_freeze" in line) for line in told.splitlines())
    assert say(capsys, "configs", "digits") == (ROOT / "config/train_config_digits_all_in_one.yaml").read_text()
    assert say(capsys, "configs", "--keys", "checkpoint").splitlines()[0].startswith("checkpoint.every")


def test_the_doctor_finds_nothing_here_and_a_folder_that_cannot_be_written(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_FREE", 0)  # however little room this machine has
    monkeypatch.setattr(doctor, "_SHARED", -1)
    assert {line.split()[0] for line in say(capsys, "doctor").splitlines()} == {"ok"}
    assert refused_by_doctor(capsys).startswith("error: doctor: 1 thing to mend")


def refused_by_doctor(capsys: pytest.CaptureFixture[str]) -> str:
    assert commands.main(["doctor", "--run-dir", "/proc/none"]) == 2
    captured = capsys.readouterr()
    assert "mend  run folder" in captured.out
    return captured.err


def test_names_of_other_tools_are_keys_of_ours() -> None:
    known = {key for key, _ in keys_of(Config)}
    for name in ("learning_rate", "per_device_train_batch_size", "max_epochs", "bf16", "clip_grad", "output_dir"):
        assert ours(name) in known, name
    assert ours("--num-train-epochs".lstrip("-")) == "train.epochs" and ours("nothing") == ""


@pytest.mark.parametrize(
    ("words", "expected"), [("pipetransformer tr", "train"), ("pipetransformer train dig", "digits")]
)
def test_a_shell_completes(words: str, expected: str, tmp_path: Path) -> None:
    found = tmp_path / "found"
    env = {
        **os.environ,
        **{"_ARGCOMPLETE": "1", "COMP_LINE": words, "COMP_POINT": str(len(words)), "_ARGCOMPLETE_IFS": "\n"},
        **{"_ARGCOMPLETE_STDOUT_FILENAME": str(found), "PYTHONPATH": str(ROOT), "_ARGCOMPLETE_SHELL": "bash"},
    }
    subprocess.run([sys.executable, "-m", "pipetransformer"], env=env, capture_output=True, check=True)
    assert expected in found.read_text().replace("\x0b", "\n").split()
