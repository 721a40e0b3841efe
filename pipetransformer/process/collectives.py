"""Small collectives over all ranks: who was first, how long the slowest took, what a leader did for the others.

Those that wait for a rank's disk, network or tokenizer ask each other until it is ready: a collective of the job's own
may last ``run.timeout`` at most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from functools import partial
from queue import SimpleQueue
from threading import Event, Thread
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from pipetransformer.errors import UserError

Result = TypeVar("Result")
Item = TypeVar("Item")
_FAILED = "\0failed"  # in the place of a result
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.01, 0.5  # seconds between two questions whether the leaders are ready


def first_of_ranks(number: int | None) -> tuple[int, int] | None:
    """Collective. The smallest (number, rank) of the ranks that give a number; None if none does."""
    size, nothing = dist.get_world_size(), 2**62
    found = torch.tensor(nothing if number is None else number * size + dist.get_rank())
    dist.all_reduce(found, op=dist.ReduceOp.MIN)
    return None if int(found) == nothing else divmod(int(found), size)


def values_of_ranks(value: Result, *, group: dist.ProcessGroup | None = None) -> list[Result]:
    """Collective. The value that each rank gives, by rank; of a process without a group its own.

    Args:
        group: a group of all ranks; None for the default one.
    """
    if not dist.is_initialized():
        return [value]
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value, group=group)
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
    answer = begun(action) if dist.get_rank() == leader else None
    _until_all(partial(_is_done, answer))
    return cast(Result, _outcomes(answer)[leader])


def patiently(action: Callable[[], Result]) -> Result:
    """Collective. The result of each rank's own ``action``, which may take longer than a collective may, as in
    ``led_by``. What it raises, it raises on its own rank alone.
    """
    if dist.get_world_size() == 1:
        return action()
    answer = begun(action)
    waited_for(answer)
    return answer.result()


def waited_for(answer: Future[Result] | None) -> None:
    """Collective. Returns when every rank's own ``answer`` is there, which may take longer than a collective may.

    Args:
        answer: None for a rank that waits for the others'.
    """
    if dist.get_world_size() == 1:
        wait([answer] if answer is not None else [])
    else:
        _until_all(partial(_is_done, answer))


def by_all(action: Callable[[], Result], *, group: dist.ProcessGroup | None) -> list[Result]:
    """Collective. The results of every rank's own action, by rank.

    Args:
        group: a group of all ranks, which wait for each other as long as it lets them; None for a single rank.

    Raises:
        UserError: on every rank, if any rank's action raises one.
    """
    if group is None:
        return [action()]
    answer: Future[Result] = Future()
    _fulfil(answer, action)
    return cast(list[Result], _outcomes(answer, group=group))


def given_to(leader: int, items: Iterable[Item], consumer: Callable[[Iterator[Item]], None]) -> None:
    """Collective. The leader's ``consumer`` takes one of the leader's ``items`` after the other, and may take as long
    as it will with each: the ranks wait as in ``led_by``. No item is asked for before the consumer is done with the one
    before.

    Args:
        items: as many on every rank; their iteration may be collective.

    Raises:
        UserError: on every rank, if the consumer raises one.
    """
    if dist.get_world_size() == 1:
        consumer(iter(items))
        return
    answer: Future[None] | None = None
    wanted, handed = Event(), SimpleQueue[tuple[Item, ...]]()

    def taken() -> Iterator[Item]:
        while True:
            wanted.set()
            if not (found := handed.get()):
                return
            yield found[0]
            del found  # as below

    def is_wanted(pause: float) -> bool:
        return answer is None or wanted.wait(pause) or answer.done()

    if dist.get_rank() == leader:
        answer = begun(lambda: consumer(taken()))
    _until_all(is_wanted)
    for item in items:
        if answer is not None and not answer.done():
            wanted.clear()
            handed.put((item,))
        _until_all(is_wanted)
        del item  # what it holds is gone before the next is made
    handed.put(())
    _until_all(partial(_is_done, answer))
    _outcomes(answer)


def begun(action: Callable[[], Result]) -> Future[Result]:
    """Calls ``action`` in a thread of its own."""
    answer: Future[Result] = Future()
    # A daemon: whoever is interrupted need not wait for its end.
    Thread(target=_fulfil, args=(answer, action), daemon=True).start()
    return answer


def _is_done(answer: Future[Result] | None, pause: float) -> bool:
    if answer is not None:
        wait([answer], timeout=pause)
    return answer is None or answer.done()


def _until_all(is_ready: Callable[[float], bool]) -> None:
    """Collective. Returns once all ranks are ready.

    Args:
        is_ready: tells whether this rank is, after so many seconds at the most.
    """
    pause = _SHORTEST_PAUSE
    while True:
        found = torch.tensor(int(is_ready(pause)))
        dist.all_reduce(found, op=dist.ReduceOp.MIN)
        if found:
            return
        pause = min(2 * pause, _LONGEST_PAUSE)


def _outcomes(answer: Future[Result] | None, *, group: dist.ProcessGroup | None = None) -> list[object]:
    """Collective. The results by rank, None of those without an action. Raises a UserError of any of them."""
    outcome: object = None
    failure: BaseException | None = None
    if answer is not None:
        try:
            outcome = answer.result()
        except UserError as error:
            outcome = error
        except BaseException as error:  # the others must not wait for what will not come
            failure, outcome = error, _FAILED
    gathered = values_of_ranks(outcome, group=group)
    if failure is not None:
        raise failure
    for told in gathered:
        if isinstance(told, UserError):
            raise told
    if _FAILED in gathered:
        raise RuntimeError(f"rank {gathered.index(_FAILED)} failed in what all wait for: its remote process exited")
    return gathered


def _fulfil(answer: Future[Result], action: Callable[[], Result]) -> None:
    try:
        answer.set_result(action())
    except BaseException as error:
        answer.set_exception(error)
