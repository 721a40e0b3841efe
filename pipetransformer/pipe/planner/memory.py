"""The most that a rank of a pipeline holds at once in a step: pure, the same for the cut and for the prediction.

    weights, optimizer state   of its units; of the prefix, which every rank has, weights alone
    gradients                  of its units: each from its first backward on, or always where replicas sum them
    batch                      on the first rank: what enters the first active unit, of all micro-batches
    activations                of the micro-batches whose backward is to come
    gradients between halves   of the micro-batches whose backward is split and half done
    leaves                     on the last rank of several: what entered its last stage, of all micro-batches whose
                               backward was whole; losses last until the step ends, and the leaves of their graphs
    sends                      where a schedule keeps them (``schedules.keeps_sends``): outputs until their backward,
                               gradients until the step ends
    working set                of the one unit whose backward runs, what is recomputed included

On the first rank, before the activations: the forward of the prefix, for all micro-batches at once.

Not counted: outputs, losses, masks and labels (few bytes a row), the store of the cache and what is read ahead from it,
optimizer state of frozen units that may unfreeze, what kernels and the process take for themselves; what ranks of
several stages receive ahead of their turn; gradients sent under GPipe, which stay too, and weigh where a stage keeps
next to nothing. What is received is what a unit keeps of its input.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from pipetransformer.pipe.planner.costs import JobCosts, UnitCosts
from pipetransformer.plan.schedules import Order, Work, peak_alive

__all__ = ["UnitBytes", "cut_bytes", "prefix_bytes", "rank_bytes", "unit_bytes", "widest_boundary"]


@dataclass(frozen=True, slots=True)
class UnitBytes:
    """One unit's part of a rank's memory.

    Attributes:
        lasting: weights and optimizer state. gradients: where they are there.
        entering: what enters it, of one micro-batch.
        kept: of one micro-batch until its backward, ``entering`` included. whole: of one that is not recomputed.
        working: while its backward runs, beside what is recomputed.
        between: of one micro-batch whose backward is split, between the halves.
        batch: of the first unit that trains: what enters it, of all micro-batches.
    """

    lasting: int
    gradients: int
    entering: int
    kept: int
    whole: int
    working: int
    between: int
    batch: int = 0


def unit_bytes(unit: UnitCosts, costs: JobCosts, *, recomputes: bool) -> list[UnitBytes]:
    """Of every unit. Args: recomputes: any micro-batch."""
    kept_bytes = unit.kept_bytes if recomputes else unit.activation_bytes
    columns = (
        costs.lasting_bytes, costs.parameter_bytes, unit.entering_bytes, kept_bytes, unit.activation_bytes,
        unit.working_bytes, unit.between_bytes,
    )  # fmt: skip
    return [
        UnitBytes(lasting, gradients, entering, kept, whole, working, between)
        for lasting, gradients, entering, kept, whole, working, between in zip(*columns)
    ]


def prefix_bytes(unit: UnitCosts, *, computed: range, num_microbatches: int) -> int:
    """What the first rank holds at most while it runs the frozen units ``computed`` on all micro-batches at once."""
    if not computed:
        return 0
    start = computed.start
    most = max(unit.prefix_bytes[u] + (unit.entering_bytes[u] if u > start else 0) for u in computed)
    return num_microbatches * (unit.entering_bytes[start] + most)


def widest_boundary(units: Sequence[UnitBytes]) -> int:
    """The most that enters a stage behind the first, of one micro-batch. Args: units: all that train."""
    return max(unit.entering for unit in units[1:])


def rank_bytes(
    order: Sequence[Work],
    stages: Mapping[int, Sequence[UnitBytes]],
    *,
    before: int,
    widest: int,
    num_stages: int,
    keeps_sends: bool,
    recompute: str,
    sums_gradients: bool,
) -> int:
    """What a rank holds at most, beside the weights of the prefix.

    A rank of one stage is taken to hold the most when its units do, as ``cut_bytes`` has it: leaves and sends, which
    grow in number until the end, count as they are then.

    Args:
        order: what the rank does. stages: the units of each of its stages.
        before: while it runs the prefix. widest: ``widest_boundary``; 0 where the pipeline has one stage.
        num_stages: of the pipeline. keeps_sends: its schedule does.
        recompute: one of ``adapter.MODES``.
        sums_gradients: with other replicas, in buckets that stay.
    """
    order = _whole_backwards(order, recompute)
    if 0 in stages:
        stages = {**stages, 0: _behind_batch(stages[0], num_microbatches=_num_microbatches(order))}
    units = [unit for stage in stages.values() for unit in stage]
    gradients = {number: sum(unit.gradients for unit in stage) for number, stage in stages.items()}
    kept = {number: sum(unit.kept for unit in stage) for number, stage in stages.items()}
    whole = {number: sum(unit.whole for unit in stage) for number, stage in stages.items()}
    between = {number: sum(unit.between for unit in stage) for number, stage in stages.items()}
    working = {
        number: [max(_working(stage, recomputes=again)) for again in (False, True)] for number, stage in stages.items()
    }
    whole_microbatch, halved = _whole_microbatch(order, recompute), _halved(order)
    alive, begun = (sum(gradients.values()), set(stages)) if sums_gradients else (0, set[int]())
    num_alive, peaks = 0, []  # of each backward: bytes, micro-batches alive, boundaries held beside
    for work, num_held in zip(order, _num_held(order, num_stages=num_stages, keeps_sends=keeps_sends)):
        is_whole, is_halved = work.microbatch == whole_microbatch, work[1:] in halved
        size = (whole if is_whole else kept)[work.stage]
        if work.kind == "F":
            alive += size + (between[work.stage] if is_whole and is_halved else 0)
            num_alive += 1
            continue
        if work.kind == "I":
            now = rest = alive + (0 if is_whole else between[work.stage])
        else:
            now, rest = alive, alive - size - (between[work.stage] if is_halved else 0)
            if work.stage not in begun:
                begun.add(work.stage)
                now = rest + sum(_first_end(unit, is_halved) for unit in stages[work.stage])
                rest += gradients[work.stage]
        peaks.append((now + working[work.stage][not is_whole], num_alive, num_held))
        alive = rest
        num_alive -= work.kind == "B"
    if len(stages) == 1:
        peaks = [max(peaks)]
    most = max(num_bytes + widest * num_held for num_bytes, _, num_held in peaks) + sum(unit.batch for unit in units)
    before += sum(gradients.values()) if sums_gradients else 0
    return sum(unit.lasting for unit in units) + max(before, most)


def cut_bytes(
    order: Sequence[Sequence[Work]],
    units: Sequence[UnitBytes],
    *,
    before: int,
    limit: int,
    keeps_sends: bool,
    recompute: str,
    sums_gradients: bool,
) -> tuple[list[list[int]], list[list[int]]]:
    """``rank_bytes`` by rank and unit, for ranks of one stage: what every unit adds, and beside their sum the working
    sets, of which the largest counts.

    All units reach their most at once: in the first backward, or behind it where as many micro-batches are alive again.
    For that, what a micro-batch that alone is not recomputed holds between its halves counts from its forward on. What
    the first rank cannot hold while it runs the prefix is made more than ``limit``.
    """
    rows, working = [], []
    widest = widest_boundary(units) if len(order) > 1 else 0
    order = [_whole_backwards(of_rank, recompute) for of_rank in order]
    for rank, of_rank in enumerate(order):
        mine = units if rank else _behind_batch(units, num_microbatches=_num_microbatches(of_rank))
        first_end = next(number for number, work in enumerate(of_rank) if work.kind == "B")
        is_behind = sums_gradients or peak_alive(of_rank[first_end + 1 :]) > 0
        whole, halved = _whole_microbatch(of_rank, recompute), _halved(of_rank)
        num_whole = int(whole is not None)  # it is among those alive at the peak
        num_kept = peak_alive(of_rank) - num_whole
        num_halved = int(any(m == whole for _, m in halved)) if num_whole else _peak_halved(of_rank)
        ends_halved = not num_whole and of_rank[first_end][1:] in halved
        row = []
        for unit in mine:
            kept = num_whole * unit.whole + (num_kept - 1) * unit.kept + num_halved * unit.between
            if is_behind:
                ending = unit.kept + unit.gradients
            else:
                ending = _first_end(unit, ends_halved) - ends_halved * unit.between
            row.append(unit.lasting + unit.batch + kept + ending)
        rows.append(row)
        is_alone = whole is not None and peak_alive(of_rank) == 1
        beside = widest * _most_held(of_rank, num_stages=len(order), keeps_sends=keeps_sends)
        working.append([num_bytes + beside for num_bytes in _working(mine, recomputes=not is_alone)])
    held = accumulate(unit.lasting + (unit.gradients if sums_gradients else 0) for unit in units)
    rows[0] = [most if before + so_far <= limit else limit + 1 for most, so_far in zip(rows[0], held)]
    return rows, working


def _first_end(unit: UnitBytes, is_halved: bool) -> int:
    """While the first backward goes through a stage, each unit has its activations still or its gradients already."""
    return max(unit.kept + (unit.between if is_halved else 0), unit.gradients)


def _working(units: Sequence[UnitBytes], *, recomputes: bool) -> list[int]:
    """What each unit's backward takes, what is recomputed included."""
    return [unit.working + (unit.whole - unit.kept if recomputes else 0) for unit in units]


