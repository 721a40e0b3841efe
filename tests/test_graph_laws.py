"""Law 1 for graphs: any schedule and any recomputation give what the whole model over the same micro-batches gives."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from graphs import MODELS, SMALL_ZOO, batch, build, errors, even_cut, loss, reference, traced
from ranks import RankPool
from torch import Tensor, nn

from pipetransformer.adapter import MODES, sends_without_gradients
from pipetransformer.graphs.graph import Graph, GraphPipeline
from pipetransformer.graphs.graph import pipeline as pipeline_module
from pipetransformer.process.world import World

EXACT = 1e-10
M = 4

Way = tuple[str, int, str]  # schedule, stages a rank, what is recomputed

WAYS = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1), ("zero_bubble", 2))
GRID: tuple[Way, ...] = tuple((kind, v, mode) for kind, v in WAYS for mode in MODES)

WHOLE = "residual"  # the one that meets every way in the default run
FEW: dict[str, tuple[Way, ...]] = {
    "residual": (("interleaved", 2, "always"), ("zero_bubble", 2, "selective"), ("gpipe", 1, "except_last")),
    "long skips": (("zero_bubble", 1, "never"), ("1f1b", 1, "selective")),
    "two inputs": (("1f1b", 1, "except_last"),),
    "tied": (("interleaved", 2, "selective"), ("zero_bubble", 2, "never"), ("zero_bubble", 1, "except_last")),
    "without gradients": (("zero_bubble", 2, "never"), ("interleaved", 2, "always")),
    "resnet101": (("zero_bubble", 2, "never"),),
    "amoebanetd_18_208": (("zero_bubble", 1, "never"),),
    "amoebanet_4x512_c10": (("interleaved", 2, "always"),),
    "unet_5_64": (("interleaved", 2, "except_last"),),
    "gpt2": (("zero_bubble", 2, "never"), ("1f1b", 1, "always")),
    "gpt2_90m": (("gpipe", 1, "selective"),),
}


def pipeline_of(world: World, graph: Graph, way: Way) -> GraphPipeline:
    kind, stages_per_rank, mode = way
    return GraphPipeline(
        graph,
        boundaries=even_cut(graph, world.size * stages_per_rank),
        num_microbatches=M,
        kind=kind,
        loss=loss,
        group=dist.group.WORLD,
        stages_per_rank=stages_per_rank,
        recompute=mode,
    )


def mini_batch(world: World, name: str, ways: tuple[Way, ...]) -> dict[Way, float]:
    """By way: the largest error of a gradient, statistic or loss that this rank has after one mini-batch."""
    model, graph = traced(name)
    state = copy.deepcopy(model.state_dict())
    data, target = batch(name, num_microbatches=M)
    expected = reference(model, data, target, num_microbatches=M)
    found = {}
    for way in ways:
        model.load_state_dict(state)
        model.zero_grad()
        pipeline = pipeline_of(world, graph, way)
        losses = pipeline.train((data,), target)
        assert len(pipeline.stages) == way[1] and pipeline.is_last == (losses is not None)
        found[way] = max(max(errors(stage, expected).values()) for stage in pipeline.stages)
        if losses is not None:
            found[way] = max(found[way], float(((losses - expected.losses) / expected.losses).abs().max()))
    return found


@pytest.mark.parametrize(
    ("name", "ways"),
    [
        *FEW.items(),
        *(
            pytest.param(n, GRID, marks=() if n == WHOLE else pytest.mark.full, id=f"{n}-grid")
            for n in (*MODELS, *SMALL_ZOO)
        ),
    ],
)
def test_any_way_gives_the_model_s_gradients_and_statistics(ranks: RankPool, name: str, ways: tuple[Way, ...]) -> None:
    if name == "without gradients" and not sends_without_gradients():
        pytest.skip("stages of this version of torch cannot send tensors that have no gradient")
    for found in ranks.run(2, mini_batch, name, ways, timeout=400):
        assert max(found.values()) < EXACT, found


def test_the_few_have_every_model_schedule_and_mode() -> None:
    ways = {way for few in FEW.values() for way in few}
    assert FEW.keys() == MODELS.keys() | SMALL_ZOO.keys()
    assert {(kind, v) for kind, v, _ in ways} == set(WAYS) and {mode for *_, mode in ways} == set(MODES)


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1),
}


def squares_of(gradients: list[Tensor]) -> Tensor:
    return torch.stack([gradient.square().sum() for gradient in gradients]).sum()


def clip(gradients: list[Tensor], squares: Tensor) -> None:
    """To norm 1; ``squares`` is the square of the norm of all."""
    torch._foreach_mul_(gradients, float(squares.sqrt().add(1e-6).reciprocal().clamp_max(1.0)))


def plain_steps(name: str, optimizer: str, *, num_steps: int) -> nn.Module:
    model = build(name)
    stepper = OPTIMIZERS[optimizer](model.parameters())
    data, target = batch(name, num_microbatches=M)
    for step in range(num_steps):
        found = reference(model, data.roll(step, 0), target, num_microbatches=M)
        for key, parameter in model.named_parameters():
            parameter.grad = found.gradients.get(key)
        for key, buffer in model.named_buffers():
            buffer.copy_(found.buffers[key])
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        clip(gradients, squares_of(gradients))
        stepper.step()
    return model


def twenty_steps(world: World, name: str, way: Way, optimizer: str) -> float:
    """The largest error of a weight or buffer of this rank, relative to the tensor's largest value."""
    expected = plain_steps(name, optimizer, num_steps=20).state_dict()
    _, graph = traced(name)
    pipeline = pipeline_of(world, graph, way)
    held = {key: p for stage in pipeline.stages for key, p in stage.named_parameters()}
    tied = graph.tied(even_cut(graph, world.size * way[1]))
    foreign = {name for name, stages in tied if min(stage % world.size for stage in stages) != world.rank}
    stepper = OPTIMIZERS[optimizer](held.values())
    data, target = batch(name, num_microbatches=M)
    for step in range(20):
        stepper.zero_grad()
        pipeline.train((data.roll(step, 0),), target)
        gradients = {key: p.grad for key, p in held.items() if p.grad is not None}
        squares = squares_of([gradient for key, gradient in gradients.items() if key not in foreign])
        dist.all_reduce(squares)
        clip(list(gradients.values()), squares)
        stepper.step()
    state = {key: value for stage in pipeline.stages for key, value in stage.state_dict().items()}
    return max(
        float((value - expected[key]).abs().max()) / max(float(expected[key].abs().max()), 1e-3)
        for key, value in state.items()
    )


