"""``pipetransformer bench`` lists the benchmarks and becomes the one that is named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pipetransformer.commands import main

REPOSITORY = Path(__file__).resolve().parent.parent


def test_benchmarks_are_listed_with_their_first_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 0
    told = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert told.keys() == {
        path.parent.name.replace("_", "-") for path in (REPOSITORY / "benchmarks").glob("*/__main__.py")
    }
    assert told["resnet101-speed"].startswith("torchgpipe's table of ResNet-101's speed: ")


def test_an_unknown_benchmark_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "resnet101-sped"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "bench: 'resnet101-sped' is not a benchmark; did you mean resnet101-speed?" in line


_BENCH = """
import sys
from pathlib import Path
from pipetransformer.commands import bench, main
bench._FOLDER = Path(sys.argv[1])
sys.exit(main(["bench", "a-script", *sys.argv[2:]]))
"""


@pytest.mark.parametrize("code", [0, 3])
def test_the_command_becomes_the_benchmark_with_its_arguments(code: int, tmp_path: Path) -> None:
    """Its exit code is the command's, and a signal that ends the command ends it."""
    given = ["--repeats", "2", "--help"]
    (tmp_path / "a_script").mkdir()
    (tmp_path / "a_script" / "__main__.py").write_text(
        f"import os, sys\nprint(os.getpid(), *sys.argv[1:], sep='\\n')\nsys.exit({code})\n"
    )
    command = [sys.executable, "-c", _BENCH, str(tmp_path), *given]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as started:
        told, _ = started.communicate(timeout=60)
    assert started.returncode == code
    assert told.splitlines() == [str(started.pid), *given]