def _behind_batch(units: Sequence[UnitBytes], *, num_microbatches: int) -> list[UnitBytes]:
    """The units of the first stage: what enters it is no tensor of its own, but part of the batch, which stays."""
    first = units[0]
    first = replace(
        first,
        batch=num_microbatches * first.entering,
        kept=first.kept - first.entering,
        whole=first.whole - first.entering,
    )
    return [first, *units[1:]]


def _num_held(order: Sequence[Work], *, num_stages: int, keeps_sends: bool) -> list[int]:
    """Before each piece of work: leaves and sends that a rank holds, in boundaries of a micro-batch.

    Args:
        order: of ``_whole_backwards``.
    """
    last, halved = num_stages - 1, _halved(order)
    num_held, found = 0, []
    for work in order:
        found.append(num_held)
        if work.kind == "F":
            num_held += keeps_sends and work.stage < last
            continue
        if work.kind == "I" or work[1:] not in halved:  # gradients of inputs are there
            num_held += keeps_sends * ((work.stage > 0) - (work.stage < last))
        if work.kind == "B" and work[1:] not in halved:
            num_held += 0 < work.stage == last
    return found


def _most_held(order: Sequence[Work], *, num_stages: int, keeps_sends: bool) -> int:
    """``_num_held`` at most while a rank of one stage has the most micro-batches alive."""
    most = peak_alive(order)
    alive, found = 0, []
    for work, num_held in zip(order, _num_held(order, num_stages=num_stages, keeps_sends=keeps_sends)):
        if alive == most:
            found.append(num_held)
        alive += {"F": 1, "I": 0, "B": -1}[work.kind]
    return max(found)


