"""Measured costs of a model's units, links and updates, for the planner: plain numbers, the same on every rank."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Link:
    """The costs of messages on one link.

    Attributes:
        latency_ns: nanoseconds before the first byte arrives.
        ns_per_byte: nanoseconds for each byte.
    """

    latency_ns: int
    ns_per_byte: float

    def bytes_ns(self, num_bytes: float) -> int:
        """Nanoseconds that ``num_bytes`` occupy the link."""
        return round(self.ns_per_byte * num_bytes)

    def ns(self, num_bytes: float) -> int:
        """Nanoseconds of a message of ``num_bytes``, latency included."""
        return self.latency_ns + self.bytes_ns(num_bytes)


@dataclass(frozen=True, slots=True)
class UnitCosts:
    """Costs of every unit for one shape of micro-batches. Each tuple has one number per unit [num_units].

    Attributes:
        rows: number of rows of the micro-batch.
        length: padded length of its samples.
        forward_ns: one forward in training.
        backward_ns: one backward: gradients of inputs and weights, without recomputation.
        activation_bytes: activations that autograd keeps from a forward to its backward, without recomputation.
        boundary_bytes: output of the unit.
        prefix_ns: one forward of the frozen unit: eval mode, no graph.
        weight_ns: the part of ``backward_ns`` for the gradients of weights.
        recompute_ns: the addition of recomputation to a backward.
        kept_bytes: activations kept from a forward to its backward, with recomputation.
        entering_bytes: input of the unit; part of ``activation_bytes`` and ``kept_bytes``.
        working_bytes: the most that a backward holds at once, beside kept activations and gradients of weights.
        prefix_bytes: the most that a forward of the frozen unit holds at once, beside its input.
        between_bytes: addition of a split backward to ``activation_bytes``, between its two halves.
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
        """The costs of micro-batches of ``rows`` rows, in proportion."""
        columns = (tuple(round(n * rows / self.rows) for n in column) for column in self.columns())
        return UnitCosts(rows, self.length, *columns)

    def columns(self) -> tuple[tuple[int, ...], ...]:
        """All tuples with one number per unit, in a fixed order."""
        return tuple(getattr(self, name) for name in _PER_UNIT)

    def prefix_seconds(self, first: int, stop: int, *, num_samples: int) -> float:
        """Seconds of the forward of the frozen units first .. stop - 1 for ``num_samples`` samples on one rank."""
        return sum(self.prefix_ns[first:stop]) / 1e9 / self.rows * num_samples

    @property
    def step_ns(self) -> tuple[int, ...]:
        """Forward and backward of each unit together, without recomputation."""
        return tuple(f + b for f, b in zip(self.forward_ns, self.backward_ns, strict=True))


_PER_UNIT = tuple(column.name for column in fields(UnitCosts) if column.name not in ("rows", "length"))
_TIMES = tuple(name for name in _PER_UNIT if name.endswith("_ns"))


