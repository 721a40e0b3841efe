"""CIFAR-10 and CIFAR-100 (Krizhevsky 2009): the official python archives, parquet files, or the hub."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import tarfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from pipetransformer.config import DataConfig
from pipetransformer.data.prepared import file_digest
from pipetransformer.data.reader import PictureReader, PictureSplit
from pipetransformer.data.reading import hub_table, locate, one_line, require_columns, table_labels
from pipetransformer.errors import UserError

CIFAR10_NAMES = tuple("airplane automobile bird cat deer dog frog horse ship truck".split())  # noqa: SIM905
_MODES = {1: "L", 3: "RGB"}

# The official fine labels: their order (alphabetical) is their number.
CIFAR100_NAMES = tuple(
    """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can
    castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin
    elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster
    man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck
    pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk
    skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger
    tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm
    """.split()  # noqa: SIM905  A hundred quoted names would read worse.
)


@dataclass(frozen=True, slots=True)
class Cifar:
    """One of the two datasets.

    Attributes:
        hub_id, label: its place on the hub, and the column of the class there and in parquet files.
        archive, key: folder of the official archive, and the entry of the class in it.
        batches: files of the archive, by split.
    """

    names: tuple[str, ...]
    hub_id: str
    label: str
    archive: str
    key: str
    batches: Mapping[str, tuple[str, ...]]


CIFAR = {
    "cifar10": Cifar(
        names=CIFAR10_NAMES,
        hub_id="uoft-cs/cifar10",
        label="label",
        archive="cifar-10-batches-py",
        key="labels",
        batches={"train": tuple(f"data_batch_{n}" for n in range(1, 6)), "eval": ("test_batch",)},
    ),
    "cifar100": Cifar(
        names=CIFAR100_NAMES,
        hub_id="uoft-cs/cifar100",
        label="fine_label",
        archive="cifar-100-python",
        key="fine_labels",
        batches={"train": ("train",), "eval": ("test",)},
    ),
}


class CifarReader(PictureReader):
    def __init__(self, data: DataConfig) -> None:
        super().__init__(data)
        self.names = CIFAR[data.name].names

    def label_names(self) -> tuple[str, ...]:
        return cifar_label_names(self.data.name, self._location())

    def read(self, wanted: PictureSplit) -> dict[str, np.ndarray]:
        return read_cifar(
            self.data.name,
            self._location(),
            split=wanted.split,
            label_names=wanted.label_names,
            max_samples=wanted.max_samples,
            channels=wanted.channels,
        )

    def digest(self, wanted: PictureSplit) -> object:
        """Of the files, or of the hub's content, which may change under its id and is read each time."""
        name, location = self.data.name, self._location()
        if not isinstance(location, Path):
            return hub_digest(name, location, split=wanted.split, max_samples=wanted.max_samples)
        files = cifar_files(name, location, split=wanted.split)
        return tuple(file_digest(path) for path in files if path.is_file())

    def _location(self) -> Path | str:
        return locate(self.data, default_hub_id=CIFAR[self.data.name].hub_id)


def cifar_label_names(name: str, location: Path | str) -> tuple[str, ...]:
    """The class names in a local parquet file's metadata, where ``datasets`` puts them, else the official ones."""
    cifar = CIFAR[name]
    if isinstance(location, str) or _archive(location, cifar) is not None:
        return cifar.names
    path = _parquet_files(location, "train")[0]
    try:
        metadata = pq.read_schema(path).metadata or {}
        names = json.loads(metadata[b"huggingface"])["info"]["features"][cifar.label]["names"]
    except (pa.ArrowInvalid, OSError) as error:
        raise _unreadable(path, error) from error
    except (KeyError, TypeError, ValueError):
        return cifar.names
    return tuple(map(str, names))


def cifar_files(name: str, location: Path, *, split: str) -> list[Path]:
    """The local files that a split is read from."""
    cifar = CIFAR[name]
    archive = _archive(location, cifar)
    if archive is None:
        return _parquet_files(location, "train" if split == "train" else "test")
    return [archive / batch for batch in cifar.batches[split]] if archive.is_dir() else [archive]


