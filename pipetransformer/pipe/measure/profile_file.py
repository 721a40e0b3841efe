"""Measured costs as a file: kept in the user's cache for the next run, or carried to where the hardware is not.

A profile belongs to a model, the micro-batches' shape, the precision, the device and the versions of the libraries:
``key`` holds them all, and names the file.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter

from pipetransformer.errors import UserError, writing
from pipetransformer.pipe.planner.costs import JobCosts, UnitCosts, at_length

__all__ = ["Profile", "file_name", "load_profile", "save_profile", "write_profile"]

_VERSION = 6


@dataclass(frozen=True, slots=True)
class Profile:
    """Measured costs of a job.

    Attributes:
        key: all that they depend on.
        job: costs at the padded length that most of the work has.
        measured: unit costs by padded length; in a file, of the lengths that were timed.
        memcpy_bytes_per_second: of the host, one rank's.
        device_memory: bytes that plans may fill, or None.
    """

    key: Mapping[str, object]
    job: JobCosts
    measured: Mapping[int, UnitCosts]
    memcpy_bytes_per_second: float
    device_memory: int | None = None

    def at_lengths(self, lengths: Iterable[int]) -> Profile:
        """The same with costs of every padded length: those that were not timed lie on the line through the timed."""
        return replace(self, measured={length: at_length(length, self.measured) for length in sorted(lengths)})


def file_name(key: Mapping[str, object]) -> str:
    """Where a profile with this key lies in a folder of profiles."""
    return hashlib.sha256(json.dumps([_VERSION, dict(key)], sort_keys=True).encode()).hexdigest()[:32] + ".json"


def save_profile(profile: Profile, path: Path, *, key: str = "PIPETRANSFORMER_CACHE") -> None:
    """Raises UserError, which names ``key``."""
    write_profile(path, asdict(profile), key=key)


def write_profile(path: Path, fields: Mapping[str, object], *, key: str = "PIPETRANSFORMER_CACHE") -> None:
    """All of the file or nothing: another job may be writing it. Raises UserError, which names ``key``."""
    with writing(path, key=key):
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps({"version": _VERSION, **fields}, indent=1))
        part.replace(path)


def load_profile(path: Path) -> Profile:
    """Raises UserError where the file is not there or is no profile of this version."""
    try:
        fields = json.loads(path.read_text())
        if fields["version"] != _VERSION:
            raise ValueError(f"version {fields['version']}")
        return TypeAdapter(Profile).validate_python(fields)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); give a profile that was saved") from error
    except (ValueError, KeyError, TypeError) as error:
        said = " ".join(str(error).split())[:200]
        raise UserError(f"{path}: is no profile that this version reads ({said}); measure it anew") from error
