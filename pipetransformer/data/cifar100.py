"""CIFAR-100 from local parquet files or the hub: encoded pictures in ``img``, classes in ``fine_label``."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from pipetransformer.data.sources import hub_table, one_line, require_columns, table_labels
from pipetransformer.errors import UserError

__all__ = ["CIFAR100_HUB_ID", "CIFAR100_NAMES", "cifar100_label_names", "read_cifar100"]

CIFAR100_HUB_ID = "uoft-cs/cifar100"
_COLUMNS = ("img", "fine_label")
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


def cifar100_label_names(location: Path | str) -> tuple[str, ...]:
    """The class names in a local training file's metadata, where ``datasets`` puts them, else the official ones."""
    if isinstance(location, str):
        return CIFAR100_NAMES
    path = _parquet_files(location, "train")[0]
    try:
        metadata = pq.read_schema(path).metadata or {}
        names = json.loads(metadata[b"huggingface"])["info"]["features"]["fine_label"]["names"]
    except (pa.ArrowInvalid, OSError) as error:
        raise _unreadable(path, error) from error
    except (KeyError, TypeError, ValueError):
        return CIFAR100_NAMES
    return tuple(map(str, names))


def read_cifar100(
    location: Path | str, *, train: bool, label_names: tuple[str, ...], max_samples: int | None, channels: int
) -> tuple[np.ndarray, np.ndarray]:
    """Pictures uint8 ``[num_samples, channels, height, width]`` and labels int64 of the first ``max_samples`` rows.

    The leading rows are a fair sample, because the files are shuffled already; rows after them are not decoded.

    Args:
        location: the local folder of the parquet files, or a hub id.
    """
    split = "train" if train else "test"
    if isinstance(location, str):
        table = hub_table(location, config_name=None, split=split, columns=_COLUMNS, max_samples=max_samples)
        tables = iter([(f"{location} ({split})", table)])
    else:
        tables = _local_tables(location, split, max_samples=max_samples)
    pictures: list[np.ndarray] = []
    labels: list[np.ndarray] = []
    num_labels = len(label_names)
    for source, table in tables:
        labels.append(table_labels(table["fine_label"], name="fine_label", num_labels=num_labels, source=source))
        for row, encoded in enumerate(_encoded(table["img"], source=source)):
            picture = _decoded(encoded, mode=_MODES[channels], source=source, row=row)
            if pictures and picture.shape != pictures[0].shape:
                sizes = [f"{width} x {height}" for height, width in (picture.shape[:2], pictures[0].shape[:2])]
                raise UserError(f"{source}: row {row}: the picture is {sizes[0]}, not {sizes[1]} like those before")
            pictures.append(picture)
    if not pictures:
        raise UserError(f"{location} ({split}): holds no samples; at least 1 is needed")
    stacked = np.stack(pictures).reshape(len(pictures), *pictures[0].shape[:2], channels)
    return np.ascontiguousarray(stacked.transpose(0, 3, 1, 2)), np.concatenate(labels)


def _parquet_files(folder: Path, split: str) -> list[Path]:
    whole = folder / f"{split}.parquet"
    files = [whole] if whole.is_file() else sorted(folder.glob(f"{split}-*.parquet"))
    if not files:
        raise UserError(f"data.path: {folder} holds neither {split}.parquet nor {split}-*.parquet")
    return files


def _local_tables(folder: Path, split: str, *, max_samples: int | None) -> Iterator[tuple[str, pa.Table]]:
    """The first ``max_samples`` rows, file by file, with each file's name."""
    for path in _parquet_files(folder, split):
        try:
            table = _leading_rows(path, max_samples)
        except (pa.ArrowInvalid, OSError) as error:
            raise _unreadable(path, error) from error
        yield str(path), table
        if max_samples is not None:
            max_samples -= len(table)
            if not max_samples:
                return


def _leading_rows(path: Path, max_samples: int | None) -> pa.Table:
    with pq.ParquetFile(path) as file:
        require_columns(file.schema_arrow.names, _COLUMNS, source=path)
        num_groups = file.num_row_groups
        if max_samples is not None:
            ends = np.cumsum([file.metadata.row_group(group).num_rows for group in range(num_groups)])
            num_groups = min(num_groups, int(np.searchsorted(ends, max_samples)) + 1)
        return file.read_row_groups(range(num_groups), columns=list(_COLUMNS)).slice(0, max_samples)


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
