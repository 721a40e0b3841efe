"""The check of a folder whose weights are in several safetensors files, with an index of the file of each."""

from __future__ import annotations

import json
from pathlib import Path

from pipetransformer.errors import UserError

_INDEX = "model.safetensors.index.json"


def check_shards(folder: Path) -> None:
    """Reads the heads of the files, not their tensors.

    Raises:
        UserError: for a file or a tensor that the index names and that is not there, and for a tensor that is in two
            files: a library would take one of them without a word.
    """
    from safetensors import SafetensorError, safe_open

    if not (folder / _INDEX).is_file() or (folder / "model.safetensors").is_file():
        return  # of both, the library takes the one file
    try:
        files = dict(json.loads((folder / _INDEX).read_text())["weight_map"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _refused(folder / _INDEX, "is no index of weights") from error
    found: dict[str, str] = {}
    for file in sorted(set(map(str, files.values()))):
        try:
            with safe_open(folder / file, framework="pt") as shard:
                keys = list(shard.keys())
        except (OSError, SafetensorError) as error:
            said = "is missing" if not (folder / file).is_file() else f"cannot be read ({error})"
            raise _refused(folder / file, f"{said}, and {_INDEX} names it") from error
        for key in keys:
            if key in found:
                raise _refused(folder, f"has {key} in two files, {found[key]} and {file}")
            found[key] = file
    for key, file in files.items():
        if found.get(key) != file:
            raise _refused(folder / file, f"has no {key}, which {_INDEX} says that it has")


def _refused(path: Path, found: str) -> UserError:
    said = " ".join(found.split())
    return UserError(f"model.name: {path} {said}; copy the folder anew")
