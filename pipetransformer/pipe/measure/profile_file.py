"""The file of measured costs: kept in the user's cache folder for the next run, or used to plan on another machine.

A profile belongs to a model, the shapes of its micro-batches, the precision, the device and the versions of the
libraries. Its key holds all of these, and gives the file its name.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter

from pipetransformer.errors import UserError, writing
from pipetransformer.pipe.planner.costs import JobCosts, UnitCosts, at_length
from pipetransformer.process.files import write_whole

_VERSION = 10


@dataclass(frozen=True, slots=True)
class Profile:
    """Measured costs of a job.

    Attributes:
        key: everything that the costs depend on, by name.
        job: costs at the modal padded length (that of most of the work).
        measured: unit costs by padded length; in a file, only of the timed lengths.
        memcpy_bytes_per_second: speed of copies in the host's memory, of one rank.
        device_memory: bytes per rank that plans may use; None for no limit.
    """

    key: Mapping[str, object]
    job: JobCosts
    measured: Mapping[int, UnitCosts]
    memcpy_bytes_per_second: float
    device_memory: int | None = None

    def at_lengths(self, lengths: Iterable[int]) -> Profile:
        """The same profile with costs of every length in ``lengths``, on the straight line through the timed ones."""
        return replace(self, measured={length: at_length(length, self.measured) for length in sorted(lengths)})


def file_name(key: Mapping[str, object]) -> str:
    """The name of the file of a profile with this key."""
    return hashlib.sha256(json.dumps([_VERSION, dict(key)], sort_keys=True).encode()).hexdigest()[:32] + ".json"


def save_profile(profile: Profile, path: Path, *, key: str = "PIPETRANSFORMER_CACHE") -> None:
    """Writes a profile.

    Args:
        key: the setting that an error names.

    Raises:
        UserError: if the file cannot be written.
    """
    write_profile(path, asdict(profile), key=key)


def write_profile(path: Path, fields: Mapping[str, object], *, key: str = "PIPETRANSFORMER_CACHE") -> None:
    """Writes the fields of a profile, as the whole file or not at all.

    Args:
        key: the setting that an error names.

    Raises:
        UserError: if the file cannot be written.
    """
    with writing(path, key=key):
        path.parent.mkdir(parents=True, exist_ok=True)
    head = {"version": _VERSION, "sha256": _digest(fields)}
    write_whole(path, json.dumps({**head, **fields}, indent=1), key=key)


def _digest(fields: Mapping[str, object]) -> str:
    """SHA-256, in hex, of fields as JSON has them, but for the spaces: one changed figure would make other plans."""
    return hashlib.sha256(json.dumps(json.loads(json.dumps(fields)), sort_keys=True).encode()).hexdigest()


def read_fields(path: Path) -> dict[str, object]:
    """What ``write_profile`` wrote. Raises OSError, ValueError, KeyError or TypeError for anything else."""
    fields: dict[str, object] = json.loads(path.read_text())
    if (version := fields.pop("version")) != _VERSION:
        raise ValueError(f"version {version}")
    if fields.pop("sha256") != _digest(fields):
        raise ValueError("it is not as it was written")
    return fields


def load_profile(path: Path) -> Profile:
    """Reads a profile.

    Raises:
        UserError: if the file does not exist, is not a profile of this version, or is not as it was written.
    """
    try:
        fields = read_fields(path)
        profile = TypeAdapter(Profile).validate_python(fields)
        if json.loads(json.dumps(asdict(profile))) != fields:  # a key too many, or too few
            raise ValueError("other keys than a profile has")
        return profile
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); give a profile that was saved") from error
    except (ValueError, KeyError, TypeError) as error:
        said = " ".join(str(error).split())[:200]
        raise UserError(f"{path}: is no profile that this version reads ({said}); measure it anew") from error
