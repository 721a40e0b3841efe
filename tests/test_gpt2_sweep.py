"""The sweep measures every cell of both, tells where ours takes more memory and why, and refuses in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from laws import REPOSITORY
from ranks import RankPool
from torch import nn

sys.path.insert(0, str(REPOSITORY))

import benchmarks.gpt2_sweep.__main__ as gpt2_sweep
from benchmarks.gpt2_sweep.growth import peak_growth
from benchmarks.gpt2_sweep.report import Cell, Figures, Shape, Variants, memory_notes, ratio_notes, rows_of, write_sweep
from pipetransformer.process.world import World

SIZES = {"num_layers": 4, "width": 32, "num_heads": 4, "vocabulary_size": 61, "sequence_length": 16}
SHAPE = Shape(64, SIZES, on_gpus=False)
MIB = 2**20
CELLS = [Cell(k, 8, mode, name) for k in (1, 2) for mode in (False, True) for name in ("ours", "torchgpipe")]
CELLS += [Cell(2, 8, mode, "ours 1f1b") for mode in (False, True)]

pytest.importorskip("torchgpipe", reason="needs the extra bench")


def _sweep(world: World) -> tuple[dict[Cell, Figures], float]:
    gpt2_sweep.os.cpu_count = lambda: 1  # two threads beside other tests take minutes
    return gpt2_sweep.sweep(world, sizes=SIZES, cells=CELLS, repeats=1)


@pytest.mark.full
def test_all_cells_are_measured_and_their_gradients_agree(ranks: RankPool, tmp_path: Path) -> None:
    found, difference = ranks.run(2, _sweep)[0]
    assert 0 < difference < 1e-5
    assert len(found) == 10  # 2 K x 2 modes x 2, and 1F1B where there are two stages
    for cell, figures in found.items():
        assert figures.seconds[0] > figures.forward_seconds[0] > 0
        assert figures.parameter_bytes == found[cell._replace(implementation="ours")].parameter_bytes
        assert min(figures.activation_bytes) > 0
    for name in ("ours", "torchgpipe"):  # checkpointing saves memory in both, or one of them is used wrongly
        for k in (1, 2) if name == "torchgpipe" else (2,):
            kept, again = (sum(found[Cell(k, 8, mode, name)].activation_bytes) for mode in (False, True))
            assert again < 0.6 * kept, (name, k)
    variants = Variants(apart=lambda cell: 0, by_stage=lambda cell: 0)
    write_sweep(found, difference, shape=SHAPE, variants=variants, folder=tmp_path)
    assert len(json.loads((tmp_path / "gpt2-sweep.json").read_text())["rows"]) == len(found)


def _wrong_gradients(world: World) -> None:
    step = gpt2_sweep.Ours.step

    def wrong(pipe: gpt2_sweep.Ours) -> None:
        step(pipe)
        for parameter in gpt2_sweep.parameters(pipe):
            parameter.grad *= 1.01

    gpt2_sweep.Ours.step = wrong
    try:
        _sweep(world)
    finally:
        gpt2_sweep.Ours.step = step


def test_wrong_gradients_are_not_timed(ranks: RankPool) -> None:
    with pytest.raises(AssertionError, match="gradients of ours and torchgpipe's differ by 1.0e-02"):
        ranks.run(2, _wrong_gradients)


def test_memory_is_what_is_alive_at_once() -> None:
    class Layer(nn.Module):
        def forward(self, given: torch.Tensor) -> torch.Tensor:
            return (given + 1) + 1

    layer, given = Layer(), torch.zeros(1000)

    def work() -> None:
        kept = layer(given)  # beside it, the sum that it is made of: 2 x 4000 bytes
        del kept
        torch.zeros(1500).view(3, 500).add_(1)

    assert peak_growth(work, partitions=[layer], devices=[torch.device("cpu")]) == [8000]


def _pair(cell: Cell, ours: int, theirs: int) -> dict[Cell, Figures]:
    nothing = [0] * cell.num_stages
    growth = [ours // 2, ours - ours // 2][: cell.num_stages]
    return {
        cell: Figures(parameter_bytes=nothing, growth_bytes=growth),
        cell._replace(implementation="torchgpipe"): Figures(parameter_bytes=nothing, growth_bytes=[theirs]),
    }


def test_cells_with_more_memory_are_named_with_their_causes_and_one_stage_is_counted_apart() -> None:
    found = {
        **_pair(Cell(1, 1, False, "ours"), 4 * MIB, 5 * MIB),
        **_pair(Cell(2, 8, True, "ours"), 11 * MIB, 10 * MIB),
        **_pair(Cell(2, 8, False, "ours"), 12 * MIB, 10 * MIB),
    }
    variants = Variants(apart=lambda cell: 10 * MIB + MIB // 2, by_stage=lambda cell: 10 * MIB)
    assert memory_notes(found, shape=SHAPE, variants=variants) == [
        "Memory: ours takes at most torchgpipe's in 0 of 2 cells.",
        "Memory: gradient accumulation (ours at K 1, one micro-batch at a time) takes at most torchgpipe's in 1 of 1 "
        "cells.",
        "The others:",
        "  K 2, M 8, checkpoint True: 11.0 MiB, torchgpipe 10.0 MiB, 10.0 % more: torchgpipe on devices of its own, "
        "each at its own peak, holds more, measured: 0.5 MiB; blocks recomputed one by one, not a stage at once, "
        "measured: 1.0 MiB; a block run again while the last micro-batch waits, whose backward torchgpipe takes first: "
        "at most: 0.8 MiB",
        "  K 2, M 8, checkpoint False: 12.0 MiB, torchgpipe 10.0 MiB, 20.0 % more: torchgpipe on devices of its own, "
        "each at its own peak, holds more, measured: 0.5 MiB; the rest is not explained",
    ]


def test_ratios_to_torchgpipe_are_told_by_the_number_of_micro_batches() -> None:
    found: dict[Cell, Figures] = {}
    for m, mine, theirs in ((1, 2.0, 1.0), (8, 1.0, 1.5)):
        for name, seconds in (("ours", mine), ("torchgpipe", theirs)):
            figures = Figures(seconds=[seconds] * 3, parameter_bytes=[0, 0], growth_bytes=[round(100 * seconds)])
            found[Cell(2, m, True, name)] = figures
    assert ratio_notes(found) == [
        "Ours over torchgpipe's, K 2, checkpoint True, M 1 8: samples/s 0.50 1.50; memory 2.00 0.67."
    ]


def test_throughput_is_the_median_of_rounds_beside_its_spread() -> None:
    figures = Figures(seconds=[1.0, 2.0, 4.0], forward_seconds=[0.5, 0.5, 1.0], parameter_bytes=[8], growth_bytes=[20])
    (row,) = rows_of({Cell(1, 1, False, "ours"): figures}, batch_size=64)
    assert (row["samples_per_s"], row["lowest"], row["highest"]) == (32, 16, 64)
    assert (row["forward_s"], row["backward_s"]) == (0.5, 1.5)
    assert (row["peak_activation_bytes"], row["total_bytes"]) == (12, 28)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--microbatches", "2,3"], "--microbatches: 3 does not divide the batch of 64"),
        (["--stages", "2"], "--output: --stages would replace the whole table by a part; give a folder for it"),
        (["--scale", "original", "--repeats", "9"], "--repeats: it has no effect with --scale original; leave it out"),
        (["--scale", "small", "--stages", "16"], "--stages: 16 is more than the 8 blocks of --scale small"),
        (["--scale", "original", "--stages", "3"], "K 3 with M 1 was not published; give of 1,2,4"),
        (["--checkpoint", "maybe"], "argument --checkpoint: maybe is not allowed; give one or more of False,True"),
        (["--stages", "two"], "argument --stages: two is not allowed; give a whole number of at least 1"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = [] if "--output" in told or "--repeats" in arguments else ["--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["gpt2_sweep.py", *arguments, *elsewhere])
    assert gpt2_sweep.run_guarded(gpt2_sweep.main) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and told in lines[0]


def test_without_torchgpipe_the_remedy_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.support.torchgpipe.find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["gpt2_sweep.py"])
    assert gpt2_sweep.run_guarded(gpt2_sweep.main) == 2
    assert 'pip install -e ".[bench]"' in capsys.readouterr().err


@pytest.mark.full
def test_the_script_runs_from_the_command_line(tmp_path: Path) -> None:
    flags = ["--scale", "small", "--stages", "1,2", "--microbatches", "2", "--repeats", "1", "--output", str(tmp_path)]
    command = [sys.executable, "-m", "benchmarks.gpt2_sweep", *flags]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)
    assert ended.returncode == 0, ended.stderr
    assert "Memory: ours takes at most torchgpipe's in" in ended.stdout
    assert {path.suffix for path in tmp_path.glob("gpt2-sweep.*")} == {".png", ".json"}