def read_cifar(
    name: str,
    location: Path | str,
    *,
    split: str,
    label_names: tuple[str, ...],
    max_samples: int | None,
    channels: int,
) -> dict[str, np.ndarray]:
    """``pictures`` uint8 ``[num_samples, channels, 32, 32]`` and ``labels`` int64 of the first ``max_samples`` rows.

    The leading rows are a fair sample, because the files are shuffled already; rows after them are not decoded.

    Args:
        location: a local folder of parquet files or of the archive (unpacked or not), or a hub id.
    """
    cifar, part = CIFAR[name], "train" if split == "train" else "test"
    if isinstance(location, str):
        table = _hub_table(location, cifar, part=part, max_samples=max_samples)
        tables = iter([(f"{location} ({part})", table)])
    elif (archive := _archive(location, cifar)) is not None:
        return _from_archive(archive, cifar, split=split, max_samples=max_samples, channels=channels)
    else:
        tables = _local_tables(location, part, columns=("img", cifar.label), max_samples=max_samples)
    pictures: list[np.ndarray] = []
    labels: list[np.ndarray] = []
    for source, table in tables:
        labels.append(table_labels(table[cifar.label], name=cifar.label, num_labels=len(label_names), source=source))
        for row, encoded in enumerate(_encoded(table["img"], source=source)):
            picture = _decoded(encoded, mode=_MODES[channels], source=source, row=row)
            if pictures and picture.shape != pictures[0].shape:
                sizes = [f"{width} x {height}" for height, width in (picture.shape[:2], pictures[0].shape[:2])]
                raise UserError(f"{source}: row {row}: the picture is {sizes[0]}, not {sizes[1]} like those before")
            pictures.append(picture)
    if not pictures:
        raise UserError(f"{location} ({part}): holds no samples; at least 1 is needed")
    stacked = np.stack(pictures).reshape(len(pictures), *pictures[0].shape[:2], channels)
    return {"pictures": np.ascontiguousarray(stacked.transpose(0, 3, 1, 2)), "labels": np.concatenate(labels)}


def hub_digest(name: str, location: str, *, split: str, max_samples: int | None) -> str:
    """SHA-256 of what the hub gives for a split, pictures still encoded."""
    cifar, part = CIFAR[name], "train" if split == "train" else "test"
    table = _hub_table(location, cifar, part=part, max_samples=max_samples)
    digest = hashlib.sha256(repr(table[cifar.label].to_pylist()).encode())
    for encoded in _encoded(table["img"], source=f"{location} ({part})"):
        digest.update(encoded or b"")
    return digest.hexdigest()


def _hub_table(location: str, cifar: Cifar, *, part: str, max_samples: int | None) -> pa.Table:
    columns = ("img", cifar.label)
    return hub_table(location, config_name=None, split=part, columns=columns, max_samples=max_samples)


def _archive(folder: Path, cifar: Cifar) -> Path | None:
    """The unpacked official archive in ``folder`` (or ``folder`` itself), or the packed one."""
    for found in (folder / cifar.archive, folder):
        if (found / cifar.batches["eval"][0]).is_file() and not (found / "test.parquet").is_file():
            return found
    packed = folder / f"{cifar.archive.replace('-batches-py', '-python')}.tar.gz"
    return packed if packed.is_file() else None


def _from_archive(
    archive: Path, cifar: Cifar, *, split: str, max_samples: int | None, channels: int
) -> dict[str, np.ndarray]:
    pictures: list[np.ndarray] = []
    labels: list[int] = []
    for batch in cifar.batches[split]:
        if max_samples is not None and len(labels) >= max_samples:
            break
        source = f"{archive}/{batch}"
        content = _unpickled(_batch_bytes(archive, cifar, batch), source=source)
        try:
            data, numbers = np.asarray(content[b"data"]), [int(number) for number in content[cifar.key.encode()]]
            pictures.append(data.reshape(len(numbers), 3, 32, 32).astype(np.uint8, copy=False))
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{source}: is not as CIFAR's archives are ({type(error).__name__}: {error})") from error
        if not all(0 <= number < len(cifar.names) for number in numbers):
            raise UserError(f"{source}: a label is not allowed; give 0 to {len(cifar.names) - 1}")
        labels += numbers
    table = np.concatenate(pictures)[:max_samples]
    if not len(table):
        raise UserError(f"{archive} ({split}): holds no samples; at least 1 is needed")
    if channels == 1:
        grey = [np.asarray(Image.fromarray(picture.transpose(1, 2, 0)).convert("L")) for picture in table]
        table = np.stack(grey)[:, None]
    return {"pictures": table, "labels": np.array(labels[:max_samples], dtype=np.int64)}


