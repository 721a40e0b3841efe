"""The examples of docs/extending.md are whole: taken from the page, each of them trains, reads or is proven."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from entries import EntryServer
from test_launch import ROOT
from test_models import own_forward, run, timm_model, wrapped
from timm.models.mlp_mixer import MlpMixer

from pipetransformer.config import DataConfig, config_page, load_config
from pipetransformer.config.datasets import DATASETS, DatasetEntry
from pipetransformer.data import Dataset, ImagePreprocessing, describe, known_classes, load_image_data
from pipetransformer.errors import UserError
from pipetransformer.launch.node import free_port
from pipetransformer.models import build_model, families

CONFIG = """\
task: image_classification
model:
  name: vit_tiny_patch16_224
  pretrained: false
  kwargs: {patch_size: 4, in_chans: 1, embed_dim: 16, depth: 4, num_heads: 2}
data: {name: digits, image_size: 8, max_train_samples: 64, max_eval_samples: 16}
train: {epochs: 3, batch_size: 32, lr: 1e-3}
log: {wandb: disabled}
run: {id: own, dir: FOLDER/runs}
"""


def example(section: str, language: str = "python", *, number: int = 0) -> str:
    """A code block of the page, by its section's title."""
    page = (ROOT / "docs" / "extending.md").read_text()
    (text,) = (part for part in page.split("\n## ")[1:] if part.startswith(f"{section}\n"))
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)[number]


# ---- a freeze policy -------------------------------------------------------------------------------------------------


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A folder with the example's module and a configuration that names it."""
    (tmp_path / "my_policies.py").write_text(example("A freeze policy"))
    text = CONFIG.replace("FOLDER", str(tmp_path)) + example("A freeze policy", "yaml")
    (tmp_path / "config.yaml").write_text(text)
    return tmp_path


def frozen_by_step(folder: Path) -> dict[int, int]:
    events = map(json.loads, (folder / "runs" / "own" / "events.jsonl").read_text().splitlines())
    return {event["step"]: event["plan"]["frozen"] for event in events if event["event"] == "plan"}


