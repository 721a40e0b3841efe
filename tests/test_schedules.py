"""Schedules: orders are torch's own, evaluation goes through several stages a rank, gradients stay in their buckets."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from laws import Case, configuration_file, elastic_run
from ranks import RankPool
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from pipetransformer.adapter import (
    Schedule,
    StagePart,
    StageTimes,
    build_schedule,
    keeps_boundaries,
    run_schedule,
    sends_without_gradients,
)
from pipetransformer.adapter.split import bytes_between_halves, splits_exactly
from pipetransformer.config import load_config
from pipetransformer.dp import GradientReducer
from pipetransformer.errors import UserError
from pipetransformer.plan.schedules import SCHEDULES, Kind, Work, orders, why_not
from pipetransformer.process.world import World

TORCH = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
}


def torch_orders(schedule: str, *, num_ranks: int, num_microbatches: int, stages_per_rank: int = 1) -> list[list[Work]]:
    """What torch's own schedule has each rank compute, in order; idle slots and sums of gradients are left out."""
    stages: list[Any] = [
        SimpleNamespace(
            stage_index=index,
            num_stages=num_ranks * stages_per_rank,
            group_size=num_ranks,
            group_rank=0,
            is_first=index == 0,
            is_last=False,
            submod=nn.Module(),
            has_backward=True,
        )
        for index in range(0, num_ranks * stages_per_rank, num_ranks)
    ]
    made = TORCH[schedule](stages if schedule in ("interleaved", "zero_bubble") else stages[0], num_microbatches, len)
    found = made.pipeline_order
    assert found is not None
    kinds: dict[str, Kind] = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
    return [
        [
            Work(kinds[action.computation_type.name], action.stage_index, action.microbatch_index)
            for action in found[rank]
            if action is not None and action.computation_type.name in kinds
        ]
        for rank in range(num_ranks)
    ]


SIZES = [
    (schedule, num_ranks, stages_per_rank, num_microbatches)
    for schedule in SCHEDULES
    for num_ranks in (2, 3, 4, 8)
    for stages_per_rank in (1, 2, 3)
    for num_microbatches in (1, 2, 3, 4, 5, 6, 8, 16)
    if why_not(schedule, num_ranks=num_ranks, num_microbatches=num_microbatches, stages_per_rank=stages_per_rank)
    is None
]


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved", "zero_bubble"])
def test_orders_are_torch_s(schedule: str) -> None:
    """Not 1f1b's: what torch says of it (2.15: the last rank begins with micro-batch 1) is not what it does."""
    sizes = [size[1:] for size in SIZES if size[0] == schedule]
    assert sizes
    for num_ranks, stages_per_rank, num_microbatches in sizes:
        numbers = dict(num_ranks=num_ranks, stages_per_rank=stages_per_rank, num_microbatches=num_microbatches)
        assert orders(schedule, **numbers) == torch_orders(schedule, **numbers), numbers


def line() -> nn.Module:
    return nn.Linear(4, 4)


def schedule_of(
    layer: Callable[[], nn.Module], world: World, kind: str, stages_per_rank: int, num_microbatches: int
) -> Schedule:
    """Of stages of one layer each, [2, 4] -> [2, 4]."""
    torch.manual_seed(0)
    example = torch.empty(2, 4, device="meta").requires_grad_()
    num_stages = world.size * stages_per_rank
    return build_schedule(
        [StagePart(layer(), index, (example,), (example,)) for index in range(world.rank, num_stages, world.size)],
        kind=kind,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        loss=lambda output, target: (output - target).square().sum(),
        group=dist.group.WORLD,  # type: ignore[arg-type]
        device=torch.device("cpu"),
        times=StageTimes(),
    )


def run(world: World, schedule: Schedule, *, rows: int) -> None:
    arguments = (torch.ones(rows, 4),) if world.rank == 0 else ()
    run_schedule(schedule, arguments=arguments, keywords={}, target=torch.zeros(rows, 4), training=True)


