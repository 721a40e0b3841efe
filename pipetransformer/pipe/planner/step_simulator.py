"""A discrete-event simulation of one step of one pipeline: pure, and exact for the given costs.

A rank does one piece of work at a time, in the order of its schedule, each as soon as its input has arrived. A message
occupies the link to the next rank, one message at a time in each direction, while the sender goes on with its work. It
arrives one latency later. If ranks ask for messages only when they need them (``receives_late``), a message moves at
that time. Messages between stages of one rank cost nothing. Ranks that share cores may be faster while others wait.

After its last backward, a rank sums its gradients over the replicas. A part of this sum is hidden behind the backward
of the last micro-batch, because its first gradients are ready early. At last all ranks update their weights. They start
this together, as needed for gradient clipping.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipetransformer.plan.schedules import Kind, Work, orders


@dataclass(frozen=True, slots=True)
class StageCosts:
    """Costs of one stage for one micro-batch, in integer nanoseconds.

    Attributes:
        forward: one forward.
        backward: one backward, with recomputation and the gradients of inputs and weights.
        weight: the part of ``backward`` for the gradients of weights; ``zero_bubble`` does it separately.
        send: time on the link of the output, sent to the next stage.
        send_back: time on the link of the input's gradient, sent to the stage before.
    """

    forward: int
    backward: int
    weight: int = 0
    send: int = 0
    send_back: int = 0


@dataclass(frozen=True, slots=True)
class Span:
    """The time of one piece of work.

    Attributes:
        rank: place of the rank in its pipeline, from 0.
        work: the piece of work.
        start: its start, in nanoseconds from the start of the step.
        stop: its end, likewise.
    """

    rank: int
    work: Work
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """A simulated step.

    Attributes:
        spans: all work, rank by rank, in order.
        busy: nanoseconds of work of each rank [ranks], the prefix included.
        compute: end of the last backward, in nanoseconds from the start of the step.
        total: end of the last update of weights, likewise.
    """

    spans: tuple[Span, ...]
    busy: tuple[int, ...]
    compute: int
    total: int

    @property
    def bubble(self) -> float:
        """The share of the ranks' time until the end of the last backward in which they did no work, 0 to 1."""
        return 1.0 - sum(self.busy) / (len(self.busy) * self.compute) if self.compute else 0.0


def simulate(
    schedule: str,
    stages: Sequence[StageCosts],
    *,
    num_ranks: int,
    num_microbatches: int,
    latency: int = 0,
    first: int = 0,
    reduce: Sequence[int] = (),
    update: Sequence[int] = (),
    overlap: float = 0.0,
    contention: Sequence[float] | None = None,
    receives_late: bool = False,
) -> Timeline:
    """One step of a pipeline; all times in nanoseconds.

    Args:
        stages: costs of each stage; every rank has ``len(stages) / num_ranks`` of them.
        latency: latency of a message between two ranks.
        first: work of rank 0 before its first forward (the prefix).
        reduce: sum of gradients over the replicas, of each rank; nothing to sum if empty.
        update: update of weights, of each rank; nothing to update if empty.
        overlap: the part of the last micro-batch's backward that can hide ``reduce``, 0 to 1.
        contention: ``JobCosts.busy_factors``, where ranks share cores, else None.
    """
    num_stages = len(stages)
    assert num_stages % num_ranks == 0
    work = orders(
        schedule,
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        stages_per_rank=num_stages // num_ranks,
    )
    mail = _Mail(stages, num_ranks=num_ranks, latency=latency, receives_late=receives_late)
    durations: list[Mapping[Kind, int]] = [
        {"F": s.forward, "B": s.backward, "I": s.backward - s.weight, "W": s.weight} for s in stages
    ]
    spans = (
        _run(work, durations, mail, first=first)
        if contention is None
        else _run_contended(work, durations, mail, first=first, contention=contention)
    )
    busy = tuple(sum(span.stop - span.start for span in of_rank) for of_rank in spans)
    reduced = []
    for rank, of_rank in enumerate(spans):
        last = of_rank[-1]
        hidden = round(overlap * (last.stop - last.start))
        needed = reduce[rank] if reduce else 0
        reduced.append(last.stop + max(0, needed - hidden))
    return Timeline(
        spans=tuple(span for of_rank in spans for span in of_rank),
        busy=(busy[0] + first, *busy[1:]),
        compute=max(of_rank[-1].stop for of_rank in spans),
        total=max(reduced) + max(update, default=0),
    )


