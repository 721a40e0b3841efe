"""A mistake gets one clear line that names the key or the file and the remedy, and leaves nothing behind."""

from __future__ import annotations

import fcntl
import io
import os
import shutil
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from entries import Ended, EntryServer
from PIL import Image
from ranks import RankPool
from test_launch import ROOT
from tiny import tiny_bert, tiny_sst2, tiny_tokenizer

from pipetransformer.config import load_config
from pipetransformer.errors import UserError
from pipetransformer.launch.node import free_port
from pipetransformer.process.world import World

IMAGES = """
task: image_classification
model:
  name: vit_tiny_patch16_224
  pretrained: false
  kwargs: {patch_size: 4, in_chans: 1, embed_dim: 16, depth: 4, num_heads: 2}
data: {name: digits, image_size: 8, max_train_samples: 64, max_eval_samples: 16}
train: {epochs: 1, batch_size: 32, lr: 1e-3, precision: float32}
log: {wandb: disabled}
run: {id: x, dir: FOLDER/runs}
"""
TEXTS = """
task: text_classification
model: {name: FOLDER/bert}
data: {name: sst2, path: FOLDER/sst2, max_length: 64}
train: {epochs: 1, batch_size: 8, lr: 1e-3, precision: float32}
log: {wandb: disabled}
run: {id: x, dir: FOLDER/runs}
"""
NO_CHAIN = "is no chain of stem, blocks and head that is known here; use one of: timm ViT and DeiT; timm EVA;"


