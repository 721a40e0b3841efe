"""Figures on pages stand in files under ``benchmarks/results/`` (the rule: ``figures.py``), and these say how they came
about."""

from __future__ import annotations

import json
import re
from datetime import date
from pathlib import Path

import pytest
from figures import FEW_NUMBERS, Source, faults, read_source

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MEASURED = {"results.md", "seeds.md"}

# ---- the pages and the files -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_figures_of_a_page_stand_in_files(page: Path) -> None:
    found = faults(page.read_text(), measured=page.name in MEASURED, read=lambda name: read_source(RESULTS / name))
    assert found == [], "\n".join(found)


@pytest.mark.parametrize("path", sorted(RESULTS.rglob("*.json")), ids=lambda path: path.stem)
def test_a_result_says_how_it_came_about(path: Path) -> None:
    environment = json.loads(path.read_text()).get("environment", {})
    afterwards = "recorded afterwards" in environment
    needed = {"command", "date", "commit", "cpu", "cores", *([] if afterwards else ["memory GiB"])}
    assert needed <= environment.keys(), f"{needed - environment.keys()} is missing: measure it with benchmarks' save()"
    assert environment["date"] == date.fromisoformat(environment["date"]).isoformat()
    assert re.fullmatch(r"[0-9a-f]{7,40}(-dirty)?", environment["commit"])
    assert not re.search(r"(^|[\s='\"])/", environment["command"]), "a path of one machine; give one from the clone"
    program, verb, name, *_ = [*environment["command"].split(), "", ""]
    folder = ROOT / "benchmarks" / name.replace("-", "_")
    assert program == "pipetransformer" and (verb != "bench" or folder.is_dir()), environment["command"]


# ---- the rule finds what it should -----------------------------------------------------------------------------------

FILE = {
    "title": "A model of 5.4 M parameters",
    "rows": [
        {
            "what": "pipeline-1",
            "step_s": [0.7, 0.75, 0.8, 0.76, 0.9, 0.9, 0.9, 0.9, 0.9],
            "share": 0.7185,
            "bytes": 1384999876,
            "published": 1.44,
        },
        {"what": "pipeline-2", "step_s": 1.5, "share": -0.25, "bytes": 2048, "spread": "0.9 [0.868 .. 1.000]"},
        {"what": "pipeline-2, M 4", "images/s": 250.4, "least": 206.1, "most": 300.2, "MB": 126.0},
    ],
}
HEAD = "## Part\n`benchmarks/results/a.json`\n| what | figure | MB | published |\n|---|---|---|---|\n"
CASES = {
    "| pipeline-1 | 900 ms [700 .. 900] | 1,385 | 1.44 |": [],
    "| pipeline-1 | 900 ms [710 .. 900] | 1,385 | |": ["710"],
    "| pipeline-1 | 760 ms | | |": ["760"],  # one of many values, neither least nor median nor most
    "| pipeline-1 | 72 % | 1,384.9999 | |": [],
    "| pipeline-1 | 73 % | 1,384.9998 | |": ["73", "1,384.9998"],
    "| pipeline-1 | 1.44 | | 0.7185 |": ["1.44", "0.7185"],  # each in the other's column
    "| pipeline-2 | 0.9 [0.868 .. 1.000] and -0.25 | 0.002 | |": [],
    "| pipeline-2 | 0.868 [0.868 .. 1.000] | | |": ["0.868", "0.868", "1.000"],  # the least poses as the median
    "| pipeline-2 | 0.25 | | |": ["0.25"],
    "| pipeline-2 | 0.7185 | | |": ["0.7185"],  # of the other row
    "| pipeline-2, M 4 | 250 [206 .. 300] | 126 | |": [],
    "| pipeline-2, M 4 | 206 [206 .. 300] | | |": ["206", "206", "300"],
    "| pipeline-1 / pipeline-2, M 4 | 0.7185 | 126 | |": [],
    "| pipeline-3 | 1.5 | | |": ["no row is 'pipeline-3'"],
    "| Pipeline-2, `M 4` | 126 | | |": [],
    "A model of 5.4 M parameters takes 1.50 s, 1.5x as much.": [],
    "A model of 5.3 M parameters takes 1.51 s, 1.8x as much.": ["5.3", "1.51", "1.8"],
    "It takes `1.51 s` on 33 cores, 33 s in all.": ["33"],  # of the environment alone
    "It takes 1.51 s. <!-- no file: 1.51 (of torch's manual) -->": [],
    "<!-- no file: 1.61 (gone from the page) -->": ["1.61 is let be"],
}  # fmt: skip


@pytest.fixture
def source(tmp_path: Path) -> Source:
    (tmp_path / "a.json").write_text(json.dumps({"environment": {"cores": 33}, **FILE}))
    return read_source(tmp_path / "a.json")


@pytest.mark.parametrize("line", CASES)
def test_a_figure_that_no_file_holds_is_found(line: str, source: Source) -> None:
    found = " ".join(faults(HEAD + line, measured=True, read=lambda name: source))
    named = re.findall(r"## Part: (no row is '.*?'|[^:']*?)(?: of '|, but)", found)
    assert named == ([", ".join(CASES[line])] if CASES[line] else []), found


def test_a_text_quotes_no_cell_of_a_large_file(tmp_path: Path) -> None:
    rows = [{"cell": number, "ratio": 0.9 + number / 1000} for number in range(FEW_NUMBERS)]
    (tmp_path / "a.json").write_text(json.dumps({"title": "", "rows": rows, "notes": ["from 0.900 to 1.099"]}))
    source = read_source(tmp_path / "a.json")
    assert faults(HEAD + "Predicted is 0.900 to 1.099.", measured=True, read=lambda name: source) == []
    assert len(faults(HEAD + "Predicted is 0.950 to 1.050.", measured=True, read=lambda name: source)) == 1


@pytest.mark.parametrize(
    "line",
    ["# T\nIt takes 33 s.", "# T\n| a | b |\n|---|---|\n| it | 0.5 |", "# T\n| a | b |\n|---|---|\n| it | 3 MB |"],
)
def test_a_page_that_names_no_file_has_no_figures(line: str) -> None:
    assert len(faults(line, measured=False, read=lambda name: pytest.fail("not named"))) == 1
    assert (
        faults("# T\nAt least 1 of 20, for `3 s` and n - 1.", measured=False, read=lambda name: pytest.fail("none"))
        == []
    )
