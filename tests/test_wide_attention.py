"""Attention in float32 under bfloat16: where it applies, what it computes, how far it is worth it, and that a run uses
what it has settled on."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from laws import STATIC, Case, configuration
from ranks import RankPool
from tiny import tiny_bert, tiny_sst2
from torch import Tensor

from pipetransformer.adapter import WideAttention, attentions
from pipetransformer.process.collectives import led_by, slowest
from pipetransformer.process.world import World
from pipetransformer.run import wide_attention
from pipetransformer.run.job import build_job
from pipetransformer.run.wide_attention import widest
from pipetransformer.trainer import Trainer

PLAIN = F.scaled_dot_product_attention


def leaves(positions: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    random = torch.Generator().manual_seed(0)
    drawn = (torch.randn(2, 3, positions, 8, generator=random) for _ in range(3))
    return [each.to(dtype).requires_grad_() for each in drawn]


def attended(most: int, own: list[Tensor], **keywords: Any) -> Tensor:
    with WideAttention(most), torch.autocast("cpu", dtype=torch.bfloat16):
        return F.scaled_dot_product_attention(*own, **keywords)


@pytest.mark.parametrize("masked", [None, torch.bool, torch.bfloat16])
def test_its_products_are_float32_s(masked: torch.dtype | None) -> None:
    mask = None
    if masked is not None:
        mask = torch.ones(2, 1, 5, 5, dtype=torch.bool).tril() if masked == torch.bool else torch.zeros(5, 5).to(masked)
    own, exact = leaves(5), [each.detach().float().requires_grad_() for each in leaves(5)]
    expected = PLAIN(*exact, attn_mask=None if mask is None else mask if masked == torch.bool else mask.float())
    found = attended(5, own, attn_mask=mask)
    assert found.dtype == torch.bfloat16 and torch.equal(found, expected.to(torch.bfloat16))
    given = torch.ones_like(found)
    found.backward(given)
    expected.backward(given.float())
    for mine, theirs in zip(own, exact):
        assert mine.grad is not None and theirs.grad is not None
        assert torch.equal(mine.grad, theirs.grad.to(torch.bfloat16))


@pytest.mark.parametrize(
    ("most", "positions", "dtype", "dropout", "grad"),
    [
        (0, 5, torch.bfloat16, 0.0, True),
        (4, 5, torch.bfloat16, 0.0, True),
        (5, 5, torch.float32, 0.0, True),
        (5, 5, torch.bfloat16, 0.1, True),
        (5, 5, torch.bfloat16, 0.0, False),
    ],
)
def test_elsewhere_the_library_s_own_runs(
    most: int, positions: int, dtype: torch.dtype, dropout: float, grad: bool
) -> None:
    own = [each.requires_grad_(grad) for each in map(Tensor.detach, leaves(positions, dtype))]
    types: list[torch.dtype] = []

    def spy(query: Tensor, *others: Any, **named: Any) -> Tensor:
        types.append(query.dtype)
        return PLAIN(query, *others, **named)

    with mock.patch.object(F, "scaled_dot_product_attention", spy):
        with WideAttention(most):
            F.scaled_dot_product_attention(*own, dropout_p=dropout)
        assert types == [dtype] and F.scaled_dot_product_attention is spy


def test_it_may_be_entered_inside_itself() -> None:
    wide, own = WideAttention(5), leaves(5)
    with wide, wide:
        inner = F.scaled_dot_product_attention(*own)
    assert F.scaled_dot_product_attention is PLAIN and torch.equal(inner, attended(5, own))


def test_the_function_is_there_again_behind_an_error() -> None:
    with pytest.raises(ZeroDivisionError), WideAttention(5):
        assert F.scaled_dot_product_attention is not PLAIN
        raise ZeroDivisionError
    with attentions() as calls:
        PLAIN(*leaves(5))
        F.scaled_dot_product_attention(*leaves(5), None, 0.25)
        F.scaled_dot_product_attention(*leaves(4), dropout_p=0.5)
    assert F.scaled_dot_product_attention is PLAIN
    assert calls == [((2, 3, 5, 8), (2, 3, 5, 8), 0.25), ((2, 3, 4, 8), (2, 3, 4, 8), 0.5)]


@pytest.mark.parametrize(
    ("ratios", "expected"), [([0.2, 0.5, 0.89], 64), ([0.2, 0.95, 0.5], 16), ([0.91, 0.1, 0.1], 0)]
)
def test_it_goes_as_far_as_it_is_worth_it(ratios: list[float], expected: int) -> None:
    assert widest([16, 32, 64], ratios) == expected and widest([], []) == 0


def settled(world: World, ratio: float, model: str, overrides: list[str]) -> tuple[int, int, str]:
    """The number of a job, the positions that its chain's attention is told, and the reason."""
    case = Case(model, 1, STATIC[1])
    config = configuration(model, [*case.overrides(overrides.pop()), "train.precision=bfloat16", *overrides])
    with mock.patch.object(wide_attention, "_ratio", lambda *_, **__: ratio):
        job = build_job(config, world, lead=partial(led_by, 0))
    assert job.config.train.wide_attention == job.precision.wide_attention
    return job.precision.wide_attention, job.chain.attention._most, job.precision.attention_reason