@pytest.mark.full
def test_a_policy_in_the_working_directory_trains_under_the_launcher(job: Path) -> None:
    """A rank runs main_cv.py, so that its path has that file's folder in place of this one."""
    command = [sys.executable, "-m", "pipetransformer.launch", "1", "1", "0", "127.0.0.1", str(free_port())]
    ended = subprocess.run(
        [*command, "config.yaml", "own"],
        cwd=job,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    assert frozen_by_step(job) == {0: 0, 2: 2, 4: 4}


@pytest.fixture(scope="module")
def entries() -> EntryServer:
    return EntryServer()


def test_a_resumed_run_tells_of_a_changed_option_and_of_no_renamed_key(job: Path, entries: EntryServer) -> None:
    task, path = "image_classification", job / "config.yaml"
    assert entries.run(task, path, "train.epochs=2", cwd=job).exit_code == 0
    kept = job / "runs" / "own" / "config.yaml"
    assert kept.read_text().count("  recompute: never\n") == 1 and "  checkpoint:" not in kept.read_text()
    past = kept.read_text().replace("  recompute: never\n", "  checkpoint: never\n").replace("my_policies", "gone")
    kept.write_text(past)
    changed = ("train.epochs=3", "freeze.options.step=1", "pipe.checkpoint=never", "run.resume=true")
    ended = entries.run(task, path, *changed, cwd=job)
    assert ended.exit_code == 0, ended
    told = [line for line in ended.out.splitlines() if "resumed with another setting" in line]
    assert "freeze.options was {'step': 2, 'ratio': 10.0} and is {'step': 1, 'ratio': 10.0} now" in told[-1]
    keys = [re.findall(r"(\S+) was", line) for line in told]
    assert keys == [["train.epochs"], ["freeze.policy"], ["freeze.options"]]


def test_a_wrong_option_is_told_before_ranks_start(job: Path, entries: EntryServer) -> None:
    ended = entries.run("image_classification", job / "config.yaml", "freeze.options.step=0", cwd=job)
    assert (ended.exit_code, ended.out) == (2, "")
    assert ended.err == ("error: freeze.options.step: 0 is not allowed; give a whole number of at least 1",)
    assert not (job / "runs").exists()


# ---- a dataset -------------------------------------------------------------------------------------------------------


@pytest.fixture
def npz(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The page's reader and entry, for as long as a test takes, and data for it."""
    module = ModuleType("pipetransformer.data.npz")
    exec(example("A dataset"), module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    added: dict[str, DatasetEntry] = eval("{" + example("A dataset", number=1) + "}", {"DatasetEntry": DatasetEntry})
    for name, entry in added.items():
        monkeypatch.setitem(DATASETS, name, entry)
    random = np.random.default_rng(0)
    for split, count in (("train", 6), ("eval", 4)):
        pictures = random.integers(0, 256, (count, 8, 8, 3), dtype=np.uint8)
        np.savez(tmp_path / f"{split}.npz", pictures=pictures, labels=np.arange(count) % 2)
    (tmp_path / "names.txt").write_text("cat\ndog\n")
    return tmp_path


def load(data: DataConfig, *, channels: int = 3) -> dict[str, Dataset]:
    statistics = (0.5,) * channels
    preprocessing = ImagePreprocessing(8, channels, statistics, statistics, "bicubic")
    return load_image_data(data, info=describe(data), preprocessing=preprocessing, seed=0)


def test_a_dataset_is_one_entry_and_one_reader(npz: Path, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    data = load_config(path, ["data.name=npz", f"data.path={npz}", "data.max_train_samples=5"]).data
    assert (describe(data).label_names, describe(data).channels, known_classes(data)) == (("cat", "dog"), 3, None)
    splits = load(data)
    assert splits["train"].labels.tolist() == [0, 1, 0, 1, 1] and len(splits["eval"]) == 4
    assert splits["train"].inputs(np.arange(5), length=8, epoch=0)["pixel_values"].shape == (5, 3, 8, 8)
    assert load(data, channels=1)["train"].inputs(np.arange(2), length=8, epoch=0)["pixel_values"].shape[1] == 1
    with np.load(npz / "eval.npz") as arrays:
        np.savez(npz / "train.npz", **arrays)
    assert load(data)["train"].fingerprint != splits["train"].fingerprint, "old pictures were kept for new ones"


def test_a_new_dataset_is_checked_and_listed_like_any_other(npz: Path, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    assert "image_folder, cola" in config_page() and "demo_qa, npz |" in config_page()
    with pytest.raises(UserError, match=r"^data.name: npz is not for task text_classification; give one of cola"):
        load_config(path, ["task=text_classification", "data.name=npz"])
    with pytest.raises(UserError, match=r'^data.name: "npzz" is not allowed; .*, npz; did you mean npz\?$'):
        load_config(path, ["data.name=npzz"])
    data = load_config(path, ["data.name=npz", f"data.path={tmp_path / 'nowhere'}"]).data
    with pytest.raises(UserError, match=r"^data.path: there is no folder"):
        load(data)
    (npz / "names.txt").write_text("cat")
    with pytest.raises(UserError, match=r"train.npz: a label is not allowed; give 0 to 0$"):
        load(DataConfig(name="npz", path=str(npz)))


# ---- a model family --------------------------------------------------------------------------------------------------


def mixer() -> torch.nn.Module:
    return MlpMixer(img_size=16, patch_size=4, embed_dim=16, num_blocks=3, num_classes=5)


def add_family(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("my_families")
    exec(code, module.__dict__)
    monkeypatch.setattr(families, "FAMILIES", module.__dict__["FAMILIES"])


def test_a_family_makes_a_model_a_chain_that_passes_its_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="is no chain of stem, blocks and head that is known here"):
        wrapped(mixer)
    add_family(example("A model family"), monkeypatch)
    chain, inputs = wrapped(mixer)
    assert (chain.family.name, chain.num_blocks) == ("timm MLP-Mixer", 3)
    torch.testing.assert_close(run(chain, inputs, cut=2), own_forward(chain, inputs), rtol=1e-6, atol=1e-6)
    known, _ = wrapped(lambda: timm_model("vit_tiny_patch16_224"))
    assert known.family.name == "timm ViT and DeiT"


def test_a_new_family_is_built_as_a_configuration_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_family(example("A model family"), monkeypatch)
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    names = ("model={name: mixer_s32_224, pretrained: false, kwargs: {in_chans: 1}}", "data.image_size=64")
    built, _ = build_model(load_config(path, names), describe(DataConfig(name="digits")))
    assert isinstance(built.model, MlpMixer)
    assert built.model(torch.zeros(1, 1, 64, 64, device="meta")).shape == (1, 10)


def test_a_wrong_family_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    code = example("A model family")
    assert "model.norm(hidden)" in code
    add_family(code.replace("model.norm(hidden)", "hidden"), monkeypatch)
    with pytest.raises(UserError, match=r"^model.name: "):
        wrapped(mixer)
