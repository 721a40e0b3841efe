"""Questions to git about this clone."""

from __future__ import annotations

import subprocess
from pathlib import Path

__all__ = ["ROOT", "git"]

ROOT = Path(__file__).resolve().parents[2]


def git(*arguments: str, folder: Path = ROOT) -> str | None:
    """Its answer; None where it fails, where it is not installed and where there is no repository."""
    try:
        ended = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return None if ended.returncode else ended.stdout.rstrip("\n")