@pytest.mark.parametrize(
    ("ratio", "model", "overrides", "expected"),
    [
        (0.5, "vit", [], 17),  # 16 patches and the class token
        (1.0, "vit", [], 0),
        (0.5, "vit", ["train.wide_attention=9"], 9),
        (0.5, "vit", ["train.precision=float32"], 0),
        (0.5, "vit", ["pipe.measure=false"], 0),
        (0.5, "bert", [], 64),
        (0.5, "bert", ["model.dropout=0.1"], 0),
    ],
)
def test_a_job_settles_on_a_number(
    ratio: float, model: str, overrides: list[str], expected: int, ranks: RankPool, tmp_path: Path
) -> None:
    tiny_bert(tmp_path / "bert", layers=6)
    tiny_sst2(tmp_path / "sst2", 150, num_eval_samples=40)
    number, told, reason = ranks.run(1, settled, ratio, model, [*overrides, str(tmp_path)])[0]
    assert number == told
    if model == "vit" or expected == 0:
        assert number == expected
    else:
        assert 0 < number <= expected
    assert ("over those in bfloat16" in reason) == (not overrides)


def one_ratio(world: World) -> float:
    return wide_attention._ratio((2, 4, 16, 8), (2, 2, 16, 8), is_grouped=True, agree=slowest)


def test_both_ways_are_timed(ranks: RankPool) -> None:
    first, second = ranks.run(2, one_ratio)
    assert first == second and 0 < first < 100


def trained(world: World, folder: str, most: int) -> list[torch.dtype]:
    """The types of the queries of a run, of calls with gradients to compute."""
    types: list[torch.dtype] = []

    def spy(query: Tensor, *others: Any, **named: Any) -> Tensor:
        if query.requires_grad:
            types.append(query.dtype)
        return PLAIN(query, *others, **named)

    own = [*Case("vit", 1, STATIC[1]).overrides(""), "train.precision=bfloat16", "pipe.measure=false"]
    own += [f"train.wide_attention={most}", "train.epochs=1", f"run.dir={folder}", f"run.id={most}"]
    with mock.patch.object(F, "scaled_dot_product_attention", spy):
        Trainer(configuration("vit", own), world).run()
    return types


def test_a_run_trains_by_it_and_says_so(ranks: RankPool, tmp_path: Path) -> None:
    assert set(ranks.run(1, trained, str(tmp_path), 17)[0]) == {torch.float32}
    assert set(ranks.run(1, trained, str(tmp_path), 0)[0]) == {torch.bfloat16}
    told = [json.loads(line) for line in (tmp_path / "17" / "events.jsonl").read_text().splitlines()]
    assert next(event for event in told if event["event"] == "run")["wide_attention"] == 17