class _Mail:
    """The messages to each stage, with the times of their arrival."""

    def __init__(self, stages: Sequence[StageCosts], *, num_ranks: int, latency: int, receives_late: bool) -> None:
        self._stages, self._num_ranks, self._latency = stages, num_ranks, latency
        self._receives_late = receives_late
        # By (is it a forward's input, stage, micro-batch). With ``receives_late``, it is the time from which the
        # receiver can ask for it.
        self._arrivals: dict[tuple[bool, int, int], int] = {}
        self._link_free: dict[tuple[int, int], int] = {}  # by (sender, receiver)

    def ready(self, work: Work, now: int) -> int | None:
        """The arrival of the input of ``work``, for a rank that is free from ``now`` on; None while unknown."""
        if work.kind == "W":
            return now
        is_forward = work.kind == "F"
        source = work.stage + (-1 if is_forward else 1)
        is_end = not 0 <= source < len(self._stages)
        there = 0 if is_end else self._arrivals.get((is_forward, work.stage, work.microbatch))
        if there is None or not self._receives_late:
            return there
        is_here = is_end or source % self._num_ranks == work.stage % self._num_ranks
        return max(now, there) + (0 if is_here else self._latency + self._sending(source, is_forward))

    def _sending(self, stage: int, is_forward: bool) -> int:
        return self._stages[stage].send if is_forward else self._stages[stage].send_back

    def post(self, work: Work, now: int) -> int | None:
        """Sends the result of ``work``. Returns the rank that receives it, or None."""
        is_forward = work.kind == "F"
        target = work.stage + (1 if is_forward else -1)
        if work.kind == "W" or not 0 <= target < len(self._stages):
            return None
        rank, peer = work.stage % self._num_ranks, target % self._num_ranks
        arrival = now
        if peer != rank and not self._receives_late:
            free = max(now, self._link_free.get((rank, peer), 0)) + self._sending(work.stage, is_forward)
            self._link_free[rank, peer] = free
            arrival = free + self._latency
        self._arrivals[is_forward, target, work.microbatch] = arrival
        return peer


def _run(
    orders_by_rank: Sequence[Sequence[Work]], durations: Sequence[Mapping[Kind, int]], mail: _Mail, *, first: int
) -> list[list[Span]]:
    num_ranks = len(orders_by_rank)
    clock = [first, *[0] * (num_ranks - 1)]
    spans: list[list[Span]] = [[] for _ in range(num_ranks)]
    waiting = deque(range(num_ranks))
    while waiting:
        rank = waiting.popleft()
        order, mine, now = orders_by_rank[rank], spans[rank], clock[rank]
        while len(mine) < len(order):
            work = order[len(mine)]
            ready = mail.ready(work, now)
            if ready is None:
                break
            start = max(now, ready)
            now = start + durations[work.stage][work.kind]
            mine.append(Span(rank, work, start, now))
            peer = mail.post(work, now)
            if peer is not None and peer != rank:
                waiting.append(peer)
        clock[rank] = now
    assert all(len(a) == len(b) for a, b in zip(spans, orders_by_rank)), "ranks wait for each other"
    return spans


def _run_contended(
    orders_by_rank: Sequence[Sequence[Work]],
    durations: Sequence[Mapping[Kind, int]],
    mail: _Mail,
    *,
    first: int,
    contention: Sequence[float],
) -> list[list[Span]]:
    """Runs from event to event, because the speed of work depends on the number of busy ranks."""
    num_ranks = len(orders_by_rank)
    spans: list[list[Span]] = [[] for _ in range(num_ranks)]
    left: dict[int, float] = {0: float(first)} if first else {}  # by busy rank: the rest of its work, in costs
    begun: dict[int, float] = {}
    free = [0] * num_ranks
    now = 0.0
    while True:
        arrivals = []
        for rank in range(num_ranks):
            if rank in left or len(spans[rank]) == len(orders_by_rank[rank]):
                continue
            work = orders_by_rank[rank][len(spans[rank])]
            ready = mail.ready(work, free[rank])
            if ready is not None and ready <= now:
                left[rank], begun[rank] = float(durations[work.stage][work.kind]), now
            elif ready is not None:
                arrivals.append(float(ready))
        if not left and not arrivals:
            break
        factor = contention[len(left) - 1] if left else 1.0
        ends = now + factor * min(left.values()) if left else arrivals[0]
        until = min([ends, *arrivals])
        for rank in sorted(left):
            left[rank] -= (until - now) / factor
            if left[rank] > 1e-3:
                continue
            del left[rank]
            free[rank] = stop = round(until)
            if rank in begun:
                work = orders_by_rank[rank][len(spans[rank])]
                spans[rank].append(Span(rank, work, round(begun.pop(rank)), stop))
                mail.post(work, stop)
        now = until
    assert all(len(a) == len(b) for a, b in zip(spans, orders_by_rank)), "ranks wait for each other"
    return spans
