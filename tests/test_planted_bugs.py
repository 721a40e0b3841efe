"""The law can fail: each planted bug, of the kind that elastic training invites, breaks it by far."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from laws import SHRINK_AND_GROW, STATIC, TWO_RANKS, Case, Weights, deviation, elastic_run, reference
from ranks import RankPool

from pipetransformer.cache import AutoCache
from pipetransformer.dp import GradientReducer
from pipetransformer.engine import Engine
from pipetransformer.engine import step as step_module
from pipetransformer.engine.objective import Objective
from pipetransformer.process.agreement import Disagreement
from pipetransformer.process.world import World


@contextmanager
def dropped_reduction() -> Iterator[None]:
    """The first bucket is never summed over the replicas."""
    launch = GradientReducer._launch

    def skipping(self: GradientReducer) -> None:
        if self._next == 0 and self._buckets[0].missing == 0:
            with mock.patch("torch.distributed.all_reduce", return_value=mock.Mock()):
                self._buckets[0].work = torch.distributed.all_reduce(self._buckets[0].flat)
            self._next = 1
        launch(self)

    with mock.patch.object(GradientReducer, "_launch", skipping):
        yield


def _after_move(change: Any) -> Any:
    enter = Engine.enter

    def changed(self: Engine, plan: Any, **named: Any) -> Any:
        is_first = self._layout is None
        moved = enter(self, plan, **named)
        if not is_first:
            change(self.layout)
        return moved

    return mock.patch.object(Engine, "enter", changed)


@contextmanager
def head_drawn_anew() -> Iterator[None]:
    def draw(layout: Any) -> None:
        for name, parameter in layout.parameters.items():
            if name == "head.weight":
                torch.nn.init.trunc_normal_(parameter, std=0.02)

    with _after_move(draw):
        yield


@contextmanager
def moments_lost() -> Iterator[None]:
    with _after_move(lambda layout: layout.optimizer.state.clear()):
        yield


@contextmanager
def stale_cache_row() -> Iterator[None]:
    """One sample keeps the activations of the boundary before, published as if they were new."""
    advance = AutoCache.advance

    def leaving_one(self: AutoCache, target: int, **how: bool) -> Any:
        store = self._cache.stores["train"]
        places = [part[0] for part in (*store._regions.values(), store._rows) if part is not None]
        before = [place.clone() for place in places]
        done = advance(self, target, **how)
        for place, values in zip(places, before):
            place.copy_(values)
        return done

    with mock.patch.object(AutoCache, "advance", leaving_one):
        yield


@contextmanager
def mis_scaled_microbatch() -> Iterator[None]:
    """Every loss is the mean of its micro-batch, divided by M: wrong where real rows differ."""
    call = Objective.__call__

    def mean(self: Objective, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        real = (labels >= 0).sum().clamp(min=1)
        return call(self, logits, labels) * self._batch_size / real / round(self._batch_size / len(labels) + 0.499)

    with mock.patch.object(Objective, "__call__", mean):
        yield


@contextmanager
def clipping_per_stage() -> Iterator[None]:
    clip = step_module.clip_scale
    with mock.patch.object(step_module, "clip_scale", lambda *a, **named: clip(*a, **{**named, "group": None})):
        yield


def new_weights_kept() -> Any:
    return mock.patch.object(GradientReducer, "share", lambda self: None)


BUGS = {
    "dropped reduction": (dropped_reduction, Case("vit", 2, STATIC[1], 2)),
    "head drawn anew": (head_drawn_anew, Case("vit", 2, TWO_RANKS, 2)),
    "moments lost at a transition": (moments_lost, Case("vit", 4, SHRINK_AND_GROW, 4)),
    "stale cache row": (stale_cache_row, Case("vit", 2, TWO_RANKS, 2, cached=True)),
    "mis-scaled micro-batch": (mis_scaled_microbatch, Case("vit", 1, STATIC[1], 4, optimizer="sgd", clip=None)),
    "new weights kept by their owner": (new_weights_kept, Case("vit", 2, STATIC[1], 2, shard="optimizer")),
    "clipping per stage": (clipping_per_stage, Case("vit", 2, STATIC[2], 2)),
}


def run_with_bug(world: World, name: str, folder: str) -> tuple[Weights | None, object]:
    bug, case = BUGS[name]
    with mock.patch("pipetransformer.run.guards.agree_by_name"):  # the law is to see it alone
        return elastic_run(world, case, "", folder, bug())


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_breaks_the_law(name: str, ranks: RankPool, tmp_path: Path) -> None:
    case = BUGS[name][1]
    weights, _ = reference(case, "")
    answers = ranks.run(case.world_size, run_with_bug, name, str(tmp_path))
    assert deviation(answers[0][0], weights) > 1e-4


def compared(world: World, name: str, folder: str) -> str:
    bug, case = BUGS[name]
    try:
        elastic_run(world, case, "", folder, bug())
    except Disagreement as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", ["dropped reduction", "new weights kept by their owner"])
def test_replicas_that_drift_apart_are_found_at_the_end_of_the_epoch(
    name: str, ranks: RankPool, tmp_path: Path
) -> None:
    for error in ranks.run(2, compared, name, str(tmp_path)):
        assert re.match(r"step 5: rank 1 has other weights of \S+ than its replicas", error), error
