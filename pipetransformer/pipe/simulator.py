"""A discrete-event simulation of one pipeline's step: pure, exact for the costs it is given.

A rank does one piece of work at a time, in the order of its schedule, each as soon as its input is there. What a stage
sends occupies the link to its neighbour, one message at a time in each direction, while the rank goes on; it arrives a
latency later. Stages on one rank pass tensors on for nothing. After its last backward a rank sums its gradients over
the replicas: a share of that hides behind the last micro-batch's backward, whose first gradients are ready early. Then
it updates its weights, which all ranks begin together where gradients are clipped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from pipetransformer.pipe.schedules import Work, orders

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
) -> Timeline:
    """One step of a pipeline.

    Args:
        stages: costs of every stage; as many a rank as ``len(stages) / num_ranks``.
        latency: of a message between two ranks. first: what rank 0 does before its first forward (the prefix).
        reduce, update: of each rank: gradients over the replicas, weights.
        overlap: how much of the last micro-batch's backward can hide the reduction, 0 to 1.
    """
    num_stages = len(stages)
    assert num_stages % num_ranks == 0
    work = orders(
        schedule,
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        stages_per_rank=num_stages // num_ranks,
    )
    spans = _run(work, stages, latency=latency, first=first, num_microbatches=num_microbatches)
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


def _run(
    work: Sequence[Sequence[Work]], stages: Sequence[StageCosts], *, latency: int, first: int, num_microbatches: int
) -> list[list[Span]]:
    num_ranks, num_stages = len(work), len(stages)
    durations = [{"F": s.forward, "B": s.backward, "I": s.backward - s.weight, "W": s.weight} for s in stages]
    # When the input of a forward, and the gradient for a backward, is there; None: not yet known.
    arrives: list[list[int | None]] = [[0 if s == 0 else None] * num_microbatches for s in range(num_stages)]
    returns: list[list[int | None]] = [
        [0 if s == num_stages - 1 else None] * num_microbatches for s in range(num_stages)
    ]
    link_free = [[0] * num_stages, [0] * num_stages]  # of what leaves a stage forwards, backwards
    clock, done = [first, *[0] * (num_ranks - 1)], [0] * num_ranks
    spans: list[list[Span]] = [[] for _ in range(num_ranks)]
    waiting = deque(range(num_ranks))
    while waiting:
        rank = waiting.popleft()
        order, now = work[rank], clock[rank]
        while done[rank] < len(order):
            piece = order[done[rank]]
            kind, stage, microbatch = piece
            ready: int | None = 0
            if kind == "F":
                ready = arrives[stage][microbatch]
            elif kind != "W":
                ready = returns[stage][microbatch]
            if ready is None:
                break
            start = max(now, ready)
            now = start + durations[stage][kind]
            spans[rank].append(Span(rank, piece, start, now))
            done[rank] += 1
            if kind == "W":
                continue
            back = kind != "F"
            target = stage - 1 if back else stage + 1
            if not 0 <= target < num_stages:
                continue
            inbox = returns if back else arrives
            peer = target % num_ranks
            if peer == rank:
                inbox[target][microbatch] = now
            else:
                leaves = max(now, link_free[back][stage])
                link_free[back][stage] = leaves + (stages[stage].send_back if back else stages[stage].send)
                inbox[target][microbatch] = link_free[back][stage] + latency
                waiting.append(peer)
        clock[rank] = now
    assert all(count == len(order) for count, order in zip(done, work)), f"{num_ranks} ranks wait for each other"
    return spans
