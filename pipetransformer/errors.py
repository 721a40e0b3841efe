"""The one exception that a user's mistake raises: its message is the line that the user reads."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class UserError(Exception):
    """A mistake in a configuration, file or environment, told in one line that names the remedy."""


@contextmanager
def writing(path: Path, *, key: str = "run.dir") -> Iterator[None]:
    """Turns an OSError inside into a user's mistake with ``key``: a full disk, a folder without permission."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{key}: {path} cannot be written ({error.strerror or error})") from error


def check_folder(folder: Path, *, key: str) -> None:
    """Makes a folder where it is missing, before anything is computed for one that cannot be written.

    Raises:
        UserError: the folder cannot be made or written.
    """
    with writing(folder, key=key):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
