"""Pipelines over graphs: what is recomputed as one, random numbers, and mistakes that are one line on every rank."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from graphs import ROWS, batch, build, even_cut, loss, traced
from ranks import RankPool
from torch import Tensor, nn

from pipetransformer.adapter import MODES
from pipetransformer.errors import UserError
from pipetransformer.graphs.graph import Graph, GraphPipeline, trace
from pipetransformer.process.world import World

ALONE: dict[str, Any] = {"boundaries": (), "num_microbatches": 2, "kind": "gpipe", "loss": loss, "group": None}


def segments(graph: Graph, units: range) -> list[tuple[str, int]]:
    """(block, number of units) of every segment."""
    return [(graph.units[segment.start].block, len(segment)) for segment in graph.segments(units)]


def test_blocks_are_recomputed_as_wholes() -> None:
    _, graph = traced("gpt2")
    blocks = [(f"transformer.h.{number}", 7) for number in range(4)]
    assert segments(graph, range(graph.num_units)) == [("", 2), *blocks, ("", 2)]
    assert segments(graph, range(5, 17)) == [("transformer.h.0", 4), ("transformer.h.1", 7), ("transformer.h.2", 1)]


def test_calls_of_one_block_are_segments_of_their_own() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))])

        def forward(self, rows: Tensor) -> Tensor:
            return self.layers[0](self.layers[0](rows))

    graph = trace(Shared(), (torch.ones(2, 4),))
    assert segments(graph, range(graph.num_units)) == [("layers.0", 2), ("layers.0@1", 2)]


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = build("tied")
        self.drop = nn.ModuleList([nn.Dropout(0.3), nn.Dropout(0.3)])
        self.between = nn.Linear(66, 66).double()

    def forward(self, ids: Tensor) -> Tensor:
        return self.drop[1](self.between(self.drop[0](self.body(ids))).tanh())


@pytest.mark.parametrize("mode", MODES[1:])
def test_dropout_draws_the_same_in_any_mode(mode: str) -> None:
    """To the bit; the state of random numbers behind a step is the same too."""
    data, target = batch("tied", num_microbatches=2)
    found = []
    for checkpoint in ("never", mode):
        torch.manual_seed(0)
        model = Dropping().train()
        pipeline = GraphPipeline(trace(model, (data[:ROWS],)), **ALONE, recompute=checkpoint)
        pipeline.train((data,), target)
        found.append([p.grad for p in model.parameters() if p.grad is not None] + [torch.get_rng_state()])
        assert pipeline.stages[0].training and not torch.equal(*(pipeline.stages[0](data[:ROWS]) for _ in range(2)))
    assert all(map(torch.equal, *found))


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, rows: Tensor) -> Tensor:
        self.seen.add_(1.0)
        return self.linear(rows) * self.seen


def test_a_forward_that_counts_is_not_run_twice() -> None:
    graph = trace(Counting(), (torch.ones(2, 4),))
    GraphPipeline(graph, **ALONE)
    with pytest.raises(UserError, match="would change the buffer seen twice.*give never"):
        GraphPipeline(graph, **ALONE, recompute="always")


MISTAKES: tuple[tuple[dict[str, Any], str], ...] = (
    ({"kind": "zb"}, "kind: zb is no schedule; give one of gpipe, 1f1b, interleaved, zero_bubble"),
    ({"recompute": "sometimes"}, "recompute: sometimes is not allowed; give one of never, except_last"),
    ({"stages_per_rank": 2, "stages": 4}, "schedule gpipe has 1 stage a rank"),
    ({"kind": "interleaved"}, "schedule interleaved needs at least 2 stages a rank"),
    ({"stages": 3}, "2 cuts make 3 stages; 2 ranks of 1 stages each take 1 cuts"),
    ({"kind": "1f1b", "num_microbatches": 1}, "num_microbatches: 1 is not allowed; schedule 1f1b over 2 ranks takes 2"),
    ({"boundaries": (999,)}, "boundaries: (999,) leave a stage of the "),
    ({"kind": "zero_bubble", "num_microbatches": 5}, "schedule zero_bubble over 2 ranks takes 4 or 6"),
)


def mistakes(world: World) -> list[str]:
    _, graph = traced("residual")
    found = []
    for given, _ in MISTAKES:
        stages = given.get("stages", 2)
        options = {**ALONE, "boundaries": even_cut(graph, stages), **given, "group": dist.group.WORLD}
        options.pop("stages", None)
        with pytest.raises(UserError) as caught:
            GraphPipeline(graph, **options)
        found.append(str(caught.value))
    return found


@pytest.mark.parametrize("rows", [2 * ROWS - 1, ROWS, 2 * ROWS + 2])
def test_a_batch_that_is_not_so_many_micro_batches_is_one_line(rows: int) -> None:
    _, graph = traced("residual")
    data, target = batch("residual", num_microbatches=3)
    pipeline = GraphPipeline(graph, **ALONE)
    for run in (lambda: pipeline.train((data[:rows],), target[:rows]), lambda: pipeline.evaluate((data[:rows],))):
        with pytest.raises(UserError, match=rf"inputs: of shapes .*; give \[\({2 * ROWS}, ") as caught:
            run()
        assert "\n" not in str(caught.value)


def test_a_mistake_is_one_line_on_every_rank(ranks: RankPool) -> None:
    first, last = ranks.run(2, mistakes)
    assert first == last
    for line, (_, expected) in zip(first, MISTAKES):
        assert expected in line and "\n" not in line


def outputs_at_losses(world: World, kind: str) -> list[int]:
    """How many outputs of micro-batches before are there when a loss is computed; nothing where none is."""
    outputs: list[weakref.ref[Tensor]] = []
    found = []

    def watched(output: Tensor, target: Tensor) -> Tensor:
        found.append(sum(earlier() is not None for earlier in outputs))
        outputs.append(weakref.ref(output))
        return loss(output, target)

    _, graph = traced("residual")
    data, target = batch("residual", num_microbatches=4)
    stages = 4 if kind == "interleaved" else 2
    pipeline = GraphPipeline(
        graph, boundaries=even_cut(graph, stages), num_microbatches=4, kind=kind, loss=watched, group=dist.group.WORLD,
        stages_per_rank=stages // 2,
    )  # fmt: skip
    pipeline.train((data,), target)
    return found


@pytest.mark.parametrize("kind", ["gpipe", "1f1b", "interleaved", "zero_bubble"])
def test_the_last_stage_forgets_its_outputs(kind: str, ranks: RankPool) -> None:
    """They may be logits of large vocabularies, and the backward begins at the loss."""
    assert ranks.run(2, outputs_at_losses, kind) == [[], [0, 0, 0, 0]]
