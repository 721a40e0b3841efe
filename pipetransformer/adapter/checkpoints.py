"""Tensors to files and back, in any mesh."""

from __future__ import annotations

import pickle
import warnings
from dataclasses import is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import metadata

# Note: what DCP raises has no public name; it is a BaseException, which passes ``except Exception``.
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

__all__ = ["CheckpointException", "load_tensors", "save_tensors"]

_METADATA = ".metadata"
_RECORDS = metadata.__name__
_PLAIN = {  # what a table of contents names beside torch's records and types of numbers
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("pathlib", "PosixPath"),
}


def save_tensors(tensors: dict[str, Tensor], folder: Path, *, group: dist.ProcessGroup | None) -> None:
    """Writes with DCP; for a thread beside the main one, whose signals torch's writer could not bear: where a write
    raises, it aborts the process with a message of its own.

    Args:
        group: a group of all ranks that no other thread uses, with which they write together; None for one rank.

    Raises:
        CheckpointException: if a rank could not write.

    Note: a collective of many bytes has gloo's own thread start OpenMP threads, after which those of a process that
    computes alone no longer spin between operations: its steps took 1.7 times as long. Without one, DCP warns.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp_save(tensors, storage_writer=FileSystemWriter(folder), process_group=group, no_dist=group is None)


def load_tensors(tensors: dict[str, Tensor], folder: Path, *, is_alone: bool) -> None:
    """Fills ``tensors`` from the files of ``save_tensors``, in any mesh; collective like it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp_load(tensors, storage_reader=_PlainReader(folder), no_dist=is_alone)


class _PlainReader(FileSystemReader):
    """Reads a checkpoint's table of contents, which is a pickle, without calling what a pickle may name."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / _METADATA).open("rb") as file:
            contents = _PlainUnpickler(file).load()
        if not isinstance(contents, Metadata):
            raise pickle.UnpicklingError("it is no table of contents")
        if contents.storage_meta is None:
            contents.storage_meta = StorageMeta()
        contents.storage_meta.load_id = self.load_id
        return contents


class _PlainUnpickler(pickle.Unpickler):
    """Knows nothing but torch's records of a checkpoint, types of numbers and sizes."""

    def find_class(self, module: str, name: str) -> Any:
        found = getattr(torch, name, None) if module == "torch" else None
        is_plain = (module, name) in _PLAIN or isinstance(found, torch.dtype)
        if module == _RECORDS and "." not in name:
            found = getattr(metadata, name, None)
            is_plain = isinstance(found, type) and (is_dataclass(found) or issubclass(found, Enum))
        if not is_plain:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint does")
        return super().find_class(module, name)
