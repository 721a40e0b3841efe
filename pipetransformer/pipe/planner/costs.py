"""Measured costs of a model's units: what AutoPipe plans with. Plain integers, the same on every rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

__all__ = ["JobCosts", "Link", "UnitCosts", "at_length", "line"]

_PER_UNIT = (
    "forward_ns",
    "backward_ns",
    "activation_bytes",
    "boundary_bytes",
    "prefix_ns",
    "weight_ns",
    "recompute_ns",
    "kept_bytes",
    "entering_bytes",
    "working_bytes",
    "prefix_bytes",
    "between_bytes",
)


@dataclass(frozen=True, slots=True)
class Link:
    """What a message costs: nanoseconds before the first byte, and for each byte."""

    latency_ns: int
    ns_per_byte: float

    def bytes_ns(self, num_bytes: float) -> int:
        """How long ``num_bytes`` occupy the link."""
        return round(self.ns_per_byte * num_bytes)

    def ns(self, num_bytes: float) -> int:
        """From the first byte sent to the last received."""
        return self.latency_ns + self.bytes_ns(num_bytes)


@dataclass(frozen=True, slots=True)
class UnitCosts:
    """Costs of every unit for one micro-batch shape.

    Attributes:
        rows, length: the micro-batch: samples and padded length.
        forward_ns, backward_ns: one forward, one backward (gradients of inputs and weights), medians.
        activation_bytes: what autograd keeps of one micro-batch for the backward, without recomputation.
        boundary_bytes: what leaves the unit to the next one.
        prefix_ns: one forward of the frozen unit: eval mode, no graph.
        weight_ns: the part of ``backward_ns`` that the gradients of weights take.
        recompute_ns: what recomputation adds to a backward. kept_bytes: what it keeps of one micro-batch.
        entering_bytes: what enters the unit; part of what is kept in any mode.
        working_bytes: the most that the backward of one micro-batch holds at once, beside what is kept and gradients.
        prefix_bytes: the most that one forward of the frozen unit holds at once, beside what enters it.
        between_bytes: what a split backward holds between its halves, beside ``activation_bytes``.
    """

    rows: int
    length: int
    forward_ns: tuple[int, ...]
    backward_ns: tuple[int, ...]
    activation_bytes: tuple[int, ...]
    boundary_bytes: tuple[int, ...]
    prefix_ns: tuple[int, ...]
    weight_ns: tuple[int, ...]
    recompute_ns: tuple[int, ...]
    kept_bytes: tuple[int, ...]
    entering_bytes: tuple[int, ...]
    working_bytes: tuple[int, ...]
    prefix_bytes: tuple[int, ...]
    between_bytes: tuple[int, ...]

    def scaled(self, rows: int) -> UnitCosts:
        """For micro-batches of another size: in proportion."""
        if rows == self.rows:
            return self
        columns = (tuple(round(n * rows / self.rows) for n in column) for column in self.columns())
        return UnitCosts(rows, self.length, *columns)

    def columns(self) -> tuple[tuple[int, ...], ...]:
        """All that is known by unit, in the order of the attributes."""
        return tuple(getattr(self, name) for name in _PER_UNIT)

    def prefix_seconds(self, first: int, stop: int, *, num_samples: int) -> float:
        """Forward of the frozen units first .. stop - 1 for ``num_samples`` samples on one rank."""
        return sum(self.prefix_ns[first:stop]) / 1e9 / self.rows * num_samples

    @property
    def step_ns(self) -> tuple[int, ...]:
        return tuple(f + b for f, b in zip(self.forward_ns, self.backward_ns, strict=True))


@dataclass(frozen=True, slots=True)
class JobCosts:
    """All that the planner knows.

    Attributes:
        by_rows: unit costs by rows of a micro-batch, at the padded length that most work has.
        parameter_bytes: weights of each unit.
        optimizer_factor: bytes of weights and optimizer state per byte of weights.
        update_ns_per_byte: optimizer step, per byte of weight.
        send: between ranks of a node. reduction: the sum of gradients over ``num_ranks`` ranks.
        overlap: how much of the last micro-batch's backward can hide a reduction, 0 to 1.
        contention: how long work takes while all ranks are busy, as all costs were measured, over what it takes a rank
            alone: above 1 where ranks share cores.
        recompute: which micro-batches are recomputed, one of ``adapter.MODES``.
        between: of a node to others; None on one node. The sums of a pipeline's stages share it.
        read: of a rank to the memory that its cache is in; None does not count reads.
        receives_late: messages of a pipeline move only when they are asked for, right before they are needed. Note: so
            they do between CPUs, where torch's schedules wait for what they ask for; GPUs are asked far ahead.
        keeps_boundaries: stages keep all that they send and receive, as torch did before 2.15 (``adapter.behaviour``).
    """

    by_rows: Mapping[int, UnitCosts]
    parameter_bytes: tuple[int, ...]
    optimizer_factor: float
    update_ns_per_byte: float
    send: Link
    reduction: Link
    num_ranks: int
    overlap: float = 0.0
    contention: float = 1.0
    recompute: str = "never"
    between: Link | None = None
    read: Link | None = None
    receives_late: bool = False
    keeps_boundaries: bool = False

    @property
    def lasting_bytes(self) -> tuple[int, ...]:
        """Weights and optimizer state of each unit: all that lasts from step to step but gradients."""
        return tuple(round(num_bytes * self.optimizer_factor) for num_bytes in self.parameter_bytes)

    def unit_costs(self, rows: int) -> UnitCosts:
        """For micro-batches of ``rows``: of the nearest size that was measured, in proportion."""
        return self.by_rows[min(self.by_rows, key=lambda have: (abs(have - rows), have))].scaled(rows)

    def busy_factors(self, pp: int) -> tuple[float, ...] | None:
        """While 1, 2, ... ``pp`` ranks of each pipeline are busy: how long work takes over what the costs say.

        In between it is linear in the number of busy ranks. None where ranks do not share cores.
        """
        if self.contention <= 1.0 or self.num_ranks == 1:
            return None
        alone = 1 / self.num_ranks
        return tuple(
            (1 + (self.contention - 1) * max(0.0, k / pp - alone) / (1 - alone)) / self.contention
            for k in range(1, pp + 1)
        )

    def reduction_ns(self, num_bytes: int, *, num_replicas: int) -> int:
        """Sum of ``num_bytes`` of gradients over some of the ranks: a ring moves 2 (d - 1) / d of them.

        On several nodes every ring crosses them all (a node holds whole pipelines), and those of a pipeline's stages
        together take no less than their bytes take over the link between nodes.
        Source: Patarasuk & Yuan, "Bandwidth optimal all-reduce algorithms", 2009.
        """
        if num_replicas == 1 or num_bytes == 0:
            return 0
        moved = (num_replicas - 1) / num_replicas
        taken = self.reduction.bytes_ns(num_bytes * moved / ((self.num_ranks - 1) / self.num_ranks))
        if self.between is not None:
            num_rings = self.num_ranks // num_replicas
            taken = max(taken, self.between.bytes_ns(num_rings * num_bytes * 2 * moved))
        return self.reduction.latency_ns + taken

    def for_ranks(self, num_ranks: int) -> JobCosts:
        """The same devices and links in a job of another size: a sum over all ranks goes round a longer ring."""
        if num_ranks == self.num_ranks or self.num_ranks == 1:
            return self
        longer = ((num_ranks - 1) / num_ranks) / ((self.num_ranks - 1) / self.num_ranks)
        reduction = Link(self.reduction.latency_ns, self.reduction.ns_per_byte * longer)
        return replace(self, num_ranks=num_ranks, reduction=reduction)


def line(length: int, measured: Mapping[int, float]) -> float:
    """What a cost is at ``length``, given one or two measured lengths: linear, and proportional from a single one.

    Below the shorter one a cost shrinks at most in proportion: noise must not make it negative.
    """
    (short, least), *more = sorted(measured.items())
    proportional = least / short
    slope = max(0.0, (more[0][1] - least) / (more[0][0] - short)) if more else proportional
    return least + (length - short) * (slope if length > short else min(slope, proportional))


def at_length(length: int, measured: Mapping[int, UnitCosts]) -> UnitCosts:
    """Unit costs at ``length`` from those of one or two lengths, all of as many rows."""
    if length in measured:
        return measured[length]

    def column(name: str) -> tuple[int, ...]:
        columns = zip(*(getattr(costs, name) for costs in measured.values()), strict=True)
        return tuple(round(line(length, dict(zip(measured, values)))) for values in columns)

    return UnitCosts(next(iter(measured.values())).rows, length, *map(column, _PER_UNIT))
