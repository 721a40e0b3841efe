"""The run in TensorBoard's files, as a second dashboard."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipetransformer.errors import UserError


class TensorBoard:
    """Writes to ``folder``, which ``tensorboard --logdir`` shows.

    Raises:
        UserError: its package is missing.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UserError("log.tensorboard: its package is missing; run 'pip install tensorboard'") from error
        self._writer: Any = SummaryWriter(str(folder))

    def log(self, metrics: Mapping[str, Any], *, step: int) -> None:
        """Logs metrics by name after ``step`` steps."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, float(value), step)

    def finish(self, *, exit_code: int = 0) -> None:
        """Flushes. May be called twice."""
        self._writer.close()
