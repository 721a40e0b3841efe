"""The most bytes that a rank of a pipeline holds at once in a step: pure, the same for the cut and for the prediction.

    +--------------------------+
    | working set              |  of the one unit whose backward runs, its recomputation included
    | boundaries               |  sent or received, where they stay longer than they are needed (below)
    | gradients between halves |  of the micro-batches whose backward is split and half done
    | activations              |  of the micro-batches whose backward is to come
    | batch                    |  on the first rank: all micro-batches as they enter the first unit that trains
    | gradients                |  of its units: each from its first backward on, or always where replicas sum them
    | weights, optimizer state |  of its units; of the frozen prefix, which every rank has, weights alone
    +--------------------------+

Or, on the first rank, before the activations: the forward of the prefix, for all micro-batches at once.

A boundary is the tensor between two stages, of one micro-batch, or its gradient. A received one is part of the
activations, and its gradient part of the working set, until their backward is done. Beside those stay, by the version
of torch (``JobCosts.keeps_boundaries``) and the schedule (``schedules.keeps_sends``):

    version      schedule         outputs sent      gradients sent    inputs received     gradients received
    keeps all    keeps sends      to the end        to the end        all, always         all, always
    keeps all    other            to the backward   -                 all, always         all, always
    keeps few    keeps sends      to the backward   to the end        of the last stage   -
    keeps few    other            -                 -                 of the last stage   -

"The end" is the step's. "Always": there are buffers for every micro-batch, from step to step. "Of the last stage": a
loss lasts until the step ends, and with it the inputs of its graph, where the whole graph went through one backward.

Not counted: outputs, losses, masks and labels (few bytes a row), the store of the cache and the batches read ahead from
it, optimizer state of frozen units that may unfreeze, memory of kernels and of the process itself; boundaries that
ranks of several stages receive ahead of their turn; gradients sent under GPipe, which stay too, and weigh where a stage
keeps next to nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from pipetransformer.pipe.planner.costs import JobCosts, UnitCosts
from pipetransformer.plan.schedules import Order, Work, peak_alive


@dataclass(frozen=True, slots=True)
class UnitBytes:
    """One unit's part of a rank's memory.

    Attributes:
        lasting: weights and optimizer state.
        gradients: of its weights.
        entering: the unit's input, of one micro-batch.
        kept: activations of one micro-batch until its backward, ``entering`` included.
        whole: the same of a micro-batch that is not recomputed.
        working: during its backward, beside all that is recomputed.
        between: of one micro-batch whose backward is split, between the halves.
        batch: of the first unit that trains: its input, of all micro-batches; 0 elsewhere.
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
    """The parts of all units.

    Args:
        recomputes: whether any micro-batch is recomputed.
    """
    kept_bytes = unit.kept_bytes if recomputes else unit.activation_bytes
    columns = (
        costs.lasting_bytes, costs.parameter_bytes, unit.entering_bytes, kept_bytes, unit.activation_bytes,
        unit.working_bytes, unit.between_bytes,
    )  # fmt: skip
    return [UnitBytes(*of_unit) for of_unit in zip(*columns)]


def prefix_bytes(unit: UnitCosts, *, computed: range, num_microbatches: int) -> int:
    """The most that the first rank holds while it runs the frozen units ``computed`` on all micro-batches at once."""
    if not computed:
        return 0
    start = computed.start
    most = max(unit.prefix_bytes[u] + (unit.entering_bytes[u] if u > start else 0) for u in computed)
    return num_microbatches * (unit.entering_bytes[start] + most)


def widest_boundary(units: Sequence[UnitBytes]) -> int:
    """The widest input that a stage behind the first can have, of one micro-batch.

    Args:
        units: all that train.
    """
    return max(unit.entering for unit in units[1:])


def rank_bytes(
    order: Sequence[Work],
    stages: Mapping[int, Sequence[UnitBytes]],
    *,
    before: int,
    widest: int,
    num_stages: int,
    keeps_sends: bool,
    keeps_boundaries: bool,
    recompute: str,
    sums_gradients: bool,
) -> int:
    """The most that a rank holds, beside the weights of the prefix.

    A rank of one stage is taken to hold the most when its units do, as ``cut_bytes`` has it: boundaries, which grow in
    number until the end, count as they are then.

    Args:
        order: the rank's work.
        stages: the units of each of its stages, by number in the pipeline.
        before: bytes while it runs the prefix.
        widest: ``widest_boundary``; 0 where the pipeline has one stage.
        num_stages: of the pipeline.
        keeps_sends: whether its schedule does.
        keeps_boundaries: whether torch does.
        recompute: one of ``adapter.MODES``.
        sums_gradients: whether it sums them with other replicas, in buckets that stay.
    """
    order = _whole_backwards(order, recompute)
    held = _num_held(order, num_stages=num_stages, keeps_sends=keeps_sends, keeps_boundaries=keeps_boundaries)
    if 0 in stages:
        stages = {**stages, 0: _behind_batch(stages[0], num_microbatches=_num_microbatches(order))}
        before += widest * held[0]
    parts = {number: _StageBytes.of(units) for number, units in stages.items()}
    peaks = list(_peaks(order, parts, held=held, recompute=recompute, sums_gradients=sums_gradients))
    if len(stages) == 1:
        peaks = [max(peaks)]
    units = [unit for stage in stages.values() for unit in stage]
    most = max(num_bytes + widest * num_held for num_bytes, _, num_held in peaks) + sum(unit.batch for unit in units)
    before += sum(unit.gradients for unit in units) if sums_gradients else 0
    return sum(unit.lasting for unit in units) + max(before, most)


