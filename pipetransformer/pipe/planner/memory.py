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

Or, on the first rank, before the activations: the forward of the prefix, for all micro-batches at once. Or, on every
rank, before the first step: the forward of a batch of the advance pass, with the weights of its units, where they do
not stay.

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
it, memory of kernels and of the process itself; optimizer state that a policy which may unfreeze keeps of frozen units
(that of a freeze that may yet be undone counts, ``JobCosts.parked_from``); boundaries that ranks of several stages
receive ahead of their turn; gradients sent under GPipe, which stay too, and weigh where a stage keeps next to nothing.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import add, neg

from pipetransformer.pipe.planner.costs import JobCosts, UnitCosts
from pipetransformer.plan import ParallelPlan
from pipetransformer.plan.schedules import Order, Work, keeps_sends, peak_alive


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


def unit_bytes(plan: ParallelPlan, unit: UnitCosts, costs: JobCosts) -> list[UnitBytes]:
    """The parts of all units.

    Args:
        unit: costs of the plan's micro-batches.
    """
    recomputes = costs.recomputed_share(plan.num_microbatches) > 0
    kept_bytes = unit.kept_bytes if recomputes else unit.activation_bytes
    lasting, gradients, working = costs.lasting_bytes, costs.gradient_bytes, unit.working_bytes
    if plan.shares_state:  # as much of each on every replica, to begin with (``uneven_bytes``)
        shared = [-(-num_bytes // plan.dp) for num_bytes in _shared_bytes(plan, costs)]
        if plan.shard == "full":  # gradients as they come, and on their way to the owner
            lasting, gradients = tuple(shared), (0,) * len(shared)
            moved = map(add, costs.parameter_bytes, costs.gradient_bytes)
            working = tuple(map(add, working, moved))
        else:
            lasting = tuple(map(add, costs.parameter_bytes, shared))
    columns = (
        lasting, gradients, unit.entering_bytes, kept_bytes, unit.activation_bytes, working, unit.between_bytes,
    )  # fmt: skip
    found = [UnitBytes(*of_unit) for of_unit in zip(*columns)]
    for u in range(plan.first_staged, plan.first_active):  # they run their forward alone
        entering = unit.entering_bytes[u]  # stays at the start of a stage, until its backward
        trained = found[u].whole - entering + found[u].working + found[u].gradients  # a forward takes no more
        own = min(unit.prefix_bytes[u], trained) + costs.woken_bytes(u)
        found[u] = UnitBytes(costs.kept_bytes[u], 0, entering, entering, entering, own, 0)
    return found


def uneven_bytes(plan: ParallelPlan, costs: JobCosts, *, place: int) -> int:
    """The bytes that the replica with the most has at a place, beside an even part of what is shared out: more of it,
    and the weights that it borrows."""
    if not plan.shares_state:
        return 0
    of_all, units, by_replica = _shared_bytes(plan, costs), plan.units_of(place), plan.units_of_replicas(place)
    own = [sum(of_all[unit] for unit in mine) for mine in by_replica]
    if plan.shard == "full":
        others = (set(units) - set(mine) for mine in by_replica)
        own = [held + max((costs.parameter_bytes[u] for u in of), default=0) for held, of in zip(own, others)]
    return max(own) - sum(-(-of_all[unit] // plan.dp) for unit in units)


def _shared_bytes(plan: ParallelPlan, costs: JobCosts) -> list[int]:
    """Of each unit, the bytes that one replica alone has: of its optimizer state, or of weights and gradients too."""
    others = costs.gradient_bytes if plan.shard == "full" else map(neg, costs.parameter_bytes)
    return list(map(add, costs.lasting_bytes, others))


def prefix_bytes(plan: ParallelPlan, unit: UnitCosts, costs: JobCosts) -> int:
    """The most that the first rank holds while it runs the computed part of the prefix on all micro-batches at once.

    Args:
        unit: costs of the plan's micro-batches.
    """
    start, computed = plan.first_computed, range(plan.first_computed, plan.first_staged)
    if not computed:
        return 0
    m = plan.num_microbatches
    own = {u: unit.prefix_bytes[u] + (unit.entering_bytes[u] if u > start else 0) for u in computed}
    return m * unit.entering_bytes[start] + max(m * of_rows + costs.woken_bytes(u) for u, of_rows in own.items())


def advance_bytes(plan: ParallelPlan, unit: UnitCosts, costs: JobCosts, *, rows: int) -> int:
    """The most that any rank holds for the advance pass, beside its active units and optimizer state that stays.

    Args:
        unit: costs of any micro-batches.
        rows: samples of a batch of the pass.
    """
    if plan.cached is None:
        return 0
    units, numbering, weights = range(plan.first_computed), plan.numbering, costs.kept_bytes
    held = [0] * len(units)
    if plan.prefix == "streamed":  # the units of its block; the stem comes with the first one
        parts = [max(1, numbering.part_of(u)) for u in units]
        held = [sum(weights[u] for u, of in zip(units, parts) if of == part) for part in parts]
    scale = rows / unit.rows
    of_rows = [round(scale * (unit.prefix_bytes[u] + unit.entering_bytes[u])) for u in units]
    most = max(n + own + costs.woken_bytes(u) for u, n, own in zip(units, held, of_rows))
    return most + (sum(weights[: units.stop]) if plan.prefix == "cached" else 0)


def widest_boundary(units: Sequence[UnitBytes]) -> int:
    """The widest input that a stage behind the first can have, of one micro-batch.

    Args:
        units: all that train.
    """
    return max((unit.entering for unit in units[1:]), default=0)


class RankWork:
    """The work of one rank of a pipeline, as its memory sees it.

    Attributes:
        order: the work, with one "B" for each forward (``_whole_backwards``).
        num_microbatches: micro-batches of the step.
        peak: the most micro-batches whose backward is to come at once.
        halved: (stage, micro-batch) of all backwards that are split.
        whole: the micro-batch that alone is not recomputed; None where all are alike.
        sums_gradients: whether the rank sums them with other replicas, in buckets that stay.
        held: before each piece of work, the boundaries held beside activations and working set.

    Args:
        order: of the rank, under ``plan``.
    """

    def __init__(self, order: Sequence[Work], plan: ParallelPlan, costs: JobCosts) -> None:
        self.num_microbatches, last = plan.num_microbatches, plan.num_microbatches - 1
        self.whole = last if costs.recompute == "except_last" and last > 0 else None
        split = {"never": range(last + 1), "except_last": [last]}.get(costs.recompute, ())
        self.order = _whole_backwards(order, split=split)
        self.peak = peak_alive(self.order)
        self.halved = {(work.stage, work.microbatch) for work in self.order if work.kind == "I"}
        self.sums_gradients = plan.dp > 1
        self.held = self._num_held(plan, keeps_boundaries=costs.keeps_boundaries)

    def _num_held(self, plan: ParallelPlan, *, keeps_boundaries: bool) -> list[int]:
        last, sent_stay = plan.num_stages - 1, keeps_sends(plan.schedule)
        has_outputs, frees_outputs = sent_stay or keeps_boundaries, sent_stay != keeps_boundaries
        num_held, found = 0, []
        if keeps_boundaries:
            stages = {work.stage for work in self.order}
            num_held = self.num_microbatches * sum((stage > 0) + (stage < last) for stage in stages)
        for work in self.order:
            receives, sends = work.stage > 0, work.stage < last
            if work.kind == "F":
                found.append(num_held)
                num_held += (has_outputs and sends) - (keeps_boundaries and receives)
                continue
            found.append(num_held - (keeps_boundaries and sends))  # the gradient at hand is in the working set
            is_halved = work[1:] in self.halved
            if work.kind == "I" or not is_halved:  # gradients of inputs are there
                num_held += (sent_stay and receives) - (frees_outputs and sends)
            if work.kind == "B":  # activations go
                num_held += receives and (keeps_boundaries or (not is_halved and not sends))
        return found

    def most_held(self) -> int:
        """The most of ``held`` while a rank of one stage has the most micro-batches alive."""
        alive, found = 0, []
        for work, num_held in zip(self.order, self.held):
            if alive == self.peak:
                found.append(num_held)
            alive += {"F": 1, "I": 0, "B": -1}[work.kind]
        return max(found)

    def peak_halved(self) -> int:
        """The most micro-batches that are between the halves of their backward at once."""
        ends = [work for work in self.order if work.kind != "F" and work[1:] in self.halved]
        return peak_alive([work._replace(kind="F" if work.kind == "I" else "B") for work in ends])

    def behind_batch(self, units: Sequence[UnitBytes]) -> list[UnitBytes]:
        """The units of the first stage, whose input is no tensor of its own, but part of the batch, which stays."""
        first, *others = units
        entering = first.entering
        batch, kept, whole = self.num_microbatches * entering, first.kept - entering, first.whole - entering
        return [replace(first, batch=batch, kept=kept, whole=whole), *others]


def works_of(plan: ParallelPlan, costs: JobCosts) -> list[RankWork]:
    """The work of each rank of a pipeline of ``plan``."""
    return [RankWork(order, plan, costs) for order in plan.orders()]


def rank_bytes(work: RankWork, stages: Mapping[int, Sequence[UnitBytes]], *, before: int, widest: int) -> int:
    """The most that a rank holds, beside the weights of the prefix.

    A rank of one stage is taken to hold the most when its units do, as ``cut_bytes`` has it: boundaries, which grow in
    number until the end, count as they are then.

    Args:
        stages: the units of each of its stages, by number in the pipeline.
        before: bytes while it runs the prefix.
        widest: ``widest_boundary``.
    """
    if 0 in stages:
        stages = {**stages, 0: work.behind_batch(stages[0])}
        before += widest * work.held[0]
    peaks = list(_peaks(work, {number: _StageBytes.of(units) for number, units in stages.items()}))
    if len(stages) == 1:
        peaks = [max(peaks)]
    units = [unit for stage in stages.values() for unit in stage]
    most = max(num_bytes + widest * num_held for num_bytes, _, num_held in peaks) + sum(unit.batch for unit in units)
    before += sum(unit.gradients for unit in units) if work.sums_gradients else 0
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
    first_end: tuple[int, ...]
    working: tuple[int, ...]

    @classmethod
    def of(cls, units: Sequence[UnitBytes]) -> _StageBytes:
        gradients, kept, whole, between = (
            sum(getattr(unit, name) for unit in units) for name in ("gradients", "kept", "whole", "between")
        )
        return cls(
            gradients,
            kept,
            whole,
            between,
            first_end=tuple(sum(_first_end(unit, is_halved) for unit in units) for is_halved in (False, True)),
            working=tuple(max(_working(units, recomputes=recomputes)) for recomputes in (False, True)),
        )


def _peaks(rank: RankWork, stages: Mapping[int, _StageBytes]) -> Iterator[tuple[int, int, int]]:
    """Of each backward: bytes without boundaries, micro-batches alive, boundaries beside them."""
    alive = sum(stage.gradients for stage in stages.values()) if rank.sums_gradients else 0
    begun = set(stages) if rank.sums_gradients else set[int]()  # stages whose gradients are there
    num_alive = 0
    for work, num_held in zip(rank.order, rank.held):
        stage = stages[work.stage]
        is_whole, is_halved = work.microbatch == rank.whole, work[1:] in rank.halved
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
    works: Sequence[RankWork], units: Sequence[UnitBytes], *, before: int, limit: int
) -> tuple[list[list[int]], list[list[int]]]:
    """``rank_bytes`` of ranks of one stage, by rank and unit, for whoever looks for a cut.

    All units reach their most at once: in the first backward, or behind it where as many micro-batches are alive again.
    For that, the gradients between halves of a micro-batch that alone is not recomputed count from its forward on. The
    units that are too many for the first rank while it runs the prefix are made more than ``limit``.

    Args:
        works: of the ranks of a pipeline, in order.
        units: all that train.

    Returns:
        the bytes that each unit adds, and the working sets beside their sum, of which the largest counts.
    """
    widest = widest_boundary(units)
    by_rank = [works[0].behind_batch(units), *[units] * (len(works) - 1)]
    rows = [_cut_row(work, mine) for work, mine in zip(works, by_rank)]
    working = []
    for work, mine in zip(works, by_rank):
        is_alone = work.whole is not None and work.peak == 1
        beside = widest * work.most_held()
        working.append([num_bytes + beside for num_bytes in _working(mine, recomputes=not is_alone)])
    before += widest * works[0].held[0]
    so_far = accumulate(unit.lasting + (unit.gradients if works[0].sums_gradients else 0) for unit in units)
    rows[0] = [most if before + num_bytes <= limit else limit + 1 for most, num_bytes in zip(rows[0], so_far)]
    return rows, working


def _cut_row(work: RankWork, units: Sequence[UnitBytes]) -> list[int]:
    """The bytes that each unit adds to a rank of one stage."""
    order = work.order
    first_end = next(number for number, piece in enumerate(order) if piece.kind == "B")
    is_behind = work.sums_gradients or peak_alive(order[first_end + 1 :]) > 0
    num_whole = int(work.whole is not None)  # it is among those alive at the peak
    num_halved = int(any(m == work.whole for _, m in work.halved)) if num_whole else work.peak_halved()
    ends_halved = not num_whole and order[first_end][1:] in work.halved
    row = []
    for unit in units:
        kept = num_whole * unit.whole + (work.peak - num_whole - 1) * unit.kept + num_halved * unit.between
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


def _whole_backwards(order: Sequence[Work], *, split: Container[int]) -> Order:
    """``order`` with one "B" for each forward, where it frees the activations and makes the gradients of weights.

    Where the backward is split, that is the half of weights, and "I" stays. But a recomputed micro-batch is not split,
    and its whole backward stands where that of inputs does. Of stage 0 all is later (``adapter.stage``).

    Args:
        split: the micro-batches that are not recomputed.
    """
    if all(work.kind in "FB" for work in order):
        return list(order)
    found: Order = []
    for work in order:
        ends_later = work.stage == 0 or work.microbatch in split
        if work.kind == "F" or (work.kind == "I" and ends_later and work.stage > 0):
            found.append(work)
        elif work.kind == ("W" if ends_later else "I"):
            found.append(work._replace(kind="B"))
    return found
