"""Recomputation changes memory and time, and not one bit of a gradient."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from laws import Case, configuration, elastic_run, plain_run, write_replay
from ranks import RankPool
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from pipetransformer.adapter import MODES, LiveBytes, Recompute, kept_bytes, product_bytes
from pipetransformer.data import alone
from pipetransformer.engine import executor as execute
from pipetransformer.models import Stage
from pipetransformer.process.world import World
from pipetransformer.run.job import build_job
from pipetransformer.trainer import Trainer

ON = MODES[1:]


def stage_of_vit(*, precision: str, dropout: float, around: Any = None) -> tuple[Stage, Tensor]:
    """Blocks and head of a tiny ViT, and what enters them [4, tokens, width]; ``around`` does not ask for the unit."""
    overrides = [*Case("vit", 1, ()).overrides(""), f"train.precision={precision}", f"model.dropout={dropout}"]
    job = build_job(configuration("vit", overrides), World(0, 1, 0, 1, torch.device("cpu")), lead=alone)
    job.whole_model().train()
    chain = job.chain
    hidden = torch.randn(chain.boundary(0, rows=4, length=1).shape, generator=torch.Generator().manual_seed(1))
    of_unit = None if around is None else lambda unit, *arguments: around(*arguments)
    return Stage(chain, range(1, chain.num_units), around=of_unit), hidden.to(chain.dtype).requires_grad_()


def gradients(mode: str, **settings: Any) -> list[Tensor]:
    around = Recompute(mode)
    stage, hidden = stage_of_vit(**settings, around=around)
    torch.manual_seed(7)
    around.is_last_microbatch = False
    outputs = [stage(hidden) for _ in range(2)]
    for output in reversed(outputs):
        output.float().square().sum().backward()
    return [hidden.grad, *(parameter.grad for parameter in stage.parameters())]  # type: ignore[list-item]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("mode", ON)
def test_no_bit_changes(mode: str, precision: str) -> None:
    """With dropout, under autocast, and with micro-batches whose backwards come in another order."""
    expected = gradients("never", precision=precision, dropout=0.2)
    without = gradients("never", precision=precision, dropout=0.0)
    assert not all(map(torch.equal, without, expected)), "nothing was dropped"
    assert all(map(torch.equal, gradients(mode, precision=precision, dropout=0.2), expected))


class Block(nn.Module):
    """Counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.count = nn.Linear(8, 8), 0

    def forward(self, hidden: Tensor, inputs: object) -> Tensor:
        self.count += 1
        return self.linear(hidden).tanh()  # type: ignore[no-any-return]


@pytest.mark.parametrize(("mode", "expected"), [("never", 4), ("except_last", 7), ("always", 8), ("selective", 8)])
def test_which_microbatches_run_again(mode: str, expected: int) -> None:
    """Four micro-batches, all forwards before all backwards."""
    block, around, outputs = Block(), Recompute(mode), []
    for number in range(4):
        around.is_last_microbatch = number == 3
        outputs.append(around(block, torch.ones(2, 8), {}))
    for output in outputs:
        output.sum().backward()
    assert block.count == expected


def test_a_context_surrounds_recomputation_alone() -> None:
    seen: list[bool] = []
    inside = False

    @contextmanager
    def again() -> Iterator[None]:
        nonlocal inside
        inside = True
        try:
            yield
        finally:
            inside = False

    block = Block()
    block.register_forward_pre_hook(lambda *_: seen.append(inside))
    for mode in ("always", "selective"):
        seen.clear()
        output = Recompute(mode, context_fn=again)(block, torch.ones(2, 8), {})
        output.sum().backward()
        assert seen == [False, True], mode
    assert not inside


def flops(mode: str) -> int:
    around = Recompute(mode)
    around.is_last_microbatch = False
    stage, hidden = stage_of_vit(precision="float32", dropout=0.0, around=around)
    with FlopCounterMode(display=False) as counter:
        stage(hidden).square().sum().backward()
    return counter.get_total_flops()


