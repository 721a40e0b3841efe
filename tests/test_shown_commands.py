"""Every command that a page shows is run, at a small size: those of README here, those of docs with the full grid.

The pages are read, not copied: a command that is added is run too, or fails here.
"""

from __future__ import annotations

import io
import os
import re
import shlex
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import yaml
from PIL import Image
from test_data import _cifar
from test_launch import ROOT
from test_own_data import write_tickets
from test_readers import write_folder, write_glue
from tiny import tiny_bert, tiny_squad, tiny_sst2

from benchmarks.soak.forked import ForkedJob, running
from pipetransformer import commands
from pipetransformer.config import load_config
from pipetransformer.config.shipped import without_freezing
from pipetransformer.launch.node import parse_job

SMALL = (
    *("train.epochs=1", "train.max_steps=3", "train.batch_size=8", "train.precision=float32", "log.wandb=disabled"),
    *("log.report=false", "pipe.measure=false", "cache.disk_budget=null", "data.max_train_samples=24"),
    *("data.max_eval_samples=8",),
)
_VIT = ("model.kwargs={patch_size: 8, embed_dim: 16, depth: 8, num_heads: 2}", "model.pretrained=false")
_BERT = ("model.name=bert", "data.max_length=32")
OWN = {  # what is smaller by configuration
    "cifar100": ("data.path=cifar100", "data.image_size=32", *_VIT),
    "image_folder": ("data.image_size=32", "model.name=vit_tiny_patch16_224", *_VIT),
    "sst2": ("data.path=SST-2", *_BERT),
    "glue": _BERT,
    "table": _BERT,
    "squad": ("data.path=squad", *_BERT, "data.stride=8"),
}
ELSEWHERE = (  # what other tests run, or what is no command of ours
    (r"pip install|make |\. \.venv|\./run_pipetransformer\.sh$", "CI: make test on a clean clone"),
    (r"pipetransformer partition ", "test_commands.py, on smaller models: these take minutes"),
    (r"pipetransformer sweep (lr\.yaml|ablation)$", "test_sweep.py"),
    (r" 8 2(:4)? [01] node0 ", "test_nodes.py, test_restarts.py"),
    (
        r"^(sbatch|kubectl|docker|git|tar|cd|export|python -m pip|pipetransformer bench) ?",
        "tools of others, or a clone's",
    ),
)


def shown(page: Path) -> list[str]:
    """The commands of a page's blocks, a line each, variables filled in."""
    found, variables = list[str](), dict[str, str]()
    for block in re.findall(r"^```sh\n(.*?)^```", page.read_text(), re.M | re.S):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if len(words) == 1 and (given := re.fullmatch(r"(\w+)=(.*)", words[0])):
                variables[given[1]] = given[2]
                continue
            told = re.sub(r"\s+", " ", shlex.join(words))
            for name, value in variables.items():
                told = told.replace(f"'${name}'", value)
            found += [told] if words else []
    return found


def test_pages_are_read() -> None:
    told = shown(ROOT / "README.md")
    assert "pipetransformer train digits --ranks 2" in told and len(told) > 30
    assert any(line.endswith("freeze.policy=none") and line.startswith("sh run_pipetransformer.sh 8") for line in told)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with all that commands name: data, models, and runs."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "config").symlink_to(ROOT / "config")
    tiny_bert(folder / "bert", layers=4)
    (folder / "minilm-l6").symlink_to(folder / "bert")
    tiny_sst2(folder / "SST-2", 40, num_eval_samples=16)
    tiny_squad(folder / "squad", 30, num_eval_questions=8)
    (folder / "RTE").mkdir()
    write_glue("rte", folder / "RTE")
    for name in ("tickets.csv", "new.csv"):
        write_tickets(folder / name)
    (folder / "asked.csv").write_text("question,context\nWhere is Anna?,Anna lives in Oslo.\n")
    (folder / "cifar100").mkdir()
    for file in ("train.parquet", "test.parquet"):
        _cifar(folder / "cifar100", [*range(24)], file=file)
    write_folder(folder / "split")
    (folder / "PICTURES").symlink_to(folder / "split" / "train")
    (folder / "NEW").mkdir()
    Image.new("RGB", (40, 40)).save(folder / "NEW" / "a.png")
    (folder / "lr.yaml").write_text(yaml.safe_dump({"config": "digits", "keys": {"train.lr": [1e-3, 1e-2]}}))
    data = (
        "data.path=tickets.csv",
        "data.eval_fraction=0.2",
        "data.text_columns=[question]",
        "data.label_column=topic",
    )
    for name, config, own in (
        ("text", "table", data),
        ("pictures", "image_folder", ("data.path=PICTURES", "data.eval_fraction=0.25")),
        ("questions", "squad", ()),
    ):
        train(folder, config, [*own, f"run.id={name}"])
    for other in ("ID", "1000", "1001", "tickets"):
        (folder / "runs" / other).symlink_to(folder / "runs" / "text")
    yield folder


