"""The configurations that come with the package, by short names: ``digits`` is train_config_digits_all_in_one.yaml."""

from __future__ import annotations

import difflib
from pathlib import Path

from pipetransformer.errors import UserError

FOLDER = Path(__file__).resolve().parents[1] / "recipes"
_PREFIX, _USUAL, NO_FREEZE = "train_config_", "_all_in_one", "_no_freeze"


def shipped() -> dict[str, Path]:
    """The files of trainings by their short names, in the alphabet's order."""
    found = sorted(FOLDER.glob(f"{_PREFIX}*.yaml"))
    return {path.stem.removeprefix(_PREFIX).removesuffix(_USUAL): path for path in found}


def found_config(given: str | Path) -> Path:
    """The file that is meant: a path, or the name of a shipped one.

    Raises:
        UserError: there is neither.
    """
    path, name = Path(given), str(given)
    if path.is_file() or path.suffix in (".yaml", ".yml") or len(path.parts) > 1:
        return path
    files = shipped()
    if (file := files.get(name.replace("-", "_"))) is not None:
        return file
    near = difflib.get_close_matches(name, files, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise UserError(f"{name}: no such file, and no shipped configuration{hint} ('pipetransformer configs' lists them)")


def without_freezing(given: str) -> str:
    """The twin of a shipped configuration that differs in its ``freeze`` section alone.

    Raises:
        UserError: it is not shipped, or has no twin.
    """
    twin = f"{given.replace('-', '_')}{NO_FREEZE}"
    if twin not in shipped():
        raise UserError(f"--no-freeze: {given} has no twin without freezing; give freeze.policy=none instead")
    return twin
