"""Where a step's seconds go, and that no two replicas or steps drop the same."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from laws import Case, configuration, make_plan, write_replay
from ranks import RankPool
from torch import Tensor, nn

from pipetransformer.dp import GradientReducer
from pipetransformer.engine.feed import Feed
from pipetransformer.engine.layout import Layout
from pipetransformer.models import Stage
from pipetransformer.process.world import World
from pipetransformer.run import events
from pipetransformer.trainer import Trainer

# Seconds that each phase of a step sleeps, far apart: one that is taken for another falls below its own.
ASLEEP = {"prefix": 0.03, "reduction": 0.06, "optimizer": 0.1, "data": 0.15, "forward": 0.22, "backward": 0.3}


class _Sleeps(torch.autograd.Function):
    """Nothing, slowly, on the way back."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        time.sleep(ASLEEP["backward"])
        return gradient


def slowed(owner: type, name: str, seconds: float) -> Any:
    real: Callable[..., Any] = getattr(owner, name)

    def slow(*arguments: Any, **named: Any) -> Any:
        time.sleep(seconds)
        return real(*arguments, **named)

    return mock.patch.object(owner, name, slow)


def phases_of(world: World, pp: int, folder: str) -> list[tuple[int, float, dict[str, list[float]]]]:
    """(steps, their seconds, seconds of every rank by phase) of an epoch of two steps, one micro-batch each."""
    replay = Path(folder) / f"replay_{world.rank}.jsonl"
    plan = make_plan(0, pp, world_size=world.size, num_microbatches=1, schedule="gpipe")
    write_replay(replay, {0: plan})
    overrides = [*Case("vit", world.size, ((0, 0, pp),)).overrides(""), "train.epochs=1", "data.max_train_samples=64"]
    overrides += [f"run.replay={replay}", f"run.dir={folder}", f"run.id=pp{pp}", "data.max_eval_samples=4"]
    found: list[tuple[int, float, dict[str, list[float]]]] = []

    def listen(event: events.Event) -> None:
        if isinstance(event, events.Logged):
            figures = event.figures
            found.append((figures.num_steps, figures.seconds, figures.phase_seconds_by_rank))

    forward = Stage.forward

    def slow_stage(self: Stage, *arguments: Any, **named: Any) -> Tensor:
        if not torch.is_grad_enabled():
            return forward(self, *arguments, **named)
        time.sleep(ASLEEP["forward"])
        return _Sleeps.apply(forward(self, *arguments, **named))  # type: ignore[no-any-return]

    trainer = Trainer(configuration("vit", overrides), world, timed=False, listeners=[listen])
    with ExitStack() as stack:
        for owner, name, phase in (
            *((Feed, "enter", "prefix"), (Feed, "_fetch", "data")),
            *((GradientReducer, "finish", "reduction"), (Layout, "gradients", "optimizer")),
        ):
            stack.enter_context(slowed(owner, name, ASLEEP[phase]))
        stack.enter_context(mock.patch.object(Stage, "forward", slow_stage))
        trainer.run()
    return found


@pytest.mark.parametrize("pp", [1, 2])
def test_every_second_is_counted_in_its_phase(pp: int, ranks: RankPool, tmp_path: Path) -> None:
    """On two ranks; those of a pipeline wait for each other."""
    (num_steps, whole, seconds), *others = ranks.run(2, phases_of, pp, str(tmp_path))[0]
    assert num_steps == 2 and not others
    waits = [0.0, 0.0] if pp == 1 else [ASLEEP["forward"] + ASLEEP["backward"], ASLEEP["forward"]]
    for rank in range(2):
        for phase, asleep in ASLEEP.items():
            assert seconds[phase][rank] >= num_steps * asleep, (phase, rank, seconds)
        assert seconds["wait"][rank] >= num_steps * waits[rank]
    # None is counted twice: the least would be one sleep too many a step. Seconds of the whole are one rank's clock.
    for rank in range(2):
        total = sum(of_ranks[rank] for of_ranks in seconds.values())
        assert total < whole + num_steps * min(ASLEEP.values()) / 2, (rank, seconds, whole)
    if pp == 1:  # a plain loop waits for nobody: what is left is a loop's own
        assert max(seconds["wait"]) < num_steps * ASLEEP["forward"]


def masks_of(world: World, folder: str) -> list[bytes]:
    """What the first dropout of this rank drops in each micro-batch of the first three steps."""
    replay = Path(folder) / f"replay_{world.rank}.jsonl"
    write_replay(replay, {0: make_plan(0, 1, world_size=2, num_microbatches=2, schedule="1f1b")})
    case = Case("vit", world.size, ((0, 0, 1),), dropout=0.5)
    overrides = [*case.overrides(""), "train.epochs=1", "data.max_train_samples=96", "data.max_eval_samples=4"]
    overrides += [f"run.replay={replay}", f"run.dir={folder}", "run.id=dropout"]
    trainer = Trainer(configuration("vit", overrides), world, timed=False)
    first = next(m for m in trainer.job.chain.model.modules() if isinstance(m, nn.Dropout) and m.p == 0.5)
    found: list[bytes] = []

    def note(module: nn.Module, inputs: Any, output: Tensor) -> None:
        if module.training:
            found.append(output.detach().eq(0).numpy().tobytes())

    first.register_forward_hook(note)
    trainer.run()
    return found


def test_no_two_replicas_steps_or_microbatches_drop_the_same(ranks: RankPool, tmp_path: Path) -> None:
    masks = [mask for of_rank in ranks.run(2, masks_of, str(tmp_path)) for mask in of_rank]
    assert len(masks) == 2 * 3 * 2 and len({len(mask) for mask in masks}) == 1
    assert all(0.3 < sum(mask) / len(mask) < 0.7 for mask in masks)
    assert len(set(masks)) == len(masks)
