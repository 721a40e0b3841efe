"""Digests of the files of a folder, beside them, so that damage is found before anything of it is believed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from pipetransformer.data.prepared import file_digest
from pipetransformer.process.files import write_whole

NAME = "sha256.json"
_FORMAT = 1


def digests_of(paths: Iterable[Path]) -> dict[str, str]:
    """SHA-256 of files, by name, in hex. Raises OSError."""
    return {path.name: file_digest(path) for path in paths}


def write_digests(folder: Path, digests: Mapping[str, str]) -> None:
    """Raises UserError where they cannot be written."""
    write_whole(folder / NAME, json.dumps({"format": _FORMAT, "files": dict(sorted(digests.items()))}, indent=1))


def files_of(folder: Path) -> tuple[Mapping[str, str], str]:
    """The digests that ``folder`` should have, by name of the file; and the reason, in words, why it cannot be checked,
    empty where it can."""
    try:
        found = json.loads((folder / NAME).read_text())
        files = {str(name): str(digest) for name, digest in found["files"].items()}
        if found["format"] != _FORMAT:
            return {}, f"{NAME} is of format {found['format']}, and this version reads {_FORMAT}"
        return files, ""
    except FileNotFoundError:
        return {}, f"it has no {NAME}, as those of older versions"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}, f"{NAME} is damaged"


def damage_of(folder: Path, digests: Mapping[str, str]) -> str:
    """The first of these files that is not as it was written, in words; empty where all are."""
    for name, digest in digests.items():
        try:
            if file_digest(folder / name) != digest:
                return f"{name} is damaged"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
    return ""