@dataclass(frozen=True, slots=True)
class JobCosts:
    """All costs of a job.

    Attributes:
        by_rows: unit costs by rows of a micro-batch, at the modal padded length (that of most of the work).
        parameter_bytes: bytes of the weights of each unit [num_units].
        optimizer_factor: bytes of weights and optimizer state together, per byte of weights that train.
        update_ns_per_byte: nanoseconds of the optimizer's update, per byte of weights that train.
        send: the link between two ranks of a node.
        reduction: costs of a sum of gradients over ``num_ranks`` ranks, by bytes of gradients.
        num_ranks: number of ranks of the job.
        overlap: the part of the last micro-batch's backward that can hide a sum of gradients, 0 to 1.
        contention: the time of work while all ranks are busy, divided by its time on one rank alone. It is above 1
            where ranks share cores. All other costs were measured with all ranks busy.
        recompute: mode of recomputation, one of ``adapter.MODES``.
        between: the link from a node to the others, shared by all sums of gradients; None on a single node.
        read: the link from a rank to the memory of its cache; None if reads are not counted.
        receives_late: whether a message moves only when its receiver asks for it, right before its work. Note: so it is
            between CPUs, where torch's schedules wait for each receive. On GPUs, receives are posted far ahead.
        keeps_boundaries: whether stages keep all that they send and receive, as torch did before 2.15
            (``adapter.behaviour``).
        parked_from: the first unit whose optimizer state stays while it is frozen; None if no unit's does.
        trained_bytes: bytes of those weights of each unit that train while it does [num_units]; None for all.
        resting_bytes: bytes of the weights of each unit while it is frozen [num_units]; None for ``parameter_bytes``.
        summed_bytes: bytes of the gradients of each unit that are summed over replicas where each updates all weights
            [num_units]: without tables of which few rows are; None for ``gradient_bytes``.
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
    parked_from: int | None = None
    trained_bytes: tuple[int, ...] | None = None
    resting_bytes: tuple[int, ...] | None = None
    summed_bytes: tuple[int, ...] | None = None

    @property
    def gradient_bytes(self) -> tuple[int, ...]:
        """Bytes of the gradients of each unit [num_units]: of those of its weights that train."""
        return self.parameter_bytes if self.trained_bytes is None else self.trained_bytes

    @property
    def kept_bytes(self) -> tuple[int, ...]:
        """Bytes of the weights of each unit while it is frozen [num_units]."""
        return self.parameter_bytes if self.resting_bytes is None else self.resting_bytes

    def woken_bytes(self, unit: int) -> int:
        """Bytes of a copy of the weights of a frozen unit for the time of its forward, where it rests."""
        return self.parameter_bytes[unit] if self.kept_bytes[unit] < self.parameter_bytes[unit] else 0

    def trained_from(self, unit: int) -> JobCosts:
        """The costs once the weights of all units from ``unit`` on were trained: they do not rest when they freeze."""
        rest = (*self.kept_bytes[:unit], *self.parameter_bytes[unit:])
        return replace(self, resting_bytes=rest)

    def with_disk(self, ns_per_byte: float) -> JobCosts:
        """The costs where a byte of the cache takes so many nanoseconds longer to be read."""
        read = self.read
        return self if read is None else replace(self, read=Link(read.latency_ns, read.ns_per_byte + ns_per_byte))

    @property
    def lasting_bytes(self) -> tuple[int, ...]:
        """Bytes of weights and optimizer state of each unit [num_units], without gradients."""
        fixed = map(operator.sub, self.parameter_bytes, self.gradient_bytes)
        return tuple(own + round(trained * self.optimizer_factor) for own, trained in zip(fixed, self.gradient_bytes))

    def frozen_bytes(self, first_active: int, *, keeps_prefix: bool = True, replicas: int = 1) -> int:
        """Bytes of the weights of all units before ``first_active``, and of the optimizer state that stays.

        Args:
            keeps_prefix: whether the weights are there.
            replicas: those that share out the optimizer state.
        """
        parked = slice(first_active if self.parked_from is None else self.parked_from, first_active)
        state = sum(self.lasting_bytes[parked]) - sum(self.parameter_bytes[parked])
        return keeps_prefix * sum(self.kept_bytes[:first_active]) + -(-state // replicas)

    def recomputed_share(self, num_microbatches: int) -> float:
        """The share of a step's micro-batches whose activations are recomputed, 0 to 1."""
        if self.recompute == "never":
            return 0.0
        return (num_microbatches - (self.recompute == "except_last")) / num_microbatches

    def unit_costs(self, rows: int) -> UnitCosts:
        """The costs of micro-batches of ``rows`` rows, as measured; else times on the line through the nearest measured
        numbers of rows on both sides, and bytes in proportion to the nearest.

        Note: in proportion, small micro-batches would seem to take no time beside that of their rows.
        """
        if rows in self.by_rows:
            return self.by_rows[rows]
        fewer, more = (sorted(have for have in self.by_rows if (have > rows) == above) for above in (False, True))
        near = [*fewer[-1:], *more[:1]] if fewer and more else [*fewer[-2:], *more[:2]]
        nearest = self.by_rows[min(near, key=lambda have: (abs(have - rows), have))]
        times = _on_line(rows, {have: self.by_rows[have] for have in near}, names=_TIMES)
        return replace(nearest.scaled(rows), **times)

    def busy_factors(self, pp: int) -> tuple[float, ...] | None:
        """The time of work, divided by its cost, while 1, 2, ... ``pp`` ranks of each pipeline are busy [pp].

        It grows linearly with the number of busy ranks, up to 1 for all. None where ranks do not share cores.
        """
        if self.contention <= 1.0 or self.num_ranks == 1:
            return None
        alone = 1 / self.num_ranks
        return tuple(
            (1 + (self.contention - 1) * max(0.0, k / pp - alone) / (1 - alone)) / self.contention
            for k in range(1, pp + 1)
        )

    def reduction_ns(self, num_bytes: int, *, num_replicas: int) -> int:
        """Nanoseconds of a sum of ``num_bytes`` of gradients over d = ``num_replicas`` ranks.

        A ring moves 2 (d - 1) / d of the bytes (Patarasuk & Yuan, "Bandwidth optimal all-reduce algorithms", 2009).
        A pipeline never spans two nodes, so that on several nodes every ring crosses all of them. The rings of all
        stages share the link between nodes: together they take at least the time of their bytes on this link.
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
        """The costs of the same devices and links in a job of another size: sums over all ranks need other rings."""
        if num_ranks == self.num_ranks or self.num_ranks == 1:
            return self
        longer = ((num_ranks - 1) / num_ranks) / ((self.num_ranks - 1) / self.num_ranks)
        reduction = Link(self.reduction.latency_ns, self.reduction.ns_per_byte * longer)
        return replace(self, num_ranks=num_ranks, reduction=reduction)


def total(column: Sequence[int], units: range) -> int:
    """The sum of a column of ``UnitCosts`` over ``units``."""
    return sum(column[units.start : units.stop])


def line(length: int, measured: Mapping[int, float]) -> float:
    """The cost at ``length``, from those at one or two measured lengths: linear, or proportional from a single one.

    Below the shorter length, a cost shrinks at most in proportion, so that noise cannot make it negative.
    """
    (short, least), *more = sorted(measured.items())
    proportional = least / short
    slope = max(0.0, (more[0][1] - least) / (more[0][0] - short)) if more else proportional
    return least + (length - short) * (slope if length > short else min(slope, proportional))


def at_length(length: int, measured: Mapping[int, UnitCosts]) -> UnitCosts:
    """Unit costs at ``length``, from those at one or two measured lengths with the same number of rows."""
    if length in measured:
        return measured[length]
    return replace(next(iter(measured.values())), length=length, **_on_line(length, measured, names=_PER_UNIT))


def _on_line(at: int, measured: Mapping[int, UnitCosts], *, names: Iterable[str]) -> dict[str, Any]:
    """Columns of the costs at a length, or number of rows, by those measured at one or two others."""

    def column(name: str) -> tuple[int, ...]:
        columns = zip(*(getattr(costs, name) for costs in measured.values()), strict=True)
        return tuple(round(line(at, dict(zip(measured, values)))) for values in columns)

    return {name: column(name) for name in names}
