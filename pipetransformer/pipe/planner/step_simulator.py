"""A discrete-event simulation of one pipeline's step: pure, exact for the costs it is given.

A rank does one piece of work at a time, in the order of its schedule, each as soon as its input is there. What a stage
sends occupies the link to its neighbour, one message at a time in each direction, while the rank goes on; it arrives a
latency later. Where ranks ask for a message only when they need it, it moves then. Stages on one rank pass tensors on
for nothing. Ranks that share cores may be faster while others wait. After its last backward a rank sums its gradients
over the replicas: a share of that hides behind the last micro-batch's backward, whose first gradients are ready early.
Then it updates its weights, which all ranks begin together where gradients are clipped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from pipetransformer.plan.schedules import Kind, Work, orders

__all__ = ["Span", "StageCosts", "Timeline", "simulate"]


@dataclass(frozen=True, slots=True)
class StageCosts:
    """What one stage costs for one micro-batch, in integer nanoseconds.

    Attributes:
        forward, backward: one forward; one backward, recomputation and gradients of inputs and weights included.
        weight: the part of ``backward`` that only weights need; zero_bubble does it apart.
        send, send_back: how long the link is occupied by what the stage sends on, and by the gradient it sends back.
    """

    forward: int
    backward: int
    weight: int = 0
    send: int = 0
    send_back: int = 0


@dataclass(frozen=True, slots=True)
class Span:
    """When a rank was at a piece of work, in nanoseconds from the step's begin."""

    rank: int
    work: Work
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """A simulated step.

    Attributes:
        spans: all work, rank by rank in order. busy: nanoseconds that each rank computed.
        compute: when the last backward ended. total: when the last weight was updated.
    """

    spans: tuple[Span, ...]
    busy: tuple[int, ...]
    compute: int
    total: int

    @property
    def bubble(self) -> float:
        """The share of all ranks' time until the last backward in which they computed nothing."""
        return 1.0 - sum(self.busy) / (len(self.busy) * self.compute) if self.compute else 0.0


def simulate(
    schedule: str,
    stages: Sequence[StageCosts],
    *,
    num_ranks: int,
    num_microbatches: int,
    latency: int = 0,
    first: int = 0,
    reduce: Sequence[int] | None = None,
    update: Sequence[int] | None = None,
    overlap: float = 0.0,
    contention: Sequence[float] | None = None,
    receives_late: bool = False,
) -> Timeline:
    """One step of a pipeline.

    Args:
        stages: costs of every stage; as many a rank as ``len(stages) / num_ranks``.
        latency: of a message between two ranks. first: what rank 0 does before its first forward (the prefix).
        reduce, update: of each rank: gradients over the replicas, weights.
        overlap: how much of the last micro-batch's backward can hide the reduction, 0 to 1.
        contention: where ranks share cores, how long work takes while 1, 2, ... ``num_ranks`` of them are busy, over
            what the costs say; None where they do not.
    """
    num_stages = len(stages)
    assert num_stages % num_ranks == 0
    work = orders(
        schedule,
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        stages_per_rank=num_stages // num_ranks,
    )
    mail = _Mail(
        stages,
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        latency=latency,
        receives_late=receives_late,
    )
    spans = (
        _run(work, stages, mail, first=first)
        if contention is None
        else _run_contended(work, stages, mail, first=first, contention=contention)
    )
    busy = tuple(sum(span.stop - span.start for span in of_rank) for of_rank in spans)
    reduced = []
    for rank, of_rank in enumerate(spans):
        last = of_rank[-1]
        hidden = round(overlap * (last.stop - last.start))
        needed = reduce[rank] if reduce is not None else 0
        reduced.append(max(last.stop, last.stop - hidden + needed))
    total = max(reduced) + (max(update) if update is not None else 0)
    return Timeline(
        spans=tuple(span for of_rank in spans for span in of_rank),
        busy=(busy[0] + first, *busy[1:]),
        compute=max(of_rank[-1].stop for of_rank in spans),
        total=total,
    )


