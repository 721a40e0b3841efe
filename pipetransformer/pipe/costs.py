"""Measured costs of a model's units: what AutoPipe plans with. Plain integers, the same on every rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["JobCosts", "UnitCosts", "at_length", "line"]


@dataclass(frozen=True, slots=True)
class UnitCosts:
    """Costs of every unit for one micro-batch shape.

    Attributes:
        rows, length: the micro-batch: samples and padded length.
        forward_ns, backward_ns: one forward, one backward (gradients of inputs and weights), medians.
        prefix_ns: one forward of the frozen unit: eval mode, no graph.
        activation_bytes: what autograd keeps of one micro-batch for the backward.
        boundary_bytes: what leaves the unit to the next one.
    """

    rows: int
    length: int
    forward_ns: tuple[int, ...]
    backward_ns: tuple[int, ...]
    activation_bytes: tuple[int, ...]
    boundary_bytes: tuple[int, ...]
    prefix_ns: tuple[int, ...]

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
        by_rows: unit costs by rows of a micro-batch, at the padded length that most samples have.
        parameter_bytes: weights of each unit. optimizer_factor: optimizer and gradient bytes per weight byte.
        reduce_ns_per_byte: all-reduce over the world, per byte of gradient.
        update_ns_per_byte: optimizer step, per byte of weight.
        send_ns_per_byte, send_latency_ns: one neighbour send.
    """

    by_rows: Mapping[int, UnitCosts]
    parameter_bytes: tuple[int, ...]
    optimizer_factor: float
    reduce_ns_per_byte: float
    update_ns_per_byte: float
    send_ns_per_byte: float
    send_latency_ns: int


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

    names = ("forward_ns", "backward_ns", "activation_bytes", "boundary_bytes", "prefix_ns")
    return UnitCosts(next(iter(measured.values())).rows, length, **{name: column(name) for name in names})
