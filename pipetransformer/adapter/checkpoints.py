"""Tensors to files and back, in any mesh."""

from __future__ import annotations

import warnings
from pathlib import Path

from torch import Tensor

# Note: what DCP raises has no public name; it is a BaseException, which passes ``except Exception``.
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from pipetransformer.process.shutdown import held

__all__ = ["CheckpointException", "load_tensors", "save_tensors"]


def save_tensors(tensors: dict[str, Tensor], folder: Path, *, is_alone: bool) -> None:
    """Collective, unless the process ``is_alone``. Writes with DCP; raises CheckpointException.

    Note: a collective of many bytes has gloo's own thread start OpenMP threads, after which those of a process that
    computes alone no longer spin between operations: its steps took 1.7 times as long. Without one, DCP warns.

    Note: a signal waits for its end. Where a write raises, torch's writer aborts the process with a message of its own.
    """
    with held(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp_save(tensors, checkpoint_id=folder, no_dist=is_alone)


def load_tensors(tensors: dict[str, Tensor], folder: Path, *, is_alone: bool) -> None:
    """Fills ``tensors`` from the files of ``save_tensors``, in any mesh; collective like it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp_load(tensors, checkpoint_id=folder, no_dist=is_alone)