@dataclass(frozen=True, slots=True)
class _StageBytes:
    """Sums over the units of a stage, and maxima.

    Attributes:
        gradients, kept, whole, between: sums of those of ``UnitBytes``.
        first_end: while the first backward goes through: whole, and of weights alone.
        working: the largest working set: without recomputation, and with it.
    """

    gradients: int
    kept: int
    whole: int
    between: int
    first_end: tuple[int, int]
    working: tuple[int, int]

    @classmethod
    def of(cls, units: Sequence[UnitBytes]) -> _StageBytes:
        return cls(
            gradients=sum(unit.gradients for unit in units),
            kept=sum(unit.kept for unit in units),
            whole=sum(unit.whole for unit in units),
            between=sum(unit.between for unit in units),
            first_end=(sum(_first_end(unit, False) for unit in units), sum(_first_end(unit, True) for unit in units)),
            working=(max(_working(units, recomputes=False)), max(_working(units, recomputes=True))),
        )


def _peaks(
    order: Sequence[Work],
    stages: Mapping[int, _StageBytes],
    *,
    held: Sequence[int],
    recompute: str,
    sums_gradients: bool,
) -> Iterator[tuple[int, int, int]]:
    """Of each backward: bytes without boundaries, micro-batches alive, boundaries beside them.

    Args:
        order: of ``_whole_backwards``.
        held: of ``_num_held``.
    """
    whole_microbatch, halved = _whole_microbatch(order, recompute), _halved(order)
    alive = sum(stage.gradients for stage in stages.values()) if sums_gradients else 0
    begun = set(stages) if sums_gradients else set[int]()  # stages whose gradients are there
    num_alive = 0
    for work, num_held in zip(order, held):
        stage = stages[work.stage]
        is_whole, is_halved = work.microbatch == whole_microbatch, work[1:] in halved
        size = stage.whole if is_whole else stage.kept
        if work.kind == "F":
            alive += size + (stage.between if is_whole and is_halved else 0)
            num_alive += 1
            continue
        if work.kind == "I":
            now = rest = alive + (0 if is_whole else stage.between)
        else:
            now, rest = alive, alive - size - (stage.between if is_halved else 0)
            if work.stage not in begun:
                begun.add(work.stage)
                now = rest + stage.first_end[is_halved]
                rest += stage.gradients
        yield now + stage.working[not is_whole], num_alive, num_held
        alive = rest
        num_alive -= work.kind == "B"


def cut_bytes(
    order: Sequence[Sequence[Work]],
    units: Sequence[UnitBytes],
    *,
    before: int,
    limit: int,
    keeps_sends: bool,
    keeps_boundaries: bool,
    recompute: str,
    sums_gradients: bool,
) -> tuple[list[list[int]], list[list[int]]]:
    """``rank_bytes`` of ranks of one stage, by rank and unit, for whoever looks for a cut.

    All units reach their most at once: in the first backward, or behind it where as many micro-batches are alive again.
    For that, the gradients between halves of a micro-batch that alone is not recomputed count from its forward on. The
    units that are too many for the first rank while it runs the prefix are made more than ``limit``.

    Returns:
        the bytes that each unit adds, and the working sets beside their sum, of which the largest counts.
    """
    rows, working = [], []
    widest = widest_boundary(units) if len(order) > 1 else 0
    order = [_whole_backwards(of_rank, recompute) for of_rank in order]
    for rank, of_rank in enumerate(order):
        mine = units if rank else _behind_batch(units, num_microbatches=_num_microbatches(of_rank))
        rows.append(_cut_row(of_rank, mine, recompute=recompute, sums_gradients=sums_gradients))
        held = _num_held(of_rank, num_stages=len(order), keeps_sends=keeps_sends, keeps_boundaries=keeps_boundaries)
        before += widest * held[0] if rank == 0 else 0
        is_alone = _whole_microbatch(of_rank, recompute) is not None and peak_alive(of_rank) == 1
        beside = widest * _most_held(of_rank, held)
        working.append([num_bytes + beside for num_bytes in _working(mine, recomputes=not is_alone)])
    so_far = accumulate(unit.lasting + (unit.gradients if sums_gradients else 0) for unit in units)
    rows[0] = [most if before + num_bytes <= limit else limit + 1 for most, num_bytes in zip(rows[0], so_far)]
    return rows, working