def _num_microbatches(order: Sequence[Work]) -> int:
    return 1 + max(work.microbatch for work in order)


def _whole_backwards(order: Sequence[Work], recompute: str) -> Order:
    """``order`` with one "B" for each forward, where it frees the activations and makes the gradients of weights.

    Where the backward is split, it is that of weights, and "I" stays; but what is recomputed is not split, its backward
    is whole where that of inputs stands. Of stage 0 all is later (``adapter.stage``).
    """
    if all(work.kind in "FB" for work in order):
        return list(order)
    split = {"never": range(_num_microbatches(order)), "except_last": [_num_microbatches(order) - 1]}.get(recompute, ())

    found: Order = []
    for work in order:
        ends_later = work.stage == 0 or work.microbatch in split
        if work.kind == "F" or (work.kind == "I" and ends_later and work.stage > 0):
            found.append(work)
        elif work.kind == ("W" if ends_later else "I"):
            found.append(work._replace(kind="B"))
    return found


def _halved(order: Sequence[Work]) -> set[tuple[int, int]]:
    """(stage, micro-batch) whose backward is split. Args: order: of ``_whole_backwards``."""
    return {(work.stage, work.microbatch) for work in order if work.kind == "I"}


def _peak_halved(order: Sequence[Work]) -> int:
    """The most that are between their halves at once."""
    halved = _halved(order)
    ends = [work for work in order if work.kind != "F" and work[1:] in halved]
    return peak_alive([work._replace(kind="F" if work.kind == "I" else "B") for work in ends])


def _whole_microbatch(order: Sequence[Work], recompute: str) -> int | None:
    """The one that is kept as without recomputation, where the others are not; None where all are alike."""
    last = _num_microbatches(order) - 1
    return last if recompute == "except_last" and last > 0 else None
