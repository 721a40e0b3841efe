"""CIFAR-100 in two halves of its classes: a ViT is pre-trained on one, once, so that the other can be its new task.

The pre-trained model lies in the project's cache folder, under the digest of all that it depends on, and without its
head: timm keeps a head that has as many classes as the new task, whichever they are.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.elastic.processes import launch
from benchmarks.support.git import ROOT
from benchmarks.support.kept import key_of
from benchmarks.support.measure import CONFIGS, environment
from pipetransformer.config import DataConfig
from pipetransformer.data.info import describe
from pipetransformer.data.prepared import cache_folder, file_digest
from pipetransformer.data.reading import one_line, table_labels
from pipetransformer.errors import UserError, check_folder, writing
from pipetransformer.process.shutdown import cleaned_up

__all__ = ["SPLIT_SEED", "Pretrained", "class_names", "class_split", "pretrained", "without_head", "write_classes"]

Part = Literal["all", "judged", "tuned"]
SPLIT_SEED = 0
# A split of the copy: the split of CIFAR-100 that it comes from, and the places of its classes' pictures there.
_PARTS: Mapping[Part, Mapping[str, tuple[str, slice]]] = {
    "all": {"train": ("train", slice(None)), "test": ("test", slice(None))},
    "judged": {"train": ("train", slice(12_500)), "test": ("test", slice(None))},
    "tuned": {"train": ("train", slice(12_500, 22_500)), "test": ("train", slice(22_500, None))},
}
EPOCHS, RANKS = 12, 2  # of the pre-training, on 25,000 pictures
CONFIG = CONFIGS / "train_config_cifar100_no_freeze.yaml"
SETTINGS = (
    *("model.name=vit_tiny_patch16_224", "model.pretrained=false", "data.image_size=32", "data.augment=basic"),
    "model.kwargs={patch_size: 4, embed_dim: 96, depth: 12, num_heads: 3}",
    *(f"train.epochs={EPOCHS}", "train.batch_size=128", "train.optimizer=adamw", "train.lr=1e-3"),
    *("train.lr_schedule=cosine", "train.warmup_ratio=0.05", "train.weight_decay=0.05", "train.label_smoothing=0"),
    *("train.seed=0", "train.eval_every=1000 epochs", "freeze.policy=none", "cache.enabled=false"),
    # Else timings decide how sums are ordered. Without them attention would stay in bfloat16, which some processors
    # compute far slower: in float32, up to the 65 positions that a picture has.
    *("pipe.initial_length=1", "pipe.measure=false", "train.wide_attention=65"),
    *("checkpoint.every=null", "log.wandb=disabled", "log.every=1000"),
)
_KEY = "PIPETRANSFORMER_CACHE"
_WEIGHTS, _TOLD = "model.safetensors", "pretraining.json"
_COLUMNS = ("img", "fine_label")


@dataclass(frozen=True, slots=True)
class Pretrained:
    """A model without a head, in a folder of timm's layout.

    Attributes:
        digest: of its weights.
        accuracy: with its head, on the test pictures of its own classes.
    """

    folder: Path
    digest: str
    accuracy: float


def class_split(num_classes: int, *, seed: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two halves of the classes' numbers, each ascending: to pre-train on, and the others."""
    # RandomState, because its stream is frozen for good.
    order = np.random.RandomState(seed).permutation(num_classes).tolist()
    return tuple(sorted(order[: num_classes // 2])), tuple(sorted(order[num_classes // 2 :]))


def class_names(source: Path) -> tuple[str, ...]:
    """Raises UserError where CIFAR-100 is not there."""
    _files(source, "train")
    return describe(DataConfig(name="cifar100", path=str(source))).label_names


def write_classes(source: Path, target: Path, *, classes: Sequence[int], part: Part = "all") -> str:
    """Writes ``target/train.parquet`` and ``target/test.parquet``: the pictures of some classes, in their order.

    Args:
        source: CIFAR-100's parquet files.
        classes: ascending; a class gets its place in them as its number.
        part: ``judged``: all test pictures and 12,500 to train on; ``tuned``: 10,000 and 2,500 others to train on and
            to choose a recipe by, all of them training pictures, so that nothing is chosen by what it is judged by.

    Returns:
        The digest of pictures and numbers, in hex.

    Raises:
        UserError: a file is missing, or cannot be read.
    """
    names, digest = class_names(source), hashlib.sha256()
    told = {"info": {"features": {"fine_label": {"names": [names[one] for one in classes], "_type": "ClassLabel"}}}}
    with writing(target, key="TMPDIR"):
        target.mkdir(parents=True)
        for split, (origin, places) in _PARTS[part].items():
            table, path = _table(source, origin)
            labels = table_labels(table["fine_label"], name="fine_label", num_labels=len(names), source=path)
            rows = np.flatnonzero(np.isin(labels, classes))[places]
            pictures, numbers = table["img"].take(pa.array(rows)), np.searchsorted(classes, labels[rows])
            digest.update(f"{split} {len(rows)} {numbers.tolist()}".encode())
            for chunk in pictures.chunks:
                for encoded in chunk.field("bytes").to_pylist():
                    digest.update(encoded or b"")
            written = pa.table({"img": pictures, "fine_label": pa.array(numbers, pa.int64())})
            pq.write_table(
                written.replace_schema_metadata({"huggingface": json.dumps(told)}), target / f"{split}.parquet"
            )
    return digest.hexdigest()


def pretrained(source: Path, *, classes: Sequence[int], precision: str, scratch: Path) -> Pretrained:
    """The model that is kept, or a new one, which takes its time.

    Args:
        source: CIFAR-100's parquet files.
        classes: to train on, ascending.
        scratch: a folder for what is needed meanwhile.

    Raises:
        UserError: the pictures cannot be read, the cache's folder cannot be written, or the training fails; or what is
            kept is damaged.
    """
    data = scratch / "pre-training"
    content = write_classes(source, data, classes=classes)
    settings = (*SETTINGS, f"train.precision={precision}")
    versions = [environment()[name] for name in ("torch", "timm")]
    # Whatever code has trained it, it is a model to begin with; all figures have the digest of its weights.
    folder = cache_folder() / f"elastic-cifar100-{key_of([settings, RANKS, content, versions], code=())}"
    if not folder.is_dir():
        check_folder(folder.parent, key=_KEY)
        print(f"pre-training on {len(classes)} classes, {EPOCHS} epochs; to be kept in {folder}", flush=True)
        place = (f"data.path={data}", f"run.dir={scratch / 'runs'}", "run.id=pre-training")
        script = [str(ROOT / "main_cv.py"), str(CONFIG)]
        launch([*script, *settings, *place], ranks=RANKS, name="the pre-training of --cifar100")
        run = scratch / "runs" / "pre-training"
        accuracy = json.loads((run / "summary.json").read_text())["metrics"]["accuracy"]
        keep(run / "model" / "final", folder, accuracy=accuracy)
    return read(folder)


def keep(saved: Path, folder: Path, *, accuracy: float) -> None:
    """Makes ``folder`` of a saved model, whole or not at all: another job may be making the same."""
    with writing(folder, key=_KEY):
        part = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", suffix=".part", dir=folder.parent))
        with cleaned_up(partial(shutil.rmtree, part, ignore_errors=True)):
            without_head(saved, part)
            told = {"weights": file_digest(part / _WEIGHTS), "accuracy": accuracy}
            (part / _TOLD).write_text(json.dumps(told) + "\n", encoding="ascii")
            try:
                part.rename(folder)
            except OSError:
                if not folder.is_dir():  # else another job was faster
                    raise


def read(folder: Path) -> Pretrained:
    """What ``keep`` made. Raises UserError where it is damaged."""
    try:
        told = json.loads((folder / _TOLD).read_text(encoding="ascii"))
        digest = file_digest(folder / _WEIGHTS)
        assert told["weights"] == digest
        return Pretrained(folder, digest, float(told["accuracy"]))
    except (OSError, ValueError, KeyError, TypeError, AssertionError) as error:
        raise UserError(f"{_KEY}: {folder} is damaged; delete it, and the model is trained anew") from error


def without_head(saved: Path, target: Path) -> None:
    """Writes a saved model into ``target`` as timm saves one of no classes: a new head, of whatever number, is made."""
    from safetensors.torch import load_file, save_file

    config = json.loads((saved / "config.json").read_text())
    told: Mapping[str, object] = config["pretrained_cfg"]
    weights = load_file(saved / _WEIGHTS)
    body = {name: weight for name, weight in weights.items() if not name.startswith(f"{told['classifier']}.")}
    del config["label_names"]
    headless = {**config, "num_classes": 0, "pretrained_cfg": {**told, "num_classes": 0}}
    (target / "config.json").write_text(json.dumps(headless, indent=2) + "\n")
    save_file(body, target / _WEIGHTS)


def _table(source: Path, split: str) -> tuple[pa.Table, Path]:
    """The columns that are needed, and the file that stands for all of the split: ``source/SPLIT.parquet``."""
    tables = []
    for path in _files(source, split):
        try:
            table = pq.read_table(path, columns=list(_COLUMNS), partitioning=None)
            table["img"].type.field("bytes")  # an error where pictures are stored in another way
            tables.append(table.select(list(_COLUMNS)))
        except (pa.ArrowException, OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise UserError(f"--cifar100: {path} cannot be read as a file of CIFAR-100 ({one_line(error)})") from error
    return pa.concat_tables(tables), source / f"{split}.parquet"


def _files(source: Path, split: str) -> list[Path]:
    whole = source / f"{split}.parquet"
    files = [whole] if whole.is_file() else sorted(source.glob(f"{split}-*.parquet"))
    if not files:
        wanted = f"{split}.parquet nor {split}-*.parquet"
        raise UserError(f"--cifar100: {source} holds neither {wanted}; give the folder of CIFAR-100's parquet files")
    return files