def train(folder: Path, config: str, overrides: list[str], *, num_ranks: int = 1) -> None:
    """A job of this configuration at a small size, in ``folder``."""
    name = re.sub(r".*train_config_|_all_in_one|_no_freeze|\.yaml", "", config)
    given = {text.partition("=")[0] for text in overrides}
    own = [text for text in OWN.get(name, ()) if text.partition("=")[0] not in given]
    resumes = any(text.startswith("run.resume") for text in overrides)
    more = [] if resumes else ["run.overwrite=true"]
    arguments = [*overrides, *SMALL, *own, *more]
    here = os.getcwd()
    os.chdir(folder)
    try:
        task = load_config(config, arguments).task
    finally:
        os.chdir(here)
    job = ForkedJob(task, [config, *arguments], num_ranks=num_ranks, setup=partial(_go, folder))
    with running(job):
        ended = job.supervise()
    assert ended.exit_code == 0, ended.cause


def _go(folder: Path, rank: int) -> None:
    os.chdir(folder)


def run(command: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """One shown command, which must end well."""
    if command.startswith("... RUN_ID"):  # what may follow the run's id
        command = f"sh run_pipetransformer.sh 1 1 0 127.0.0.1 29500 digits base {command.removeprefix('... RUN_ID ')}"
        command = command.replace("runs/1000", "runs/base")
    before, _, piped = command.rpartition(" '|' ")
    words = shlex.split(piped.partition(" '>' ")[0].partition(" > ")[0])
    if words[0] == "sh":
        job = parse_job(words[2:])
        place = [] if "run.id=base" in job.overrides or "base" in words else ["run.dir=made"]
        train(folder, job.config, [*job.overrides, *place], num_ranks=min(2, job.num_ranks))
    elif words[0] in ("python", "torchrun"):
        at = next(number for number, word in enumerate(words) if word.startswith("main_"))
        train(folder, words[at + 1], [*words[at + 2 :], "run.dir=made"], num_ranks=2 if words[0] == "torchrun" else 1)
    elif words[:2] == ["pipetransformer", "train"]:
        ranks = int(words[words.index("--ranks") + 1]) if "--ranks" in words else 1
        config = without_freezing(words[2]) if "--no-freeze" in words else words[2]
        train(folder, str(config), [*(w for w in words[3:] if "=" in w), "run.dir=made"], num_ranks=min(2, ranks))
    else:
        assert words[0] == "pipetransformer", f"nothing here runs it: {command}"
        monkeypatch.chdir(folder)
        if before:
            monkeypatch.setattr("sys.stdin", io.StringIO(" ".join(shlex.split(before)[1:]) + "\n"))
        code = commands.main(filled(words[1:]))
        assert code == 0, capsys.readouterr().err


def filled(words: list[str]) -> list[str]:
    """The words with what stands for a user's own names."""
    of = "questions" if "asked.csv" in words else "pictures" if {"NEW", "runs/pictures"} & {*words} else "text"
    names = {"RUN": f"runs/{of}", "CONFIG": "digits", "FILE": "profile.json"}
    words = [names.get(word, word) for word in words]
    if words[0] == "plan":
        words += ["model.kwargs.depth=8"] if words[1] == "digits" else [*OWN["cifar100"]]
        words += ["train.batch_size=4096"] if "--cluster" in words else []
        if "profile.json" in words:
            assert commands.main(["plan", "digits", "model.kwargs.depth=8", "--save-profile=profile.json"]) == 0
    return words


def of_page(page: Path) -> list[str]:
    return [c for c in dict.fromkeys(shown(page)) if not any(re.search(pattern, c) for pattern, _ in ELSEWHERE)]


DOCS = sorted({c for page in (ROOT / "docs").glob("*.md") for c in of_page(page)} - {*of_page(ROOT / "README.md")})


@pytest.mark.parametrize(
    "command", [*of_page(ROOT / "README.md"), *(pytest.param(c, marks=pytest.mark.full) for c in DOCS)]
)
def test_it_runs(
    command: str, place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if command.startswith("... RUN_ID") and not (place / "runs" / "base").exists():
        train(place, "digits", ["run.id=base"])
    run(command, place, capsys, monkeypatch)
