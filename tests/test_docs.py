"""Documents name files and folders that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
_FILE = re.compile(r"`([\w./-]+\.(?:py|md|yaml|json|sh|toml|txt))`|\]\(([\w./-]+\.md|LICENSE)[)#]")
_MADE = re.compile(
    r"(summary|predictions|tokenizer|timeline)\.json|config\.yaml|(train|dev)\.\w+"  # by a run, a user
    r"|.*_bs1\..*"  # by a command
    r"|.*my_policies\.py|.*npz\.py|names\.txt|__main__\.py"  # by who follows docs/extending.md or CONTRIBUTING.md
)
_PLACES = ("", "pipetransformer", "tests", "docs", "pipetransformer/pipe/planner", "config")


def missing(text: str, *, page: Path) -> list[str]:
    """Files that ``text`` names and that are nowhere; those that a run or a user makes do not count."""
    named = {first or second for first, second in _FILE.findall(text)}
    places = [page.parent, *(ROOT / place for place in _PLACES)]
    return sorted(
        name for name in named if not _MADE.fullmatch(name) and not any((place / name).exists() for place in places)
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_names_files_that_exist(page: Path) -> None:
    assert missing(page.read_text(), page=page) == []


def test_a_file_that_is_gone_is_found() -> None:
    assert missing("see `pipe/gone.py` and [this](gone.md)", page=ROOT / "README.md") == ["gone.md", "pipe/gone.py"]
