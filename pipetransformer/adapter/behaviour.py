"""Differences between versions of torch, found by behaviour.

That a private name exists says nothing of its use. So two small stages run a step in this process, and
the second looks at what the first hands it:

    stage 0  --- hidden, and where asked for a position, which has no gradient --->  stage 1  --->  loss

They take themselves for a pipeline of one rank, in any world: nothing is sent to another process, no group is made
(groups are numbered, and all ranks must count alike), and no random number is drawn.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

_NUM_MICROBATCHES = 2
_CPU = torch.device("cpu")


@lru_cache(maxsize=1)
def keeps_boundaries() -> bool:
    """Whether stages keep all that they send and receive until the step ends, as torch 2.11 and 2.14 do; 2.15 does not.

    Note: seen is what is received, after a step. Versions that keep it keep what they send as well, and the others
    neither (``tests/test_schedules.py`` looks at real sends).
    """
    entered: list[ref[torch.UntypedStorage]] = []

    def look(hidden: Tensor) -> None:
        entered.append(ref(hidden.untyped_storage()))

    with _alone():
        schedule = _schedule(look, has_position=False)
        _step(schedule)
        return any(storage() is not None for storage in entered)


@lru_cache(maxsize=1)
def sends_without_gradients() -> bool:
    """Whether a stage can send a tensor that has no gradient; torch 2.11 takes all that it receives to have one."""
    tracked: list[bool] = []

    def look(hidden: Tensor, position: Tensor) -> None:
        tracked.append(position.requires_grad)

    with _alone():
        try:
            _step(_schedule(look, has_position=True))
        except (RuntimeError, AssertionError):
            return False
    return tracked == [False] * _NUM_MICROBATCHES


class _First(nn.Module):
    def __init__(self, *, has_position: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, 1))
        self._has_position = has_position

    def forward(self, given: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        hidden = given * self.weight
        return (hidden, torch.zeros(1, dtype=torch.long)) if self._has_position else hidden


class _Second(nn.Module):
    def __init__(self, look: Callable[..., None]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, 1))
        self._look = look

    def forward(self, *received: Tensor) -> Tensor:
        self._look(*received)
        return received[0] * self.weight


class _LoneStage(PipelineStage):
    """A stage of a pipeline whose two stages are both on this rank.

    Note: the schedule reads these attributes, and takes the step without a message. Before torch 2.12 or so it began
    with one to each neighbour all the same.
    """

    def __init__(self, module: nn.Module, index: int, *, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]):
        num_stages = max(2, dist.get_world_size())  # no fewer than ranks
        super().__init__(module, index, num_stages, _CPU, input_args=inputs, output_args=outputs)
        self.num_stages, self.group_size, self.group_rank = 2, 1, 0
        self.stage_index_to_group_rank = {0: 0, 1: 0}

    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        return []


def _schedule(look: Callable[..., None], *, has_position: bool) -> ScheduleInterleaved1F1B:
    example = torch.empty(1, 1, device="meta")
    position = (torch.empty(1, dtype=torch.long, device="meta"),) if has_position else ()
    tracked = example.clone().requires_grad_()
    between = (tracked, *position)
    stages: list[Any] = [
        _LoneStage(_First(has_position=has_position), 0, inputs=(example,), outputs=between),
        _LoneStage(_Second(look), 1, inputs=between, outputs=(tracked,)),
    ]
    # Note: where a step fails, it logs the whole schedule beside the error.
    logging.getLogger(ScheduleInterleaved1F1B.__module__).setLevel(logging.CRITICAL)
    return ScheduleInterleaved1F1B(stages, _NUM_MICROBATCHES, loss_fn=lambda output, _: output.sum(), scale_grads=False)


def _step(schedule: ScheduleInterleaved1F1B) -> None:
    ones = torch.ones(_NUM_MICROBATCHES, 1)
    with torch.enable_grad():
        schedule.step(ones, target=ones, return_outputs=False)


@contextmanager
def _alone() -> Iterator[None]:
    """A world of one where there is none yet: a stage asks for its rank."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        dist.destroy_process_group()
