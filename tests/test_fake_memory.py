"""Bytes counted without data are those of a real run; longer runs are on the line of short ones."""

from __future__ import annotations

import sys
from unittest.mock import patch

import pytest
import torch
from laws import REPOSITORY
from ranks import RankPool

sys.path.insert(0, str(REPOSITORY))

import benchmarks.gpt2_sweep.__main__ as gpt2_sweep
import benchmarks.support.fake_memory as fake_memory
from benchmarks.amoebanet_memory.jobs import Model
from benchmarks.amoebanet_memory.original import Original as AmoebaNet
from benchmarks.gpt2_sweep.original import Original, read_published
from benchmarks.gpt2_sweep.pipes import Batch, Torchgpipe, layers_of
from benchmarks.gpt2_sweep.report import Cell, Figures
from benchmarks.support.fake_memory import extend
from benchmarks.support.graphs import Setting
from pipetransformer.adapter import LiveBytes
from pipetransformer.graphs.zoo import zoo_model
from pipetransformer.process.world import World

SIZES = {"num_layers": 4, "width": 32, "num_heads": 4, "vocabulary_size": 61, "sequence_length": 16}

pytest.importorskip("torchgpipe", reason="needs the extra bench")


def _real_bytes(world: World, cell: Cell) -> list[int]:
    bench = gpt2_sweep.Bench(world, sizes=SIZES, stages=(2,), dropout=0.1)
    weights, growth = bench.memory(bench.build(cell))
    return Figures(parameter_bytes=weights, growth_bytes=growth).activation_bytes


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_stages_without_data_hold_the_bytes_of_two_real_ranks(ranks: RankPool, is_checkpointed: bool) -> None:
    cell = Cell(2, 4, is_checkpointed, "ours")
    assert Original(sizes=SIZES, batch_size=64).activation_bytes(cell) == ranks.run(2, _real_bytes, cell)[0]


def test_torchgpipe_without_data_holds_the_bytes_of_its_real_run() -> None:
    torch.manual_seed(0)
    model, ids = zoo_model("gpt2_90m").build(**SIZES, dropout=0.1), torch.zeros(64, 16, dtype=torch.long)
    pipe = Torchgpipe(
        layers_of(model),
        Batch(ids, ids),
        cuts=[],
        num_microbatches=4,
        checkpoint="except_last",
        devices=[torch.device("cpu")],
    )
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with patch("torchgpipe.pipeline.spawn_workers", fake_memory._spawn_none), LiveBytes() as live:
        pipe.step()
    cell = Cell(1, 4, True, "torchgpipe")
    assert Original(sizes=SIZES, batch_size=64).activation_bytes(cell) == [live.peak]


@pytest.mark.parametrize("name", [pytest.param("ours", marks=pytest.mark.full), "torchgpipe"])
def test_a_longer_step_is_on_the_line_of_short_ones(name: str) -> None:
    def measure(m: int) -> list[int]:
        return Original(sizes=SIZES, batch_size=2 * m).activation_bytes(Cell(2, m, True, name))

    assert extend(measure, 10, num_devices=2) == measure(10)


def test_the_allocator_takes_whole_segments_for_what_is_alive() -> None:
    (held,) = Original(sizes=SIZES, batch_size=64).held(Cell(1, 4, False, "torchgpipe"))
    assert held.reserved % 2**21 == 0 and held.alive <= held.reserved < 1.5 * held.alive + 40 * 2**20


def test_dropout_keeps_a_byte_a_number_on_cuda() -> None:
    original = Original(sizes=SIZES, batch_size=64, as_published=True)
    rows, heads = 64 * 16, 4
    hidden, weights = rows * 32, rows * 16 * heads  # numbers behind which something is dropped: see PlainGPT
    blocks = SIZES["num_layers"]
    for name in ("ours", "torchgpipe"):
        cell = Cell(1, 1, False, name)
        (there,), (here,) = original.activation_bytes(cell), original.on_cpu().activation_bytes(cell)
        causal = blocks * 16 * 16  # a mask that attention keeps where it is multiplied out
        assert here - there == 3 * (blocks * (2 * hidden + weights) + hidden) - causal, name


def test_what_is_on_no_line_is_run_whole() -> None:
    assert extend(lambda m: [5 + 2 * m, 7], 100, num_devices=8) == [205, 7]
    assert extend(lambda m: [m * m, m], 100, num_devices=1) == [10_000, 100]


def test_the_published_sweep_is_whole_and_its_model_is_12_bytes_a_parameter() -> None:
    published = read_published()
    assert len(published) == 84
    assert {row.total_bytes - row.activation_bytes for row in published.values()} == {12 * 89_762_304}
    with torch.device("meta"):
        assert sum(p.numel() for p in zoo_model("gpt2_90m").build().parameters()) == 89_762_304


def test_simulated_times_are_the_fitted_ones_where_they_were_fitted() -> None:
    original, fitted = Original(sizes=SIZES, batch_size=64), read_published()[Cell(1, 1, False, "ours")].times
    assert original.times(Cell(1, 1, False, "ours"), fitted) == pytest.approx(fitted, rel=1e-6)
    halves = original.times(Cell(2, 8, False, "ours"), fitted)
    assert sum(fitted) / 2 < sum(halves) < sum(fitted)


@pytest.mark.parametrize(
    "setting",
    [
        Setting("naive-1", 1, 4, checkpoint=None),
        pytest.param(Setting("pipeline-2", 2, 4, 4), marks=pytest.mark.full),
    ],
    ids=lambda s: s.name,
)
def test_the_planners_formula_is_near_what_cells_hold(setting: Setting) -> None:
    balance = (9,) if setting.num_devices == 1 else (5, 4)
    original = AmoebaNet(setting, Model(1, 16), balance=balance, image_size=64)
    ours, predicted = original.of_ours(), original.predicted()
    assert len(ours) == len(predicted) == setting.num_devices
    assert 0.8 < sum(predicted) / sum(ours) < 1.3


@pytest.mark.full
def test_the_allocators_bytes_of_a_long_run_grow_with_what_is_alive_in_it() -> None:
    """All of it is extended from the same short runs."""
    alive, reserved = list[int](), list[int]()
    for m in (20, 40):
        original = AmoebaNet(Setting("pipeline-2", 2, m, m), Model(1, 16), balance=(5, 4), image_size=64)
        alive.append(sum(original.of_torchgpipe()))
        reserved.append(sum(original.reserved_of_torchgpipe()))
    assert reserved[1] - reserved[0] == alive[1] - alive[0] > 0
    assert reserved[0] > alive[0]
