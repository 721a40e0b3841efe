"""Small collectives over all ranks: who was first, how long the slowest took, what a leader did for the others."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait
from threading import Thread
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from pipetransformer.errors import UserError

Result = TypeVar("Result")
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.01, 0.5  # seconds between two questions whether the leaders are ready


def first_of_ranks(number: int | None) -> tuple[int, int] | None:
    """Collective. The smallest (number, rank) of the ranks that give a number; None if none does."""
    size, nothing = dist.get_world_size(), 2**62
    found = torch.tensor(nothing if number is None else number * size + dist.get_rank())
    dist.all_reduce(found, op=dist.ReduceOp.MIN)
    return None if int(found) == nothing else divmod(int(found), size)


def values_of_ranks(value: Result) -> list[Result]:
    """Collective. The value that each rank gives, by rank; of a process without a group its own."""
    if not dist.is_initialized():
        return [value]
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def smallest(number: int | None) -> int | None:
    """Collective. The smallest of the numbers that ranks give; None if no rank gives one."""
    return min((given for given in values_of_ranks(number) if given is not None), default=None)


def slowest(seconds: float) -> float:
    """Collective. The most seconds of any rank."""
    most = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return float(most)


def total(seconds: float) -> float:
    """Collective. The sum over all ranks."""
    summed = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(summed)
    return float(summed)


def led_by(leader: int, action: Callable[[], Result]) -> Result:
    """Collective. The result of ``action``, which the leader alone calls; every rank names its leader.

    The action may take longer than a collective may: the ranks ask each other until all leaders are ready. Meanwhile it
    runs in a thread, which an interrupted process does not unwind; alone, in the caller's.

    Raises:
        UserError: on every rank, if any leader's action raises one.
    """
    if dist.get_world_size() == 1:
        return action()
    answer: Future[Result] | None = None
    if dist.get_rank() == leader:
        answer = Future()
        # A daemon: whoever is interrupted need not wait for its end.
        Thread(target=_fulfil, args=(answer, action), daemon=True).start()
    pause = _SHORTEST_PAUSE
    while True:
        if answer is not None:
            wait([answer], timeout=pause)
        is_ready = torch.tensor(int(answer is None or answer.done()))
        dist.all_reduce(is_ready, op=dist.ReduceOp.MIN)
        if is_ready:
            break
        pause = min(2 * pause, _LONGEST_PAUSE)
    outcome: object = None
    if answer is not None:
        try:
            outcome = answer.result()
        except UserError as error:
            outcome = error
    gathered = values_of_ranks(outcome)
    for told in gathered:
        if isinstance(told, UserError):
            raise told
    return cast(Result, gathered[leader])


def _fulfil(answer: Future[Result], action: Callable[[], Result]) -> None:
    try:
        answer.set_result(action())
    except BaseException as error:
        answer.set_exception(error)
