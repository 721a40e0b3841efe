"""FTPipe's reports beside ours: its commands, and the figures that follow from those that it printed."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.ftpipe.__main__ import _figures, main
from benchmarks.ftpipe.originals import COMMANDS, ORIGINALS
from pipetransformer.commands import partition
from pipetransformer.errors import UserError
from pipetransformer.graphs.zoo import zoo_model
from pipetransformer.launch.arguments import Parser
from pipetransformer.pipe.planner.costs import Link


@pytest.mark.parametrize(
    ("report", "printed"),
    [
        ("amoebanet-4p", {"theoretical imbalance forward": 0.7825228564400267,
                          "theoretical topology aware imbalance forward": 0.8497377145142367,
                          "real imbalance backward": 0.7095687112915764}),
        ("amoebanet-4p-no-recomputation", {"real imbalance backward": 0.5565249698922445}),
        ("gpt2-4p", {"theoretical parallel imbalance forward": 0.6864840097023267,
                     "theoretical sequential topology aware imbalance backward": 0.895432975216615}),
        ("gpt2-2p", {"theoretical sequential imbalance forward": 0.8957919235845999,
                     "real topology aware imbalance backward": 0.7133862007123207}),
    ],
)  # fmt: skip
def test_figures_that_follow_are_those_that_it_printed(report: str, printed: dict[str, float]) -> None:
    original = ORIGINALS[report][0]
    figures = dict(_figures(original, connected=set(pairwise(range(len(original.volumes))))))
    assert {name: figures[name] for name in printed} == pytest.approx(printed, rel=1e-12)
    latencies = [label for label in figures if "latency" in label]
    assert len(latencies) == (0 if report.startswith("gpt2") else 4)  # that script printed none
    for label in latencies[-1:]:
        first, *_ = str(figures[label]).split(" | ")
        assert float(first) == pytest.approx(sum(original.real.backward), rel=1e-5)


def test_every_command_is_one_of_ours() -> None:
    assert COMMANDS.keys() == ORIGINALS.keys()
    for report, call in COMMANDS.items():
        parser = Parser(prog="")
        partition.add_arguments(parser)
        arguments = parser.parse_args(call.split())
        parts = {len(original.volumes) for original in ORIGINALS[report]}
        assert parts == {arguments.stages} and arguments.no_recomputation == report.endswith("no-recomputation")
        if arguments.train_data_file is not None:  # in this clone, and long enough
            text = Path(__file__).resolve().parent.parent / arguments.train_data_file
            assert len(text.read_text().split()) >= 1024


def test_a_report_leaves_its_text_its_picture_and_its_figures_beside_the_originals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = zoo_model("gpt2")
    small = replace(whole, build=partial(whole.build, **{**whole.small, "num_layers": 1}), **whole.small_input)
    monkeypatch.setattr(partition, "zoo_model", lambda name: small)
    monkeypatch.setattr(partition, "measure_link", lambda: Link(1000, 1.0))
    monkeypatch.chdir(Path(__file__).resolve().parent.parent)
    monkeypatch.setattr(sys, "argv", ["x", "--reports", "gpt2-2p", "--iterations", "2", "--output", str(tmp_path)])
    main()
    kept = json.loads((tmp_path / "ftpipe-gpt2-2p.json").read_text())
    rows = {row["figure"]: row for row in kept["rows"]}
    assert kept["title"].startswith("pipetransformer partition --train_data_file=README.md --n_iter=2 ")
    assert rows["input size MB"]["FTPipe, GTX 1070"] == "0.008192 | 6.29965"
    (first, sent), (given, last) = (rows[label]["here"].split(" | ") for label in ("input size MB", "out MB"))
    assert (first, sent, last) == ("0.000128", given, "0.003904")
    assert list(rows)[-1] == "send time ms" and all(row["here"] for row in rows.values())
    text = (tmp_path / "ftpipe-gpt2-2p.txt").read_text()
    assert f"forward {rows['real imbalance forward']['here']}\n" in text and "parallel forward {0: " in text
    assert (tmp_path / "ftpipe-gpt2-2p.png").read_bytes().startswith(b"\x89PNG")


def test_a_report_that_is_none_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["x", "--reports", "gpt2"])
    with pytest.raises(UserError, match="--reports: gpt2 is not known; give some of amoebanet-4p, "):
        main()
