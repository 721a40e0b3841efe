"""CIFAR-10 and CIFAR-100 (Krizhevsky 2009): the official python archives, parquet files, or the hub."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import tarfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from pipetransformer.data.prepared import file_digest
from pipetransformer.data.reader import PictureReader, PictureSplit
from pipetransformer.data.reading import channels_first, decoded, one_line, require_columns, table_labels
from pipetransformer.errors import UserError

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


class CifarReader(PictureReader):
    """CIFAR-10. Rows that are not wanted are not decoded.

    Attributes:
        label: the column of the class on the hub and in parquet files.
        archive, key: folder of the official archive, and the entry of the class in it.
        batches: files of the archive, by split.
    """

    names: tuple[str, ...] = tuple("airplane automobile bird cat deer dog frog horse ship truck".split())  # noqa: SIM905
    hub_id = "uoft-cs/cifar10"
    hub_splits = {"train": "train", "eval": "test"}
    label = "label"
    archive = "cifar-10-batches-py"
    key = "labels"
    batches: Mapping[str, tuple[str, ...]] = {
        "train": tuple(f"data_batch_{n}" for n in range(1, 6)),
        "eval": ("test_batch",),
    }

    def label_names(self) -> tuple[str, ...]:
        """The class names in a local parquet file's metadata, where ``datasets`` puts them, else the official ones."""
        if isinstance(self.location, str) or self._archive() is not None:
            return self.names
        path = self._files("train")[0]
        try:
            metadata = pq.read_schema(path).metadata or {}
            names = json.loads(metadata[b"huggingface"])["info"]["features"][self.label]["names"]
        except (pa.ArrowInvalid, OSError) as error:
            raise _unreadable(path, error) from error
        except (KeyError, TypeError, ValueError):
            return self.names
        return tuple(map(str, names))

    def read(self, wanted: PictureSplit) -> dict[str, np.ndarray]:
        if (archive := self._archive()) is not None:
            return self._from_archive(archive, wanted)
        label, num_labels = self.label, len(wanted.label_names)
        pictures: list[np.ndarray] = []
        labels: list[np.ndarray] = []
        for source, table, rows in self._tables(wanted):
            labels.append(table_labels(table[label], name=label, num_labels=num_labels, source=source)[rows])
            for row, encoded in zip(rows.tolist(), _encoded(table["img"].take(rows), source=source)):
                if encoded is None:
                    raise UserError(f"{source}: row {row}: there is no picture")
                # Threads do not help: at this size most of the time is Python's own.
                picture = decoded(io.BytesIO(encoded), channels=wanted.channels, source=f"{source}: row {row}")
                pixels = channels_first(picture)
                if pictures and pixels.shape != pictures[0].shape:
                    sizes = [f"{width} x {height}" for _, height, width in (pixels.shape, pictures[0].shape)]
                    raise UserError(f"{source}: row {row}: the picture is {sizes[0]}, not {sizes[1]} like those before")
                pictures.append(pixels)
        if not pictures:
            raise UserError(f"{self.on_hub(wanted.split)}: holds no samples; at least 1 is needed")
        return {"pictures": np.ascontiguousarray(np.stack(pictures)), "labels": np.concatenate(labels)}

    def digest(self, wanted: PictureSplit) -> object:
        """Of the files, or of the hub's content, which may change under its id and is read each time."""
        if isinstance(self.location, Path):
            return tuple(file_digest(path) for path in self._files(wanted.split) if path.is_file())
        digest = hashlib.sha256()
        for source, table, rows in self._tables(wanted):
            digest.update(repr(table[self.label].take(rows).to_pylist()).encode())
            for encoded in _encoded(table["img"].take(rows), source=source):
                digest.update(encoded or b"")
        return digest.hexdigest()

    def _archive(self) -> Path | None:
        """The unpacked official archive in the local folder (or that folder itself), or the packed one."""
        folder, name = self.location, self.archive
        if isinstance(folder, str):
            return None
        for found in (folder / name, folder):
            if (found / self.batches["eval"][0]).is_file() and not (found / "test.parquet").is_file():
                return found
        packed = folder / f"{name.replace('-batches-py', '-python')}.tar.gz"
        return packed if packed.is_file() else None

    def _files(self, split: str) -> list[Path]:
        """The local files that a split is read from."""
        if (archive := self._archive()) is not None:
            return [archive / batch for batch in self.batches[split]] if archive.is_dir() else [archive]
        folder, part = Path(self.location), self.hub_splits[split]
        whole = folder / f"{part}.parquet"
        files = [whole] if whole.is_file() else sorted(folder.glob(f"{part}-*.parquet"))
        if not files:
            raise UserError(
                f"data.path: {folder} holds neither {part}.parquet nor {part}-*.parquet, nor the official archive"
            )
        return files

    def _tables(self, wanted: PictureSplit) -> Iterator[tuple[str, pa.Table, np.ndarray]]:
        """The hub's table or those of the files, each with its place and the rows of it that are wanted."""
        columns = ["img", self.label]
        if isinstance(self.location, str):
            table = self.hub_table(wanted.split, columns)
            yield self.on_hub(wanted.split), table, wanted.rows(len(table))
            return
        files = self._files(wanted.split)
        edges = np.cumsum([0, *(_num_rows(path) for path in files)])
        rows = wanted.rows(int(edges[-1]))
        for path, first, stop in zip(files, edges, edges[1:]):
            try:
                with pq.ParquetFile(path) as file:
                    require_columns(file.schema_arrow.names, columns, source=path)
                    table = file.read(columns)
            except (pa.ArrowInvalid, OSError) as error:
                raise _unreadable(path, error) from error
            yield str(path), table, rows[(first <= rows) & (rows < stop)] - first

    def _from_archive(self, archive: Path, wanted: PictureSplit) -> dict[str, np.ndarray]:
        pictures: list[np.ndarray] = []
        labels: list[int] = []
        for batch in self.batches[wanted.split]:
            source = f"{archive}/{batch}"
            content = _unpickled(self._batch_bytes(archive, batch), source=source)
            try:
                data, numbers = np.asarray(content[b"data"]), list(map(int, content[self.key.encode()]))
                pictures.append(data.reshape(len(numbers), 3, 32, 32).astype(np.uint8, copy=False))
            except (KeyError, TypeError, ValueError) as error:
                raise UserError(
                    f"{source}: is not as CIFAR's archives are ({type(error).__name__}: {error})"
                ) from error
            if not all(0 <= number < len(self.names) for number in numbers):
                raise UserError(f"{source}: a label is not allowed; give 0 to {len(self.names) - 1}")
            labels += numbers
        rows = wanted.rows(len(labels))
        table = np.concatenate(pictures)[rows]
        if not len(table):
            raise UserError(f"{archive} ({wanted.split}): holds no samples; at least 1 is needed")
        if wanted.channels == 1:
            colours = (Image.fromarray(picture.transpose(1, 2, 0)) for picture in table)
            table = np.stack([channels_first(picture.convert("L")) for picture in colours])
        return {"pictures": table, "labels": np.array(labels, dtype=np.int64)[rows]}

    def _batch_bytes(self, archive: Path, batch: str) -> bytes:
        try:
            if archive.is_dir():
                return (archive / batch).read_bytes()
            with tarfile.open(archive) as packed:
                member = packed.extractfile(f"{self.archive}/{batch}")
                assert member is not None
                return member.read()
        except (OSError, tarfile.TarError, KeyError, EOFError, AssertionError, zlib.error) as error:
            raise UserError(f"{archive}/{batch}: cannot be read ({one_line(error)})") from error


class Cifar100Reader(CifarReader):
    """CIFAR-100, by its fine labels."""

    names = CIFAR100_NAMES
    hub_id = "uoft-cs/cifar100"
    label = "fine_label"
    archive = "cifar-100-python"
    key = "fine_labels"
    batches = {"train": ("train",), "eval": ("test",)}


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


def _num_rows(path: Path) -> int:
    try:
        return int(pq.read_metadata(path).num_rows)
    except (pa.ArrowInvalid, OSError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> UserError:
    return UserError(f"{path}: not a readable parquet file ({one_line(error)})")


def _encoded(column: pa.ChunkedArray, *, source: str) -> list[bytes | None]:
    if not (pa.types.is_struct(column.type) and column.type.get_field_index("bytes") >= 0):
        raise UserError(f"{source}: column img is {column.type}; a struct with the encoded picture in bytes is needed")
    return [encoded for chunk in column.chunks for encoded in chunk.field("bytes").to_pylist()]