class _Mail:
    """What waits for each stage, and when it arrives."""

    def __init__(
        self,
        stages: Sequence[StageCosts],
        *,
        num_ranks: int,
        num_microbatches: int,
        latency: int,
        receives_late: bool,
    ) -> None:
        self._stages, self._num_ranks, self._latency = stages, num_ranks, latency
        self._receives_late = receives_late
        last = len(stages) - 1
        # Inputs of forwards, gradients for backwards: when they are there (to be asked for), None where it is unknown.
        self._inputs: list[list[int | None]] = [[None if s else 0] * num_microbatches for s in range(last + 1)]
        self._gradients: list[list[int | None]] = [
            [None if s < last else 0] * num_microbatches for s in range(last + 1)
        ]
        self._link_free: dict[tuple[int, int], int] = {}  # by (sender, receiver)

    def ready(self, work: Work, now: int) -> int | None:
        """When what ``work`` needs is there, for a rank that could begin ``now``."""
        if work.kind == "W":
            return now
        there = (self._inputs if work.kind == "F" else self._gradients)[work.stage][work.microbatch]
        if there is None or not self._receives_late:
            return there
        return max(now, there) + self._move(work)

    def _move(self, work: Work) -> int:
        """What a message to ``work`` takes from when it is asked for."""
        source = work.stage + (-1 if work.kind == "F" else 1)
        if not 0 <= source < len(self._stages) or source % self._num_ranks == work.stage % self._num_ranks:
            return 0
        costs = self._stages[source]
        return self._latency + (costs.send if work.kind == "F" else costs.send_back)

    def post(self, work: Work, now: int) -> int | None:
        """Sends on what ``work`` gave; returns the rank that receives it, if there is one."""
        if work.kind == "W":
            return None
        back = work.kind != "F"
        stage, target = work.stage, work.stage + (-1 if back else 1)
        if not 0 <= target < len(self._stages):
            return None
        inbox = self._gradients if back else self._inputs
        rank, peer = stage % self._num_ranks, target % self._num_ranks
        if peer == rank or self._receives_late:
            inbox[target][work.microbatch] = now
            return peer
        costs, link = self._stages[stage], (rank, peer)
        self._link_free[link] = max(now, self._link_free.get(link, 0)) + (costs.send_back if back else costs.send)
        inbox[target][work.microbatch] = self._link_free[link] + self._latency
        return peer


def _durations(stages: Sequence[StageCosts]) -> list[dict[Kind, int]]:
    return [{"F": s.forward, "B": s.backward, "I": s.backward - s.weight, "W": s.weight} for s in stages]


def _run(
    orders_by_rank: Sequence[Sequence[Work]], stages: Sequence[StageCosts], mail: _Mail, *, first: int
) -> list[list[Span]]:
    num_ranks, durations = len(orders_by_rank), _durations(stages)
    clock, done = [first, *[0] * (num_ranks - 1)], [0] * num_ranks
    spans: list[list[Span]] = [[] for _ in range(num_ranks)]
    waiting = deque(range(num_ranks))
    while waiting:
        rank = waiting.popleft()
        order, now = orders_by_rank[rank], clock[rank]
        while done[rank] < len(order):
            work = order[done[rank]]
            ready = mail.ready(work, now)
            if ready is None:
                break
            start = max(now, ready)
            now = start + durations[work.stage][work.kind]
            spans[rank].append(Span(rank, work, start, now))
            done[rank] += 1
            peer = mail.post(work, now)
            if peer is not None and peer != rank:
                waiting.append(peer)
        clock[rank] = now
    assert all(count == len(order) for count, order in zip(done, orders_by_rank)), "ranks wait for each other"
    return spans


def _run_contended(
    orders_by_rank: Sequence[Sequence[Work]],
    stages: Sequence[StageCosts],
    mail: _Mail,
    *,
    first: int,
    contention: Sequence[float],
) -> list[list[Span]]:
    """From event to event: how fast a piece of work goes on depends on how many ranks are busy."""
    num_ranks, durations = len(orders_by_rank), _durations(stages)
    spans: list[list[Span]] = [[] for _ in range(num_ranks)]
    left: dict[int, float] = {0: float(first)} if first else {}  # of the busy ranks' work, as the costs say
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