def _cut_row(order: Sequence[Work], units: Sequence[UnitBytes], *, recompute: str, sums_gradients: bool) -> list[int]:
    """The bytes that each unit adds to a rank of one stage.

    Args:
        order: of ``_whole_backwards``.
    """
    first_end = next(number for number, work in enumerate(order) if work.kind == "B")
    is_behind = sums_gradients or peak_alive(order[first_end + 1 :]) > 0
    whole, halved = _whole_microbatch(order, recompute), _halved(order)
    num_whole = int(whole is not None)  # it is among those alive at the peak
    num_kept = peak_alive(order) - num_whole
    num_halved = int(any(m == whole for _, m in halved)) if num_whole else _peak_halved(order)
    ends_halved = not num_whole and order[first_end][1:] in halved
    row = []
    for unit in units:
        kept = num_whole * unit.whole + (num_kept - 1) * unit.kept + num_halved * unit.between
        first = _first_end(unit, ends_halved) - ends_halved * unit.between
        ending = unit.kept + unit.gradients if is_behind else first
        row.append(unit.lasting + unit.batch + kept + ending)
    return row


def _first_end(unit: UnitBytes, is_halved: bool) -> int:
    """While the first backward goes through a stage, each unit has its activations still or its gradients already."""
    return max(unit.kept + (unit.between if is_halved else 0), unit.gradients)


def _working(units: Sequence[UnitBytes], *, recomputes: bool) -> list[int]:
    """The working set of each unit's backward, its recomputation included."""
    return [unit.working + (unit.whole - unit.kept if recomputes else 0) for unit in units]


def _behind_batch(units: Sequence[UnitBytes], *, num_microbatches: int) -> list[UnitBytes]:
    """The units of the first stage, whose input is no tensor of its own, but part of the batch, which stays."""
    first = units[0]
    first = replace(
        first,
        batch=num_microbatches * first.entering,
        kept=first.kept - first.entering,
        whole=first.whole - first.entering,
    )
    return [first, *units[1:]]


def _num_held(order: Sequence[Work], *, num_stages: int, keeps_sends: bool, keeps_boundaries: bool) -> list[int]:
    """Before each piece of work: the boundaries that a rank holds beside activations and working set.

    Args:
        order: of ``_whole_backwards``.
    """
    last, halved = num_stages - 1, _halved(order)
    has_outputs, frees_outputs = keeps_sends or keeps_boundaries, keeps_sends != keeps_boundaries
    num_held, found = 0, []
    if keeps_boundaries:
        num_held = _num_microbatches(order) * sum((s > 0) + (s < last) for s in {work.stage for work in order})
    for work in order:
        receives, sends = work.stage > 0, work.stage < last
        if work.kind == "F":
            found.append(num_held)
            num_held += (has_outputs and sends) - (keeps_boundaries and receives)
            continue
        found.append(num_held - (keeps_boundaries and sends))  # the gradient at hand is in the working set
        is_halved = work[1:] in halved
        if work.kind == "I" or not is_halved:  # gradients of inputs are there
            num_held += (keeps_sends and receives) - (frees_outputs and sends)
        if work.kind == "B":  # activations go
            num_held += receives and (keeps_boundaries or (not is_halved and not sends))
    return found


def _most_held(order: Sequence[Work], held: Sequence[int]) -> int:
    """The largest of ``held`` while a rank of one stage has the most micro-batches alive."""
    most = peak_alive(order)
    alive, found = 0, []
    for work, num_held in zip(order, held):
        if alive == most:
            found.append(num_held)
        alive += {"F": 1, "I": 0, "B": -1}[work.kind]
    return max(found)


def _num_microbatches(order: Sequence[Work]) -> int:
    return 1 + max(work.microbatch for work in order)


def _whole_backwards(order: Sequence[Work], recompute: str) -> Order:
    """``order`` with one "B" for each forward, where it frees the activations and makes the gradients of weights.

    Where the backward is split, that is the half of weights, and "I" stays. But a recomputed micro-batch is not split,
    and its whole backward stands where that of inputs does. Of stage 0 all is later (``adapter.stage``).
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
    """(stage, micro-batch) of all backwards that are split.

    Args:
        order: of ``_whole_backwards``.
    """
    return {(work.stage, work.microbatch) for work in order if work.kind == "I"}


def _peak_halved(order: Sequence[Work]) -> int:
    """The most micro-batches that are between the halves of their backward at once."""
    halved = _halved(order)
    ends = [work for work in order if work.kind != "F" and work[1:] in halved]
    return peak_alive([work._replace(kind="F" if work.kind == "I" else "B") for work in ends])


def _whole_microbatch(order: Sequence[Work], recompute: str) -> int | None:
    """The micro-batch that alone is not recomputed; None where all are alike."""
    last = _num_microbatches(order) - 1
    return last if recompute == "except_last" and last > 0 else None