@pytest.fixture(scope="module")
def entries() -> EntryServer:
    return EntryServer()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Configurations, a model and texts that are as they should be, and others that are not."""
    folder = tmp_path_factory.mktemp("bad_input")
    for name, text in (("images", IMAGES), ("texts", TEXTS)):
        (folder / f"{name}.yaml").write_text(text.replace("FOLDER", str(folder)))
    bert, texts = tiny_bert(folder / "bert"), tiny_sst2(folder / "sst2", 24)
    for name in ("no_tokenizer", "no_weights", "garbled_weights", "garbled_settings", "garbled_tokenizer"):
        shutil.copytree(bert, folder / name)
    for tokenizer_file in (folder / "no_tokenizer").glob("token*"):
        tokenizer_file.unlink()
    (folder / "no_weights" / "model.safetensors").unlink()
    (folder / "garbled_weights" / "model.safetensors").write_bytes(b"garbage")
    (folder / "garbled_settings" / "config.json").write_text("{")
    (folder / "garbled_tokenizer" / "tokenizer.json").write_text('{"version"')
    for name in ("no_samples", "third_label", "lost_tab", "no_dev"):
        shutil.copytree(texts, folder / name)
    (folder / "no_samples" / "train.tsv").write_text("sentence\tlabel\n")
    (folder / "third_label" / "dev.tsv").write_text("sentence\tlabel\nfine .\t1\nso so .\t2\n")
    (folder / "lost_tab" / "train.tsv").write_text("sentence\tlabel\nfine . 1\n")
    (folder / "no_dev" / "dev.tsv").unlink()
    for name, labels in (("garbled_parquet", []), ("label_100", [7, 100])):
        (folder / name).mkdir()
        for split in ("train", "test"):
            _write_cifar100(folder / name / f"{split}.parquet", labels)
    (folder / "empty").mkdir()
    (folder / "not_a_run").mkdir()
    (folder / "not_a_run" / "thesis.txt").touch()
    (folder / "garbled.jsonl").write_text("[]\n")
    (folder / "no_plan.jsonl").write_text('{"event": "run"}\n')
    (folder / "half_a_plan.jsonl").write_text('{"event": "plan", "step": 0, "plan": {"frozen": 0}}\n')
    _other_families(folder)
    return folder


def _write_cifar100(path: Path, labels: list[int]) -> None:
    """Black pictures with these labels; no parquet at all without any."""
    if not labels:
        path.write_bytes(b"garbage")
        return
    picture = io.BytesIO()
    Image.new("RGB", (32, 32)).save(picture, "PNG")
    columns = {"img": [{"bytes": picture.getvalue()}] * len(labels), "fine_label": labels}
    pq.write_table(pa.table(columns), path)


def _other_families(folder: Path) -> None:
    from transformers import (
        AlbertConfig,
        AlbertForSequenceClassification,
        DebertaConfig,
        DebertaForSequenceClassification,
        RobertaConfig,
        RobertaForSequenceClassification,
        XLNetConfig,
        XLNetForSequenceClassification,
    )

    tokenizer = tiny_tokenizer()
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    xlnet = XLNetConfig(vocab_size=len(tokenizer), d_model=16, n_layer=2, n_head=2, d_inner=32)
    XLNetForSequenceClassification(xlnet).save_pretrained(folder / "xlnet")
    deberta = DebertaConfig(**sizes, intermediate_size=32, relative_attention=True, pos_att_type=["c2p", "p2c"])
    DebertaForSequenceClassification(deberta).save_pretrained(folder / "deberta")
    roberta = RobertaConfig(**sizes, intermediate_size=32, max_position_embeddings=80, pad_token_id=1)
    RobertaForSequenceClassification(roberta).save_pretrained(folder / "roberta")
    albert = AlbertConfig(**sizes, intermediate_size=32, embedding_size=8)
    AlbertForSequenceClassification(albert).save_pretrained(folder / "albert")
    for name in ("xlnet", "deberta", "roberta", "albert"):
        tokenizer.save_pretrained(folder / name)


@pytest.fixture
def clean(folder: Path) -> Iterator[Path]:
    """``folder``, in which no run is there before."""
    yield folder
    shutil.rmtree(folder / "runs", ignore_errors=True)


def assert_refused(ended: Ended, line: str) -> None:
    assert len(ended.err) == 1, ended.err
    assert ended.err[0].startswith("error: ")
    assert line in ended.err[0]
    assert ended.exit_code == 2


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("train.epoch=3", "train.epoch: no such key; did you mean train.epochs?"),
        ("trian.epochs=3", "trian: no such key; did you mean train?"),
        ("train.epochs=three", 'train.epochs: "three" is not allowed; give a whole number of at least 0'),
        ("train.lr=-1", "train.lr: -1 is not allowed; give a number above 0"),
        ("freeze.alpha=1", "freeze.alpha: 1 is not allowed; give a number above 0 and below 1"),
        ("freeze.every=-2 steps", 'freeze.every: "-2 steps" is not allowed; give a positive interval'),
        ("train.epochs", "train.epochs: not an override; write section.key=value"),
        ("task=text_classification", "data.name: digits is not for task text_classification; give one of cola, sst2"),
        ("run.id=../elsewhere", 'run.id: "../elsewhere" is not allowed; give letters, digits'),
        ("model.name=resnet18", f"model.name: resnet18 (ResNet) {NO_CHAIN}"),
        ("model.name=vit_tinny_patch16_224", "no model vit_tinny_patch16_224; did you mean vit_tiny_patch16_224?"),
        ("model.name=bert-base-uncased", "timm has no model bert-base-uncased; give another name, a hub id"),
        ("model.name=nobody/nothing", "model.name: nobody/nothing could not be loaded ("),
        ("model.name=./nowhere", "model.name: there is no folder ./nowhere; give one that holds a model, or a hub id"),
        ("model.name=FOLDER/empty", "empty holds no config.json; give the folder of a saved model"),
        ("model.name=FOLDER/bert", "bert could not be built (KeyError: 'architecture')"),
        ("model.name=FOLDER/garbled_settings", "garbled_settings could not be built (JSONDecodeError: "),
        ("model.pretrained=true", "vit_tiny_patch16_224 could not be loaded ("),
        ("model.kwargs.depht=3", "model.kwargs: vit_tiny_patch16_224 could not be built (TypeError: "),
        ("model.kwargs.depth=0", "model.name: vit_tiny_patch16_224 has no blocks; give it at least 1"),
        ("model.kwargs.depth=null", "model.kwargs: depth is null; give it a value, or leave it out"),
        (
            "model.kwargs.trust_remote_code=true",
            "model.kwargs: trust_remote_code would run a model folder's own code; leave it out, and give a model that "
            "the library itself has",
        ),
        ("model.kwargs.in_chans=2", "model.kwargs: in_chans 2 is not allowed; give 1 (grey) or 3 (colour)"),
        ("model.kwargs.num_classes=5", "model.kwargs: num_classes is decided by the data; leave it out"),
        ("model.kwargs.img_size=8", "model.kwargs: img_size is decided by the data; set data.image_size instead"),
        ("data.image_size=10", "data.image_size: 10 does not divide into patches of 4 pixels; give 8, or"),
        ("data.path=/nowhere", "data.path: /nowhere is not allowed; digits needs no files, leave the path out"),
        ("data={name: cifar100, path: FOLDER/empty}", "empty holds neither train.parquet nor train-*.parquet"),
        ("data={name: cifar100, path: FOLDER/garbled_parquet}", "train.parquet: not a readable parquet file ("),
        (
            "data={name: cifar100, path: FOLDER/label_100}",
            "train.parquet: row 1: label 100 is not allowed; give 0 to 99",
        ),
        ("data.augment=strong", 'data.augment: "strong" is not allowed; give one of none, basic'),
        ("pipe.initial_length=2", "pipe.initial_length: 2 does not divide the world size 1; give one of 1"),
        ("pipe.microbatches=33", "train.batch_size: 32 is smaller than dp x M = 1 x 33; give at least 33"),
        ("pipe.memory_limit=1000", "pipe.memory_limit: 1000 bytes hold no layout of this model with a"),
        (
            "freeze={policy: static, max_frozen: 5}",
            "freeze.max_frozen: 5 is not allowed; give at most 4, which are all blocks",
        ),
        ("run.dir=/dev/null", "run.dir: /dev/null/x cannot be made, because /dev/null is no folder"),
        ("run.resume=true", "x; start it without run.resume"),
        ("run.replay=/nowhere", "/nowhere: cannot be read (No such file or directory); give the events.jsonl of a run"),
        ("run.replay=FOLDER/garbled.jsonl", "garbled.jsonl:1: not an event; each line must be one JSON object"),
        ("run.replay=FOLDER/no_plan.jsonl", "no_plan.jsonl holds no plan for step 0; give the events.jsonl of a whole"),
        ("run.replay=FOLDER/half_a_plan.jsonl", "half_a_plan.jsonl holds a plan that cannot be read (KeyError('pp'))"),
    ],
)
def test_a_mistake_about_images(entries: EntryServer, clean: Path, override: str, line: str) -> None:
    ended = entries.run("image_classification", clean / "images.yaml", override.replace("FOLDER", str(clean)))
    assert_refused(ended, line)
    assert not (clean / "runs").exists()


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("model.name=FOLDER/xlnet", f"xlnet (XLNetForSequenceClassification) {NO_CHAIN}"),
        (
            "model.name=FOLDER/deberta",
            "deberta is no chain: all of its blocks train the same relative positions, which",
        ),
        ("model.name=FOLDER/albert", "albert is no chain: its blocks are one and the same, so that none can be frozen"),
        ("model.name=FOLDER/roberta", "roberta pads with token 0 and the model with 1; use the tokenizer that belongs"),
        ("model.name=nobody/nothing", "model.name: nobody/nothing could not be loaded ("),
        ("model.name=FOLDER/no_weights", "no_weights could not be loaded (Error no file named model.safetensors"),
        ("model.name=FOLDER/no_tokenizer", "no_tokenizer; put the one that belongs to the model there"),
        ("model.name=FOLDER/garbled_weights", "garbled_weights could not be built (SafetensorError: "),
        ("model.name=FOLDER/garbled_settings", "garbled_settings could not be loaded ("),
        ("model.name=FOLDER/garbled_tokenizer", "garbled_tokenizer could not be built (JSONDecodeError: "),
        ("model.kwargs.num_hiden_layers=2", "model.kwargs: num_hiden_layers is nothing that the configuration of"),
        ("model.kwargs.num_hidden_layers=0", "bert has no blocks; give it at least 1"),
        ("model.kwargs.num_hidden_layers=6", "bert has no weights for bert.encoder.layer.4."),
        ("model.kwargs.vocab_size=30", "model.kwargs: bert.embeddings.word_embeddings.weight is [47, 16] in"),
        ("model={name: FOLDER/bert, pretrained: false, kwargs: {vocab_size: 30}}", "bert knows 47 tokens but the"),
        ("model.kwargs.num_labels=3", "model.kwargs: num_labels is decided by the data; leave it out"),
        ("data.max_length=200", "data.max_length: 200 is more than"),
        ("data.max_length=2", "data.max_length: 2 is not allowed; the model's texts need at least 3"),
        ("data.path=FOLDER/nowhere", "nowhere; give a local folder or a hub id such as owner/name"),
        ("data.path=nobody/nothing", "nobody/nothing is no local folder and its split train cannot be loaded"),
        ("data.path=FOLDER/empty", "empty holds no train.tsv"),
        ("data.path=FOLDER/no_dev", "no_dev holds no dev.tsv"),
        ("data.path=FOLDER/no_samples", "no_samples/train.tsv: holds no samples; at least 1 is needed"),
        ("data.path=FOLDER/third_label", "third_label/dev.tsv:3: label '2' is not allowed; give 0 or 1"),
        ("data.path=FOLDER/lost_tab", "lost_tab/train.tsv:2: 1 columns between tabs; the header has 2"),
        ("data.path=FOLDER/texts.yaml", "texts.yaml is a file; give the folder that holds it"),
    ],
)
def test_a_mistake_about_texts(entries: EntryServer, clean: Path, override: str, line: str) -> None:
    ended = entries.run("text_classification", clean / "texts.yaml", override.replace("FOLDER", str(clean)))
    assert_refused(ended, line)
    assert not (clean / "runs").exists()


# ---- the run's folder ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(entries: EntryServer, folder: Path) -> Path:
    """The folder of a run of 2 steps that is over."""
    ended = entries.run("image_classification", folder / "images.yaml", f"run.dir={folder / 'before'}")
    assert (ended.exit_code, ended.err) == (0, ())
    return folder / "before" / "x"


def content(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ([], "x exists; continue it with run.resume=true, delete it with run.overwrite=true, or give another run id"),
        (
            ["run.resume=true", "train.batch_size=16"],
            "is of a run with batches of an epoch 2 and this one has 4; give the same model",
        ),
        (
            ["run.resume=true", "train.seed=1"],
            "is of a run with train.seed 0 and this one has 1; give the same model",
        ),
        (
            ["run.resume=true", "freeze.stem=true"],
            "freeze.stem False and this one has True; give freeze.stem=",
        ),
        (["run.resume=true", "model.kwargs.depth=3"], "is of a run with blocks 4 and this one has 3; give the same"),
        (
            ["run.resume=true", "train.epochs=2", "model.kwargs.embed_dim=32"],
            "step-00000002 does not fit this configuration, or is damaged (",
        ),
        (
            ["run.resume=true", "train.optimizer=sgd"],
            "is of a run with train.optimizer adamw and this one has sgd",
        ),
        (["run.resume=true", "run.id=null"], "run.resume: which run is not said; give run.id"),
        (["run.resume=true", "run.overwrite=true"], "run.resume: cannot go with run.overwrite; set one of them"),
        (
            ["run.overwrite=true", "run.replay=FOLDER/before/x/events.jsonl", "train.epochs=2"],
            "was recorded with 2 steps and this job has 4; give the same data, batch size and epochs",
        ),
        (["run.overwrite=true", "pipe.memory_limit=1000"], "pipe.memory_limit: 1000 bytes hold no layout of"),
        (["run.overwrite=true", "model.name=resnet18"], NO_CHAIN),
    ],
)
def test_a_refused_run_leaves_the_one_before_as_it_was(
    entries: EntryServer, folder: Path, finished: Path, overrides: list[str], line: str
) -> None:
    before = content(finished)
    overrides = [override.replace("FOLDER", str(folder)) for override in overrides]
    ended = entries.run("image_classification", folder / "images.yaml", f"run.dir={finished.parent}", *overrides)
    assert_refused(ended, line)
    assert content(finished) == before


@pytest.mark.parametrize(
    ("damage", "line"),
    [
        ("no checkpoint", "damaged holds no complete checkpoint; start it anew with run.overwrite=true"),
        ("garbled state", "holds no checkpoint that is whole (step-00000002: state.json is damaged); start it anew"),
        ("state without a plan", "holds no checkpoint that is whole (step-00000002: state.json is damaged)"),
        ("no tensors", "(step-00000002: __0_0.distcp cannot be read (No such file or directory))"),
    ],
)
def test_a_checkpoint_that_is_not_whole_is_not_resumed(
    entries: EntryServer, folder: Path, finished: Path, damage: str, line: str
) -> None:
    damaged = finished.with_name("damaged")
    shutil.copytree(finished, damaged)
    checkpoint = damaged / "checkpoints" / "step-00000002"
    if damage == "no checkpoint":
        checkpoint.rename(checkpoint.with_name("step-00000002.part"))
    elif damage == "garbled state":
        (checkpoint / "state.json").write_text('{"step"')
    elif damage == "state without a plan":
        (checkpoint / "state.json").write_text("{}")
    else:
        for path in checkpoint.glob("*.distcp"):
            path.unlink()
    where = (f"run.dir={damaged.parent}", "run.id=damaged", "run.resume=true")
    ended = entries.run("image_classification", folder / "images.yaml", *where)
    shutil.rmtree(damaged)
    assert_refused(ended, line)


def test_a_run_that_is_resumed_with_other_settings_says_so(entries: EntryServer, folder: Path, finished: Path) -> None:
    other = finished.with_name("other")
    shutil.copytree(finished, other)
    where = (f"run.dir={other.parent}", "run.id=other", "run.resume=true", "train.lr=0.5", "train.epochs=2")
    ended = entries.run("image_classification", folder / "images.yaml", *where)
    assert ended.exit_code == 0
    assert "resumed with another setting: train.lr was 0.001 and is 0.5 now" in ended.out


def test_a_saved_configuration_can_be_used_again(entries: EntryServer, folder: Path, finished: Path) -> None:
    """It says nothing of what belonged to one launch alone: it would overwrite its own run."""
    again = finished.with_name("once_more")
    shutil.copytree(finished, again)
    where = (f"run.dir={again.parent}", "run.id=once_more")
    overwritten = entries.run("image_classification", folder / "images.yaml", *where, "run.overwrite=true")
    assert overwritten.exit_code == 0
    before = content(again)
    assert_refused(entries.run("image_classification", again / "config.yaml"), "once_more exists; continue it with")
    assert content(again) == before


def test_a_run_that_another_job_is_at_is_left_alone(entries: EntryServer, folder: Path, finished: Path) -> None:
    where = (f"run.dir={finished.parent}", f"run.id={finished.name}", "run.overwrite=true")
    before = content(finished)
    with (finished / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        ended = entries.run("image_classification", folder / "images.yaml", *where)
    assert_refused(ended, "run.id: another job is at work in")
    assert content(finished) == before


def test_a_policy_that_is_never_asked_says_so(entries: EntryServer, clean: Path) -> None:
    late = ("freeze.policy=schedule", "freeze.warmup=5 epochs")
    ended = entries.run("image_classification", clean / "images.yaml", *late)
    assert ended.exit_code == 0
    assert "nothing will freeze: freeze.warmup, freeze.every and freeze.patience leave too few decisions" in ended.out


def test_what_is_saved_is_as_readable_as_other_files(finished: Path) -> None:
    umask = os.umask(0)
    os.umask(umask)
    files = [path for path in (finished / "model").rglob("*") if path.is_file()]
    assert files and all(path.stat().st_mode & 0o777 == 0o666 & ~umask for path in files)


def test_only_the_folder_of_a_run_is_overwritten(entries: EntryServer, folder: Path) -> None:
    where = (f"run.dir={folder}", "run.id=not_a_run", "run.overwrite=true")
    ended = entries.run("image_classification", folder / "images.yaml", *where)
    assert_refused(ended, "not_a_run is not the folder of a run; delete it yourself, or give another id")
    assert (folder / "not_a_run" / "thesis.txt").exists()


def test_a_run_is_overwritten_on_request(entries: EntryServer, folder: Path, finished: Path) -> None:
    again = finished.with_name("again")
    shutil.copytree(finished, again)
    (again / "old").touch()
    where = (f"run.dir={again.parent}", "run.id=again", "run.overwrite=true")
    assert entries.run("image_classification", folder / "images.yaml", *where).exit_code == 0
    assert (again / "summary.json").exists()
    assert not (again / "old").exists()


# ---- several ranks ---------------------------------------------------------------------------------------------------


def refusal(world: World, config: str, overrides: list[str]) -> str | None:
    from pipetransformer.trainer import Trainer

    try:
        Trainer(load_config(config, overrides), world, timed=False).run()
    except UserError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("num_ranks", "overrides", "line"),
    [
        (2, ["pipe.initial_length=3"], "pipe.initial_length: 3 does not divide the world size 2; give one of 1, 2"),
        (
            *(4, ["pipe.initial_length=4", "model.kwargs.depth=1"]),
            "pipe.initial_length: 4 exceeds the 3 units (stem, blocks, head) of the model; give at most 3",
        ),
        (4, ["train.batch_size=3"], "train.batch_size: 3 is smaller than dp x M = 4 x 1; give at least 4"),
        (2, ["pipe.microbatches=20"], "train.batch_size: 32 is smaller than dp x M = 2 x 20; give at least 40"),
        (
            *(2, ["pipe.initial_length=2", "pipe.microbatches=1"]),
            "pipe.microbatches: 1 is not allowed; schedule 1f1b over 2 ranks takes 2 or more, "
            "give that, or another pipe.initial_length",
        ),
        (2, ["run.replay=FOLDER/before/x/events.jsonl"], "was recorded with 1 ranks and this job has 2"),
    ],
)
def test_all_ranks_refuse_alike(
    ranks: RankPool, clean: Path, finished: Path, num_ranks: int, overrides: list[str], line: str
) -> None:
    overrides = [override.replace("FOLDER", str(clean)) for override in overrides]
    told = ranks.run(num_ranks, refusal, str(clean / "images.yaml"), overrides)
    assert len(set(told)) == 1
    assert line in str(told[0])
    assert not (clean / "runs").exists()


def launched(*arguments: str, ranks: int = 2, port: int | None = None) -> subprocess.CompletedProcess[str]:
    """The command line of the original, for real."""
    command = ["sh", "run_pipetransformer.sh", str(ranks), "1", "0", "127.0.0.1", str(port or free_port()), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_a_launched_job_tells_what_every_rank_found_once(folder: Path) -> None:
    done = launched(str(folder / "texts.yaml"), "bad", f"data.path={folder / 'third_label'}")
    (line,) = done.stderr.splitlines()
    assert line.endswith("third_label/dev.tsv:3: label '2' is not allowed; give 0 or 1")
    assert done.returncode == 1
    assert not (folder / "runs").exists()


def test_a_launched_job_tells_a_mistake_in_the_configuration_before_it_starts(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        in_use = launched(str(folder / "images.yaml"), "bad", port=port)
        misspelt = launched(str(folder / "images.yaml"), "bad", "pipe.shedule=gpipe", port=port)
    assert (in_use.returncode, in_use.stderr) == (2, f"error: MASTER_PORT: {port} is in use; give another\n")
    assert misspelt.stderr == "error: pipe.shedule: no such key; did you mean pipe.schedule?\n"
    assert misspelt.returncode == 2


# ---- a loss that is not finite ---------------------------------------------------------------------------------------


ONE_STEP = ("train.batch_size=64", "train.epochs=1")


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["train.lr=1e30"], "step 1, rank 0: the loss is not finite; there is no checkpoint; lower train.lr, or set"),
        (["train.lr=1e30", "log.every=1", "train.optimizer=sgd"], "step 1, rank 0: the loss is not finite; there is"),
        (
            ["train.lr=1e20", *ONE_STEP, "train.optimizer=sgd"],
            "step 0, rank 0: the evaluation loss is not finite; there is no",
        ),
        (["train.lr=1e38", *ONE_STEP], "step 0, rank 0: the update made weights that are not finite; there is no"),
    ],
)
def test_a_loss_that_is_not_finite_ends_the_run(
    entries: EntryServer, clean: Path, overrides: list[str], line: str
) -> None:
    ended = entries.run("image_classification", clean / "images.yaml", *overrides)
    assert_refused(ended, line)
    assert list((clean / "runs" / "x").glob("model/best/*")) == []
    assert list((clean / "runs" / "x").glob("checkpoints/*")) == []


def test_the_last_good_checkpoint_is_named(entries: EntryServer, clean: Path) -> None:
    """Trains an epoch well, and goes on with a learning rate that no model survives."""
    images, where = clean / "images.yaml", clean / "runs" / "x"
    well = ("train.epochs=4", "train.lr_schedule=constant", "checkpoint.every=1 epoch", "checkpoint.keep=9")
    assert entries.run("image_classification", images, *well).exit_code == 0
    for path in (where / "checkpoints").iterdir():
        if path.name != "step-00000004":
            shutil.rmtree(path)
    (where / "summary.json").unlink()
    before = content(where / "model" / "best")
    ended = entries.run("image_classification", images, *well, "run.resume=true", "train.lr=1e30")
    latest = where / "checkpoints" / "step-00000004"
    assert_refused(ended, f"step 5, rank 0: the loss is not finite; the last good checkpoint is {latest}; lower ")
    assert content(where / "model" / "best") == before
    assert list((where / "checkpoints").iterdir()) == [latest]


def test_a_second_call_in_the_same_process_tells_of_its_own_mistake(folder: Path) -> None:
    code = """
        import sys
        from pipetransformer.launch.entry import main
        for _ in range(2):
            main("image_classification", [sys.argv[1], "model.kwargs={depth: 2, no_such: 1}", "run.dir=runs"])
        """
    command = [sys.executable, "-c", textwrap.dedent(code), str(folder / "images.yaml")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    lines = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 2 and lines[0] == lines[1] and "no_such" in lines[0], ended.stderr
