"""Measured costs as a file: kept in the user's cache for the next run, or carried to where the hardware is not.

A profile belongs to a model, the micro-batches' shape, the precision, the device and the versions of the libraries:
``key`` holds them all, and names the file.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from pipetransformer.errors import UserError, writing
from pipetransformer.pipe.costs import JobCosts, Link, UnitCosts

__all__ = ["Profile", "file_name", "load_profile", "save_profile", "write_profile"]

_VERSION = 5


@dataclass(frozen=True, slots=True)
class Profile:
    """What was measured.

    Attributes:
        key: what it belongs to. job: costs at the padded length that most of the work has.
        measured: unit costs by padded length, of the lengths that were timed.
        memcpy_bytes_per_second: of the host. device_memory: bytes that plans may fill, or None.
    """

    key: Mapping[str, object]
    job: JobCosts
    measured: Mapping[int, UnitCosts]
    memcpy_bytes_per_second: float
    device_memory: int | None = None


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
        job = fields["job"]
        if fields["version"] != _VERSION:
            raise ValueError(f"version {fields['version']}")
        return Profile(
            key=fields["key"],
            job=JobCosts(
                by_rows=_by_number(job.pop("by_rows")),
                parameter_bytes=tuple(job.pop("parameter_bytes")),
                send=Link(**job.pop("send")),
                reduction=Link(**job.pop("reduction")),
                between=_link(job.pop("between")),
                read=_link(job.pop("read")),
                **job,
            ),
            measured=_by_number(fields["measured"]),
            memcpy_bytes_per_second=fields["memcpy_bytes_per_second"],
            device_memory=fields["device_memory"],
        )
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); give a profile that was saved") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: is no profile that this version reads ({error!r}); measure it anew") from error


def _link(fields: Mapping[str, float] | None) -> Link | None:
    return None if fields is None else Link(**fields)  # type: ignore[arg-type]


def _by_number(table: Mapping[str, Mapping[str, object]]) -> dict[int, UnitCosts]:
    return {
        int(number): UnitCosts(**{k: tuple(v) if isinstance(v, list) else v for k, v in costs.items()})  # type: ignore[arg-type]
        for number, costs in table.items()
    }