def test_selective_repeats_no_matrix_product() -> None:
    never, always, selective = flops("never"), flops("always"), flops("selective")
    assert selective == never
    assert 1.1 * never < always <= 4 / 3 * never


def test_selective_keeps_what_is_measured() -> None:
    block = Block()
    hidden = torch.ones(2, 8)
    assert product_bytes(lambda: block(hidden, {})) == 2 * 8 * 4
    assert [kept_bytes(mode, 1000, 10, product_bytes=64) for mode in MODES] == [1000, 10, 10, 74]


DROPPED = Case(
    "vit",
    2,
    ((0, 0, 2), (5, 2, 1), (9, 1, 2), (14, 0, 2)),
    4,
    dropout=0.1,
    ways=(("gpipe", 1), ("1f1b", 1), ("1f1b", 1), ("interleaved", 2)),
)


@pytest.mark.parametrize("mode", ["always", *(pytest.param(m, marks=pytest.mark.full) for m in ON if m != "always")])
def test_dropout_draws_the_same_in_any_mode(mode: str, ranks: RankPool, tmp_path: Path) -> None:
    """The same bits for each (seed, plans), whatever is recomputed."""
    ours, expected = (
        ranks.run(2, elastic_run, replace(DROPPED, recompute=m), "", str(tmp_path))[0][0] for m in (mode, "never")
    )
    without, _ = plain_run("vit", ((0, 0),), tuple(replace(DROPPED, dropout=0.0).overrides("")))
    assert any(not np.array_equal(expected[name], without[name]) for name in expected)
    assert all(np.array_equal(ours[name], expected[name]) for name in expected)


WIDE = "{patch_size: 1, in_chans: 1, embed_dim: 32, depth: 6, num_heads: 2}"


def peak_bytes(world: World, mode: str, schedule: str, folder: str) -> int:
    """The most that the second step of a run held at once, beside what it began with and its gradients."""
    peaks: list[int] = []
    train = execute._PipelineExecutor.train

    def measured(self: execute._PipelineExecutor, batch: execute.StepInput) -> None:
        if len(peaks) != 1:
            peaks.append(0)
            return train(self, batch)
        with LiveBytes() as live:
            train(self, batch)
        peaks.append(live.peak)
        return None

    case = Case("vit", 2, ((0, 0, 2),), 8, schedule, precision="float32")
    replay = Path(folder) / f"replay_{mode}_{world.rank}.jsonl"
    write_replay(replay, case.plans())
    overrides = [*case.overrides(""), f"pipe.recompute={mode}", f"model.kwargs={WIDE}", "train.batch_size=128"]
    overrides += ["data.max_train_samples=256", "data.max_eval_samples=8", "train.epochs=1"]
    overrides += [f"run.replay={replay}", f"run.dir={folder}", f"run.id={mode}"]
    trainer = Trainer(configuration("vit", overrides), world, timed=False)
    with mock.patch.object(execute._PipelineExecutor, "train", measured):
        trainer.run()
    weights = sum(p.numel() * p.element_size() for p in trainer.engine.chain.model.parameters() if not p.is_meta)
    return peaks[1] - weights


def test_always_keeps_a_fifth_of_what_gpipe_keeps(ranks: RankPool, tmp_path: Path) -> None:
    never, always = (ranks.run(2, peak_bytes, mode, "gpipe", str(tmp_path)) for mode in ("never", "always"))
    assert all(less <= 0.2 * most for less, most in zip(always, never, strict=True)), (never, always)


@pytest.mark.full
def test_selective_keeps_more_than_always_and_less_than_all(ranks: RankPool, tmp_path: Path) -> None:
    modes = ("always", "selective", "never")
    for peaks in zip(*(ranks.run(2, peak_bytes, mode, "gpipe", str(tmp_path)) for mode in modes), strict=True):
        assert list(peaks) == sorted(set(peaks)), peaks
