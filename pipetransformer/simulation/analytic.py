"""Costs of a transformer on hardware that is not there, counted instead of measured.

A matrix product of [n, k] and [k, m] takes 2 n k m operations; a block of width d on t tokens takes 24 t d^2 in its
four projections and its MLP of width 4 d, and 4 t^2 d in attention; a backward takes twice its forward (one product for
inputs, one for weights). Source: Narayanan et al., arXiv 2104.04473, appendix; Korthikanti et al., arXiv 2205.05198,
section 4, for the bytes that a block keeps.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipetransformer.pipe.planner.costs import JobCosts, Link, UnitCosts


@dataclass(frozen=True, slots=True)
class TransformerShape:
    """Sizes of a model and its samples.

    Attributes:
        num_blocks: transformer blocks (L).
        width: width of the hidden states (d).
        num_tokens: tokens of a sample (t).
        num_heads: heads of attention.
        stem_parameters: parameters before the first block.
        head_parameters: parameters after the last block.
        stem_operations: operations of a sample's embedding (a patch embedding's products; 0 for a table).
    """

    num_blocks: int
    width: int
    num_tokens: int
    num_heads: int
    stem_parameters: int
    head_parameters: int
    stem_operations: int = 0


@dataclass(frozen=True, slots=True)
class Device:
    """A device that computes.

    Attributes:
        operations_per_second: operations that training really attains.
        bytes_per_second: bandwidth of its memory.
        bytes_per_number: bytes of a weight or activation.
    """

    operations_per_second: float
    bytes_per_second: float
    bytes_per_number: int = 4


def transformer_costs(
    shape: TransformerShape,
    device: Device,
    *,
    rows: int,
    num_ranks: int,
    inside: Link,
    between: Link | None,
    optimizer_factor: float,
    overlap: float,
) -> JobCosts:
    """Costs of micro-batches of ``rows`` samples; other sizes are in proportion.

    Args:
        rows: samples of a micro-batch.
        num_ranks: ranks of the job.
        inside: link between the ranks of a node.
        between: link between nodes; None: one node.
        optimizer_factor: bytes of weights and optimizer state per byte of weights.
        overlap: share of the last backward that can hide the sum of gradients.
    """
    parameters = (
        shape.stem_parameters,
        *[12 * shape.width**2 + 13 * shape.width] * shape.num_blocks,
        shape.head_parameters,
    )
    slowest = max(inside.ns_per_byte, between.ns_per_byte if between is not None else 0.0)
    ring = 2 * (num_ranks - 1) / num_ranks
    return JobCosts(
        by_rows={rows: _unit_costs(shape, device, rows=rows)},
        parameter_bytes=tuple(device.bytes_per_number * n for n in parameters),
        optimizer_factor=optimizer_factor,
        # Read weight, gradient and state, write weight and state.
        update_ns_per_byte=(3 + 2 * (optimizer_factor - 1)) / device.bytes_per_second * 1e9,
        send=inside,
        reduction=Link((between or inside).latency_ns, ring * slowest),
        num_ranks=num_ranks,
        overlap=overlap,
        between=between,
    )


def _unit_costs(shape: TransformerShape, device: Device, *, rows: int) -> UnitCosts:
    """Costs of every unit for ``rows`` samples: the stem, a unit a block, the head."""
    t, d = shape.num_tokens, shape.width
    block_operations = 24 * t * d**2 + 4 * t**2 * d
    operations = [shape.stem_operations, *[block_operations] * shape.num_blocks, 2 * shape.head_parameters]
    forward = tuple(round(rows * n / device.operations_per_second * 1e9) for n in operations)
    # 34 t d bytes and 5 t^2 heads at 2 bytes a number; masks of dropout are a byte whatever the type.
    kept = device.bytes_per_number * t * d * 17 + device.bytes_per_number * t**2 * shape.num_heads * 5 // 2
    hidden = device.bytes_per_number * t * d
    half_done = 11 * hidden  # gradients at the results of two norms and four projections: 2, 3, 1, 4 and 1
    working = 9 * hidden  # the MLP's two widest tensors, four times the width each, and what leaves or enters
    backward = tuple(2 * n for n in forward)
    activations = (rows * hidden, *[rows * kept] * shape.num_blocks, rows * hidden)
    return UnitCosts(
        rows=rows,
        length=t,
        forward_ns=forward,
        backward_ns=backward,
        activation_bytes=activations,
        boundary_bytes=(*[rows * hidden] * (shape.num_blocks + 1), rows * device.bytes_per_number),
        prefix_ns=forward,
        weight_ns=forward,
        recompute_ns=(0,) * len(forward),
        kept_bytes=activations,
        entering_bytes=(rows * hidden,) * len(forward),
        working_bytes=(rows * hidden, *[rows * working] * shape.num_blocks, rows * hidden),
        prefix_bytes=(rows * hidden, *[rows * working] * shape.num_blocks, rows * hidden),
        between_bytes=(0, *[rows * half_done] * shape.num_blocks, rows * hidden),
    )
