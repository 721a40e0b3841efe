"""Files that are whole or not there."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from pipetransformer.errors import writing


def write_whole(path: Path, text: str, *, key: str = "run.dir") -> None:
    """Writes or replaces ``path``: a reader sees the old file or the whole new one, also after a crash.

    Args:
        key: the setting that an error names.

    Raises:
        UserError: if the file cannot be written.
    """
    part = path.with_name(f"{path.name}.{os.getpid()}.part")  # another job may write the same file
    try:
        with writing(path, key=key):
            with part.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
    finally:
        with contextlib.suppress(OSError):
            part.unlink()