def _batch_bytes(archive: Path, cifar: Cifar, batch: str) -> bytes:
    try:
        if archive.is_dir():
            return (archive / batch).read_bytes()
        with tarfile.open(archive) as packed:
            member = packed.extractfile(f"{cifar.archive}/{batch}")
            assert member is not None
            return member.read()
    except (OSError, tarfile.TarError, KeyError, EOFError, AssertionError, zlib.error) as error:
        raise UserError(f"{archive}/{batch}: cannot be read ({one_line(error)})") from error


class _PlainUnpickler(pickle.Unpickler):
    """Loads numbers, texts, lists, dicts and numpy arrays; whatever else a pickle names is refused, never called."""

    _ALLOWED = frozenset(
        {
            *(("numpy.core.multiarray", name) for name in ("_reconstruct", "scalar")),
            *(("numpy._core.multiarray", name) for name in ("_reconstruct", "scalar")),
            *(("numpy", name) for name in ("ndarray", "dtype")),
            ("_codecs", "encode"),
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._ALLOWED:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no CIFAR archive does")
        return super().find_class(module, name)


def _unpickled(content: bytes, *, source: str) -> dict[bytes, Any]:
    try:
        loaded = _PlainUnpickler(io.BytesIO(content), encoding="bytes").load()
    except Exception as error:  # a damaged pickle raises anything
        raise UserError(f"{source}: cannot be read ({type(error).__name__}: {one_line(error)})") from error
    if not isinstance(loaded, dict):
        raise UserError(f"{source}: is not as CIFAR's archives are (no dictionary)")
    return loaded


def _parquet_files(folder: Path, split: str) -> list[Path]:
    whole = folder / f"{split}.parquet"
    files = [whole] if whole.is_file() else sorted(folder.glob(f"{split}-*.parquet"))
    if not files:
        raise UserError(
            f"data.path: {folder} holds neither {split}.parquet nor {split}-*.parquet, nor the official archive"
        )
    return files


def _local_tables(
    folder: Path, split: str, *, columns: tuple[str, str], max_samples: int | None
) -> Iterator[tuple[str, pa.Table]]:
    """The first ``max_samples`` rows, file by file, with each file's name."""
    for path in _parquet_files(folder, split):
        try:
            table = _leading_rows(path, columns, max_samples)
        except (pa.ArrowInvalid, OSError) as error:
            raise _unreadable(path, error) from error
        yield str(path), table
        if max_samples is not None:
            max_samples -= len(table)
            if not max_samples:
                return


def _leading_rows(path: Path, columns: tuple[str, str], max_samples: int | None) -> pa.Table:
    with pq.ParquetFile(path) as file:
        require_columns(file.schema_arrow.names, columns, source=path)
        num_groups = file.num_row_groups
        if max_samples is not None:
            ends = np.cumsum([file.metadata.row_group(group).num_rows for group in range(num_groups)])
            num_groups = min(num_groups, int(np.searchsorted(ends, max_samples)) + 1)
        return file.read_row_groups(range(num_groups), columns=list(columns)).slice(0, max_samples)


def _unreadable(path: Path, error: Exception) -> UserError:
    return UserError(f"{path}: not a readable parquet file ({one_line(error)})")


def _encoded(column: pa.ChunkedArray, *, source: str) -> list[bytes | None]:
    if not (pa.types.is_struct(column.type) and column.type.get_field_index("bytes") >= 0):
        raise UserError(f"{source}: column img is {column.type}; a struct with the encoded picture in bytes is needed")
    return [encoded for chunk in column.chunks for encoded in chunk.field("bytes").to_pylist()]


def _decoded(encoded: bytes | None, *, mode: str, source: str, row: int) -> np.ndarray:
    """One picture, uint8 ``[height, width]`` or ``[height, width, 3]``.

    Threads do not help: at this size most of the time is Python's own.
    """
    if encoded is None:
        raise UserError(f"{source}: row {row}: there is no picture")
    try:
        return np.asarray(Image.open(io.BytesIO(encoded)).convert(mode))
    except Exception as error:  # Pillow's decoders raise whatever their formats' parsers meet.
        raise UserError(f"{source}: row {row}: the picture cannot be decoded ({one_line(error)})") from error
