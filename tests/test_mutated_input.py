"""Configurations and data sets with random mistakes: a run, or one line; no traceback, no hang, no half-made folder.

All are drawn from a seed, which a failure tells.
"""

from __future__ import annotations

import itertools
import json
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from test_readers import OFFICIAL, pictures, texts, write_archive, write_glue, write_table
from test_squad import QUESTIONS, article, settings, write
from tiny import tiny_tokenizer

from pipetransformer.config import load_config
from pipetransformer.data import load_squad
from pipetransformer.errors import UserError

CONFIGS = sorted((Path(__file__).parent.parent / "config").glob("train_config_*.yaml"))
SECONDS = 3  # for one configuration, or one data set
BYTES = (b"\x00", b"\xff", b"\t", b"\n", b'"', b":", b"-", b"{", b"[", b"&a ", b"*a", b"!!int ", b"%", b"9" * 30, b"\r")


@contextmanager
def in_time(seconds: int) -> Iterator[None]:
    def ring(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"it took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def mutated(content: bytes, draws: random.Random) -> bytes:
    """One to four mistakes: bytes deleted, doubled, put in, swapped or cut off."""
    for _ in range(draws.randint(1, 4)):
        if not content:
            return b"\x00"
        start = draws.randrange(len(content))
        stop = min(len(content), start + draws.choice((1, 1, 2, 5, 20, 80)))
        content = draws.choice(
            (
                content[:start] + content[stop:],
                content[:stop] + content[start:],
                content[:start] + draws.choice(BYTES) + content[start:],
                content[:start] + bytes(reversed(content[start:stop])) + content[stop:],
                content[:start] + bytes([content[start] ^ (1 << draws.randrange(8))]) + content[start + 1 :],
                content[:start],
            )
        )
    return content


def judged(load: Callable[[], object], what: str) -> bool:
    """Whether it is taken. Raises AssertionError unless what is refused is refused in one line."""
    try:
        with in_time(SECONDS):
            load()
    except UserError as error:
        said = str(error)
        assert said and "\n" not in said and len(said) < 1500, f"{what}: {said[:2000]!r}"
        return False
    except BaseException as error:
        raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
    return True


@pytest.mark.parametrize("seeds", [range(first, first + 100) for first in range(0, 1000, 100)], ids=str)
def test_a_configuration_with_mistakes(seeds: range, tmp_path: Path) -> None:
    path, taken = tmp_path / "config.yaml", 0
    for seed in seeds:
        draws = random.Random(seed)
        path.write_bytes(mutated(draws.choice(CONFIGS).read_bytes(), draws))
        taken += judged(lambda: load_config(path), f"seed {seed}")
    assert taken < len(seeds), "mistakes are found"


SMALL = (
    "model.kwargs={patch_size: 2, in_chans: 1, embed_dim: 16, depth: 2, num_heads: 2}",
    *("data.max_train_samples=32", "data.max_eval_samples=16", "train.epochs=1", "train.batch_size=16", "run.id=x"),
    *("train.eval_every=1 epoch", "log.every=1", "checkpoint.every=1 epoch", "freeze.every=1 step"),
)


@pytest.mark.full
@pytest.mark.parametrize("seeds", [range(first, first + 40) for first in (5000, 6000)], ids=str)
def test_what_is_taken_with_mistakes_is_run(seeds: range, tmp_path: Path) -> None:
    """Or refused later, in one line, without a folder."""
    from benchmarks.soak.forked import ForkedJob, running

    path, ends = tmp_path / "config.yaml", list[int]()
    whole = (CONFIGS[0].parent / "train_config_digits_all_in_one.yaml").read_bytes()
    for seed in seeds:
        path.write_bytes(mutated(whole, random.Random(seed)))
        arguments = [str(path), *SMALL, f"run.dir={tmp_path / str(seed)}"]
        if not judged(partial(load_config, path, arguments[1:]), f"seed {seed}"):
            continue
        job = ForkedJob(load_config(path).task, arguments, num_ranks=1)
        with running(job):
            ended = job.supervise(timeout=60.0)
        ends.append(ended.exit_code)
        assert ended.exit_code in (0, 2), f"seed {seed}: {ended.cause}"
        left = (tmp_path / str(seed) / "x" / "summary.json").is_file()
        assert left == (ended.exit_code == 0) and ("\n" not in ended.cause), f"seed {seed}: {ended.cause}"
    assert ends.count(0) > 3


# ---- data sets -------------------------------------------------------------------------------------------------------

ROWS = [{"one": f"the film {n}", "two": "is good", "mood": "good" if n % 2 else "bad"} for n in range(6)]
COLUMNS = {"text_columns": ("one", "two"), "label_column": "mood"}


def table(suffix: str) -> Callable[[Path], Callable[[], object]]:
    def made(folder: Path) -> Callable[[], object]:
        for name in ("train", "dev"):
            write_table(folder / f"{name}.{suffix}", ROWS)
        return lambda: texts("table", folder, **COLUMNS)

    return made


def glue(name: str) -> Callable[[Path], Callable[[], object]]:
    def made(folder: Path) -> Callable[[], object]:
        write_glue(name, folder)
        return lambda: texts(name, folder)

    return made


def squad(folder: Path) -> Callable[[], object]:
    write(folder, [article(*QUESTIONS)])
    return lambda: load_squad(settings(folder), tokenizer=tiny_tokenizer())


def archive(packed: bool) -> Callable[[Path], Callable[[], object]]:
    def made(folder: Path) -> Callable[[], object]:
        write_archive(folder, "cifar10")
        if packed:
            import shutil
            import tarfile

            with tarfile.open(folder / "cifar-10-python.tar.gz", "w:gz") as file:
                file.add(folder / "cifar-10-batches-py", arcname="cifar-10-batches-py")
            shutil.rmtree(folder / "cifar-10-batches-py")
        return lambda: pictures("cifar10", folder)

    return made


def parquet(folder: Path) -> Callable[[], object]:
    pixels = np.random.default_rng(0).integers(0, 256, (4, 8, 8, 3), dtype=np.uint8)
    encoded = []
    for number, each in enumerate(pixels):
        Image.fromarray(each).save(folder / f"{number}.png")
        encoded.append({"bytes": (folder / f"{number}.png").read_bytes(), "path": None})
        (folder / f"{number}.png").unlink()
    for name in ("train", "test"):
        pq.write_table(pa.table({"img": encoded, "fine_label": [0, 1, 2, 3]}), folder / f"{name}.parquet")
    return lambda: pictures("cifar100", folder)


def image_folder(folder: Path) -> Callable[[], object]:
    for split, name, number in itertools.product(("train", "val"), ("cat", "dog"), range(2)):
        path = folder / split / name / f"{number}.{'png' if number else 'jpg'}"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (9, 7), (number, 9, 99)).save(path)
    return lambda: pictures("image_folder", folder)


DATA: dict[str, Callable[[Path], Callable[[], object]]] = {
    **{f"table.{suffix}": table(suffix) for suffix in ("csv", "tsv", "jsonl", "json", "parquet")},
    **{name: glue(name) for name in OFFICIAL},
    "squad": squad,
    "cifar10": archive(packed=False),
    "cifar10, packed": archive(packed=True),
    "cifar100.parquet": parquet,
    "image_folder": image_folder,
}


@pytest.mark.parametrize("name", DATA)
def test_data_with_mistakes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prepared data go to a folder of their own, which holds whole entries alone."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("PIPETRANSFORMER_CACHE", str(cache))
    for seed in range(20):
        draws, folder = random.Random(f"{name} {seed}"), tmp_path / str(seed)
        folder.mkdir()
        load = DATA[name](folder)
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        for path in draws.sample(files, draws.randint(1, min(2, len(files)))):
            path.write_bytes(mutated(path.read_bytes(), draws))
        judged(load, f"{name}, seed {seed}")
        left = list(cache.iterdir()) if cache.exists() else []
        assert not [path for path in left if path.suffix == ".part"], "a half-made folder"
        for entry in left:
            assert (entry / "digest").is_file(), json.dumps([str(path) for path in entry.iterdir()])