def executed(world: World, cases: list[tuple[str, int, int]]) -> list[list[Work]]:
    """What this rank really computed, in order, under each (schedule, stages a rank, M)."""
    done: list[Work] = []

    def noting(name: str, kind: Kind) -> Any:
        method = getattr(PipelineStage, name)

        def noted(self: PipelineStage, chunk: int, *arguments: Any, **named: Any) -> Any:
            is_split = name == "backward_one_chunk" and not {"full_backward": arguments[1], **named}["full_backward"]
            done.append(Work("I" if is_split else kind, self.stage_index, chunk))
            return method(self, chunk, *arguments, **named)

        return mock.patch.object(PipelineStage, name, noted)

    found = []
    with (
        noting("forward_one_chunk", "F"),
        noting("backward_one_chunk", "B"),
        noting("backward_weight_one_chunk", "W"),
    ):
        for kind, stages_per_rank, num_microbatches in cases:
            done.clear()
            schedule = schedule_of(line, world, kind, stages_per_rank, num_microbatches)
            run(world, schedule, rows=2 * num_microbatches)
            found.append([*done])
    return found


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_orders_are_what_runs(num_ranks: int, ranks: RankPool) -> None:
    sizes = [(s, v, m) for s, k, v, m in SIZES if k == num_ranks and v < 3 and m in (3, 4)]
    by_rank = ranks.run(num_ranks, executed, sizes)
    for number, (schedule, stages_per_rank, num_microbatches) in enumerate(sizes):
        numbers = dict(num_ranks=num_ranks, stages_per_rank=stages_per_rank, num_microbatches=num_microbatches)
        assert [found[number] for found in by_rank] == orders(schedule, **numbers), (schedule, numbers)


def test_torch_refuses_what_is_not_admitted() -> None:
    for schedule in ("interleaved", "zero_bubble"):
        with pytest.raises(ValueError, match="rounds"):
            torch_orders(schedule, num_ranks=2, num_microbatches=5, stages_per_rank=2)
        assert why_not(schedule, num_ranks=2, num_microbatches=5, stages_per_rank=2) is not None


class Noting(nn.Linear):
    """Notes at each backward how many outputs are alive of those whose backward is done."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.outputs: list[ref[torch.UntypedStorage]] = []
        self.found: list[int] = []

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        output = super().forward(hidden)
        before = len(self.outputs)
        self.outputs.append(ref(output.untyped_storage()))
        output.register_hook(
            lambda _: self.found.append(sum(storage() is not None for storage in self.outputs[:before]))
        )
        return output


def outlived(world: World) -> tuple[bool, list[int]]:
    """Whether torch is taken to keep boundaries, and by micro-batch the sent outputs of stage 0 that it did keep."""
    made: list[Noting] = []

    def layer() -> nn.Module:
        made.append(Noting())
        return made[-1]

    run(world, schedule_of(layer, world, "interleaved", 2, 4), rows=8)
    return keeps_boundaries(), made[0].found


def test_boundaries_are_taken_to_stay_where_sent_outputs_outlive_their_backward(ranks: RankPool) -> None:
    for keeps, found in ranks.run(2, outlived):
        assert found == ([0, 1, 2, 3] if keeps else [0, 0, 0, 0])


def asked_alone(world: World) -> tuple[bool, bool] | None:
    """Of rank 1: the answers, found while others do something else; the random state and the world stay."""
    if world.rank != 1:
        return None
    keeps_boundaries.cache_clear()
    sends_without_gradients.cache_clear()
    before = torch.get_rng_state()
    answers = keeps_boundaries(), sends_without_gradients()
    assert torch.equal(torch.get_rng_state(), before) and dist.get_world_size() == world.size
    return answers


def test_one_rank_asks_what_torch_does_without_the_others_or_a_world(ranks: RankPool) -> None:
    assert not dist.is_initialized()
    answers = keeps_boundaries(), sends_without_gradients()
    assert not dist.is_initialized()
    assert ranks.run(2, asked_alone) == [None, answers]


def trained(world: World, case: Case, folder: str) -> None:
    elastic_run(world, case, "", folder)


def test_evaluation_through_several_stages_a_rank(ranks: RankPool, tmp_path: Path) -> None:
    found = []
    for pp, way in ((1, ("1f1b", 1)), (2, ("interleaved", 2))):
        ranks.run(2, trained, Case("vit", 2, ((0, 1, pp),), 4, ways=(way,)), str(tmp_path))
        events = map(json.loads, (tmp_path / "elastic" / "events.jsonl").read_text().splitlines())
        found += [event["metrics"] for event in events if event["event"] == "evaluation"]
    plain, ours = found
    assert ours["accuracy"] == plain["accuracy"]
    assert ours["loss"] == pytest.approx(plain["loss"], rel=1e-12)


def reductions(world: World, folder: str) -> list[tuple[bool, bool]]:
    """By step: whether every gradient is still a view of its bucket, and whether all sums began before the end."""
    found = []
    finish = GradientReducer.finish

    def noting(self: GradientReducer) -> None:
        views = all(p.grad is not None and p.grad._base is b.flat for b in self._buckets for _, p in b.members)
        found.append((views, self._next == len(self._buckets) > 0))
        finish(self)

    moves = ((0, 0, 2), (7, 2, 2), (14, 1, 2))
    case = Case("vit", 4, moves, 4, ways=(("zero_bubble", 2), ("zero_bubble", 1), ("interleaved", 2)))
    with mock.patch.object(GradientReducer, "finish", noting):
        elastic_run(world, case, "", folder)
    return found


def test_weights_apart_are_reduced_in_their_buckets_and_overlapped(ranks: RankPool, tmp_path: Path) -> None:
    """Torch adds what zero_bubble computes apart to ``.grad`` itself, past autograd's hooks."""
    for found in ranks.run(4, reductions, str(tmp_path)):
        assert found == [(True, True)] * 20


