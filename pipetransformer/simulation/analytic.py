"""Costs of a transformer on hardware that is not there, counted instead of measured.

A matrix product of [n, k] and [k, m] takes 2 n k m operations; a block of width d on t tokens takes 24 t d^2 in its
four projections and its MLP of width 4 d, and 4 t^2 d in attention; a backward takes twice its forward (one product for
inputs, one for weights). Source: Narayanan et al., arXiv 2104.04473, appendix; Korthikanti et al., arXiv 2205.05198,
section 4, for the bytes that a block keeps.
"""

from __future__ import annotations

from math import ceil

from pipetransformer.pipe.planner.costs import JobCosts, Link, UnitCosts
from pipetransformer.simulation.schema import SimulationConfig


def costs_of(config: SimulationConfig) -> JobCosts:
    """The planner's costs of the model on the cluster, of micro-batches of one rank's share of a batch.

    Other sizes are in proportion.
    """
    model, cluster, num_ranks = config.model, config.cluster, config.world_size
    rows = ceil(config.train.batch_size / num_ranks)
    inside = cluster.inside.link()
    between = cluster.between.link() if cluster.between is not None and cluster.nodes > 1 else None
    optimizer_factor = 1.0 + config.train.optimizer_state
    block = 12 * model.width**2 + 13 * model.width
    parameters = (model.stem_parameters, *[block] * model.blocks, model.head_parameters)
    slowest = max(inside.ns_per_byte, between.ns_per_byte if between is not None else 0.0)
    ring = 2 * (num_ranks - 1) / num_ranks
    return JobCosts(
        by_rows={rows: _unit_costs(config, rows=rows)},
        parameter_bytes=tuple(cluster.bytes_per_number * n for n in parameters),
        optimizer_factor=optimizer_factor,
        # Read weight, gradient and state, write weight and state.
        update_ns_per_byte=(3 + 2 * (optimizer_factor - 1)) / cluster.memory_bytes_per_second * 1e9,
        send=inside,
        reduction=Link((between or inside).latency_ns, ring * slowest),
        num_ranks=num_ranks,
        overlap=cluster.overlap,
        between=between,
        read=cluster.host.link(),
    )


def _unit_costs(config: SimulationConfig, *, rows: int) -> UnitCosts:
    """Costs of every unit for ``rows`` samples: the stem, a unit a block, the head."""
    model, number = config.model, config.cluster.bytes_per_number
    t, d = model.tokens, model.width
    block_operations = 24 * t * d**2 + 4 * t**2 * d
    operations = [model.stem_operations, *[block_operations] * model.blocks, 2 * model.head_parameters]
    forward = tuple(round(rows * n / config.cluster.operations_per_second * 1e9) for n in operations)
    # 34 t d bytes and 5 t^2 heads at 2 bytes a number; masks of dropout are a byte whatever the type.
    kept = number * t * d * 17 + number * t**2 * model.heads * 5 // 2
    hidden = number * t * d
    half_done = 11 * hidden  # gradients at the results of two norms and four projections: 2, 3, 1, 4 and 1
    working = 9 * hidden  # the MLP's two widest tensors, four times the width each, and what leaves or enters
    backward = tuple(2 * n for n in forward)

    def by_unit(block: int, *, stem: int = hidden) -> tuple[int, ...]:
        return (rows * stem, *[rows * block] * model.blocks, rows * hidden)

    return UnitCosts(
        rows=rows,
        length=t,
        forward_ns=forward,
        backward_ns=backward,
        activation_bytes=by_unit(kept),
        boundary_bytes=(*by_unit(hidden)[:-1], rows * number),
        prefix_ns=forward,
        weight_ns=forward,
        recompute_ns=(0,) * len(forward),
        kept_bytes=by_unit(kept),
        entering_bytes=by_unit(hidden),
        working_bytes=by_unit(working),
        prefix_bytes=by_unit(working),
        between_bytes=by_unit(half_done, stem=0),
    )