BATCH_NORM, TIED = ("residual", ("interleaved", 2, "always")), ("gpt2", ("zero_bubble", 2, "except_last"))


ZOO_BATCH_NORM = ("resnet101", ("zero_bubble", 2, "except_last"))


@pytest.mark.parametrize(
    ("num_ranks", "name", "way", "optimizer"),
    [
        (2, *BATCH_NORM, "sgd"),
        pytest.param(2, *BATCH_NORM, "adamw", marks=pytest.mark.full),
        pytest.param(2, *TIED, "sgd", marks=pytest.mark.full),
        (2, *TIED, "adamw"),
        pytest.param(4, *ZOO_BATCH_NORM, "sgd", marks=pytest.mark.full),
    ],
)
def test_twenty_steps_give_the_plain_loop_s_weights(
    ranks: RankPool, num_ranks: int, name: str, way: Way, optimizer: str
) -> None:
    """Values below 1e-3 (of biases that begin at zero) are seen beside 1e-3."""
    errors_by_rank = ranks.run(num_ranks, twenty_steps, name, way, optimizer, timeout=400)
    assert max(errors_by_rank) < EXACT, errors_by_rank


PLANTED: dict[str, tuple[str, Any, str, Way]] = {
    "statistics counted twice": ("recomputing", nullcontext, "residual", ("interleaved", 2, "always")),
    "tied weights not summed": ("sum_tied_gradients", lambda *_, **__: None, "tied", ("zero_bubble", 2, "never")),
}


def planted(world: World, bug: str) -> float:
    name, instead, model, way = PLANTED[bug]
    with mock.patch.object(pipeline_module, name, instead):
        return mini_batch(world, model, (way,))[way]


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_breaks_the_law(ranks: RankPool, bug: str) -> None:
    assert max(ranks.run(2, planted, bug)) > 1e4 * EXACT