class TwiceUsed(nn.Module):
    """A bias beside two weights: what torch's split backward counts twice, by luck."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.shared = (nn.Parameter(torch.ones(*shape)) for shape in ((4, 4), (4, 4), (4,)))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.linear(hidden, self.first, self.shared).tanh()
        return nn.functional.linear(hidden, self.second, self.shared)


def splits_a_shared_weight(world: World) -> bool:
    """Whether this rank's gradients are those of both stages in one process."""
    made: list[nn.Module] = []

    def layer() -> nn.Module:
        made.append(TwiceUsed())
        return made[-1]

    run(world, schedule_of(layer, world, "zero_bubble", 1, 2), rows=4)
    whole = nn.Sequential(TwiceUsed(), TwiceUsed())
    whole(torch.ones(4, 4)).square().sum().backward()
    pairs = zip(made[0].parameters(), whole[world.rank].parameters())
    return all(torch.allclose(p.grad, q.grad, rtol=1e-5) for p, q in pairs)  # type: ignore[arg-type]


def test_a_weight_that_is_used_twice_has_its_gradient_once(ranks: RankPool) -> None:
    assert ranks.run(2, splits_a_shared_weight) == [True, True]


def used_once(hidden: torch.Tensor, weight: nn.Parameter, other: nn.Parameter) -> tuple[torch.Tensor, ...]:
    return ((hidden * weight).tanh() * other.exp(),)


def used_twice(hidden: torch.Tensor, weight: nn.Parameter, other: nn.Parameter) -> tuple[torch.Tensor, ...]:
    return ((hidden * weight).tanh() * weight,)


def made_once_used_twice(hidden: torch.Tensor, weight: nn.Parameter, other: nn.Parameter) -> tuple[torch.Tensor, ...]:
    scale = weight.exp()
    return ((hidden * scale).tanh() * scale,)


def sent_itself(hidden: torch.Tensor, weight: nn.Parameter, other: nn.Parameter) -> tuple[torch.Tensor, ...]:
    return hidden * other, weight.exp()


def relayed(hidden: torch.Tensor, weight: nn.Parameter, other: nn.Parameter) -> tuple[torch.Tensor, ...]:
    return hidden, hidden * weight


def without_input_gradient(hidden: torch.Tensor, weight: nn.Parameter, other: nn.Parameter) -> tuple[torch.Tensor, ...]:
    return (hidden.detach() * weight,)


@pytest.mark.parametrize(
    ("forward", "expected"),
    [
        (used_once, True),
        (used_twice, False),
        (made_once_used_twice, False),
        (sent_itself, False),
        (relayed, True),
        (without_input_gradient, False),
    ],
)
def test_where_a_backward_is_split(forward: Callable[..., tuple[torch.Tensor, ...]], expected: bool) -> None:
    hidden = torch.ones(4, requires_grad=True)
    weights = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    assert splits_exactly(forward(hidden, *weights), weights) is expected


def test_what_is_held_between_the_halves_of_a_backward() -> None:
    """The gradients at both products' results; not the input's, which is sent."""
    layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    source = torch.ones(2, 8, requires_grad=True)
    held = bytes_between_halves(layers, source, layers.parameters())
    assert held == 4 * 2 * (16 + 4)
    assert all(parameter.grad is None for parameter in layers.parameters())


MISTAKES = {
    "pipe.schedule=1f1b pipe.stages_per_rank=2": "pipe.stages_per_rank: 2 is not allowed; schedule 1f1b",
    "pipe.schedule=interleaved pipe.stages_per_rank=1": (
        "needs at least 2 stages a rank, give that, or pipe.schedule gpipe or 1f1b"
    ),
    "pipe.schedule=interleaved pipe.initial_length=2 pipe.microbatches=5": "takes 4 or 6",
    "pipe.schedule=zero_bubble pipe.initial_length=4 pipe.microbatches=11": "takes 10 or 12",
    "pipe.schedule=1f1b pipe.initial_length=4 pipe.microbatches=2": (
        "over 4 ranks takes 4 or more, give that, or another pipe.initial_length"
    ),
    "pipe.recompute=sometimes": "one of never, except_last, always, selective",
}


@pytest.mark.parametrize("overrides", MISTAKES)
def test_a_bad_combination_is_one_line(overrides: str) -> None:
    with pytest.raises(UserError) as caught:
        load_config(configuration_file("vit"), overrides.split())
    assert MISTAKES[overrides] in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
