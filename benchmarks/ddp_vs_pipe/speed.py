"""The speed table: largest batches, and rounds at one batch, of DDP, our plans and pipelines, all with M too."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

import torch

from benchmarks.ddp_vs_pipe.fresh_ranks import OutOfMemory
from benchmarks.ddp_vs_pipe.methods import Bench, Method
from benchmarks.ddp_vs_pipe.report import DDP, Line, speed_table
from benchmarks.ddp_vs_pipe.scales import CONFIG, Scale, Shape, kind_of_device, where
from benchmarks.ddp_vs_pipe.trials import Trial, measure_costs
from pipetransformer.config import load_config
from pipetransformer.pipe.planner.constraints import Constraints
from pipetransformer.pipe.planner.costs import JobCosts
from pipetransformer.pipe.planner.search import best_plans
from pipetransformer.plan import ParallelPlan

__all__ = ["chunks_of", "step_of", "tell_speed"]

OUR_PLAN, PIPE = "our plan, pp 1", "Pipe+DDP"
CHUNKS = {3: (4,), 4: (8,)}
"""Of the original by ranks of a machine; other pipelines are tried with both."""
STEP_ROWS = 4
"""Batches are tried in steps of so many samples a rank: the original's are 4 (DDP) and about 3 to 5 (Pipe) apart."""
DDP_BUCKETS_MB = (1, 8, 25)
"""Of which the fastest is DDP's setting; 25 is torch's default."""
TUNING_ROUNDS, TUNING_ROWS = 3, 16
"""Rounds of that, at about so many samples a rank."""


def chunks_of(shape: Shape, given: Sequence[int] | None) -> tuple[int, ...]:
    if given:
        return tuple(dict.fromkeys(given))
    usual = CHUNKS.get(shape.ranks_per_node, (4, 8))
    return tuple(m for m in usual if m >= shape.ranks_per_node) or (2 * shape.ranks_per_node,)


def step_of(shape: Shape, num_microbatches: int) -> int:
    """The same for data parallelism and for a pipeline of so many micro-batches: neither is tried more finely."""
    return math.lcm(STEP_ROWS * shape.world_size, shape.world_size * num_microbatches)


def methods_of(bench: Bench, shape: Shape, chunks: Sequence[int], scale: Scale) -> list[Method]:
    """DDP and ours without a pipeline, at M 1 and each other M, and a pipeline for each, cut for its smallest batch."""
    config, dp = load_config(CONFIG, scale.job), shape.world_size
    methods = []
    for name, bucket_mb in ((DDP, DDP_BUCKETS_MB[-1]), (OUR_PLAN, None)):
        for m in (1, *chunks):
            plan = ParallelPlan(0, 1, dp, (), m, "1f1b", None, scale.num_blocks)
            step = step_of(shape, m)
            methods.append(Method(name, Trial(config, plan, bucket_mb, batch=step, steps=scale.steps), step))
    trial = methods[-1].trial
    for m in chunks:
        step = step_of(shape, m)
        methods.append(cut_for(bench, trial, shape, m, step=step, batch=step))
    return methods


def cut_for(bench: Bench, trial: Trial, shape: Shape, m: int, *, step: int, batch: int) -> Method:
    """The pipeline as the planner cuts it, by costs that are measured here of the micro-batches of ``batch``."""
    num_blocks = trial.plan.num_blocks
    shaped = ParallelPlan(0, 1, shape.nodes, (), m, "1f1b", None, num_blocks)  # says how many rows a micro-batch has
    measured = replace(trial, plan=shaped, batch=batch)
    (costs, *_) = bench.ranks.run(measure_costs, measured, num_ranks=shape.world_size)
    plan, bubble = planned(costs, shape, m, batch=batch, num_blocks=num_blocks)
    return Method(PIPE, replace(trial, plan=plan, ddp_bucket_mb=None, batch=batch), step, bubble)


def recut(bench: Bench, method: Method, shape: Shape, *, batch: int) -> Method:
    """A pipeline as it is cut for ``batch``; any other method is the same at every batch."""
    plan = method.trial.plan
    if plan.pp == 1 or batch in (0, method.trial.batch):
        return method
    try:
        return cut_for(bench, method.trial, shape, plan.num_microbatches, step=method.step, batch=batch)
    except OutOfMemory:  # units are timed with the whole model on every rank
        return method


def largest_of(bench: Bench, method: Method, shape: Shape, *, most: int) -> tuple[Method, int, int | None]:
    """The method at its largest batch, cut for that, and the smallest batch that was tried and does not fit."""
    batch, too_large = bench.largest(method, most=most)
    found = recut(bench, method, shape, batch=batch)
    if found.trial.plan != method.trial.plan:  # its stages hold otherwise much
        batch, too_large = bench.largest(found, most=most)
    elif found is not method:
        bench.same(found, method)
    return found, batch, too_large


def planned(costs: JobCosts, shape: Shape, m: int, *, batch: int, num_blocks: int) -> tuple[ParallelPlan, float]:
    """The planner's cut into pipelines of a machine's ranks, and the share of a step in which they wait."""
    constraints = Constraints(
        world_size=shape.world_size, global_batch_size=batch, schedules=(("1f1b", 1),), num_microbatches=m,
        pipeline_lengths=(shape.ranks_per_node,), memory_limit=None,
    )  # fmt: skip
    best, *_ = best_plans(0, cached=None, costs=costs, constraints=constraints, num_blocks=num_blocks, lines={})
    return best.plan, best.bubble


def tell_speed(bench: Bench, shape: Shape, arguments: argparse.Namespace, scale: Scale, *, budget: int | None) -> None:
    """``budget``: bytes of a rank; None where the GPU says what it holds."""
    methods = methods_of(bench, shape, chunks_of(shape, arguments.chunks), scale)
    most = arguments.largest_batch or scale.most_rows * shape.world_size
    common = math.lcm(*(method.step for method in methods))
    bucket_mb = fastest_bucket(
        bench,
        methods[0],
        batch=common * max(1, TUNING_ROWS * shape.world_size // common),
        repeats=min(TUNING_ROUNDS, arguments.repeats),
    )
    for number, method in enumerate(methods):
        if method.name == DDP:
            methods[number] = replace(method, trial=replace(method.trial, ddp_bucket_mb=bucket_mb))
    largest = [largest_of(bench, method, shape, most=most) for method in methods]
    equal = max(common, min(batch for _, batch, _ in largest) // common * common)
    at_largest = [(method, batch) for method, batch, _ in largest if batch]
    at_equal = [(recut(bench, method, shape, batch=equal), equal) for method, _, _ in largest]
    for method, batch in at_equal:
        bench.peak(method, batch)
    entries = dict.fromkeys([*at_largest, *at_equal])
    rates = bench.rates([entry for entry in entries if bench.holds(*entry)], repeats=arguments.repeats)

    def line(block: str, method: Method, batch: int, *, fits: bool) -> Line:
        return Line(
            block, method.name, method.chunks, method.bubble, replicas=method.trial.plan.dp, batch=batch, fits=fits,
            peak_bytes=bench.peaks.get((method, batch)), images_per_second=tuple(rates.get((method, batch), ())),
        )  # fmt: skip

    lines = []
    for method, batch, too_large in largest:
        lines += [line("largest", method, too_large, fits=False)] if too_large is not None else []
        lines += [line("largest", method, batch, fits=True)] if batch else []
    lines += [line("equal", method, batch, fits=bench.holds(method, batch)) for method, batch in at_equal]
    speed_table(
        lines,
        shape=shape,
        device=kind_of_device(),
        scale=arguments.scale,
        folder=arguments.output,
        notes=[
            *memory_notes(budget, most=most),
            ddp_note(bucket_mb),
            where(shape),
            plans_note(at_largest, at_equal),
        ],
    )


def fastest_bucket(bench: Bench, ddp: Method, *, batch: int, repeats: int) -> int:
    """DDP's buckets that are fastest at this batch, in MB."""
    found = {size: replace(ddp, trial=replace(ddp.trial, ddp_bucket_mb=size)) for size in DDP_BUCKETS_MB}
    rates = bench.rates([(candidate, batch) for candidate in found.values()], repeats=repeats)
    return max(found, key=lambda size: median(rates[found[size], batch]))


def memory_notes(budget: int | None, *, most: int) -> list[str]:
    ends = f"Batches above {most:,} are not tried."
    if budget is None:
        return [f"MB a rank: the GPU's peak in a step. Out of memory is the GPU's own error. {ends}"]
    return [
        "MB a rank: the peak of the fullest rank in its first steps, over what it held without the model "
        f"({'on the GPU' if torch.cuda.is_available() else 'resident memory of its process'}). Out of memory is a peak "
        f"above the budget of {budget / 1e6:,.0f} MB (--memory-per-rank): nothing failed. {ends}",
    ]


def ddp_note(bucket_mb: int) -> str:
    tried = ", ".join(map(str, DDP_BUCKETS_MB))
    return (
        f"DDP: gradient_as_bucket_view, buckets of {bucket_mb} MB (the fastest of {tried} at M 1), static_graph; with "
        "M micro-batches no_sync for all but the last, without static_graph. All methods have the same optimizer, data "
        "and loss."
    )


def plans_note(at_largest: Sequence[tuple[Method, int]], at_equal: Sequence[tuple[Method, int]]) -> str:
    cuts = ", ".join(
        f"M {method.chunks} at {batch:,} before units {list(method.trial.plan.boundaries)} (costs of "
        f"{method.trial.batch:,})"
        for method, batch in dict.fromkeys([*at_largest, *at_equal])
        if method.name == PIPE
    )
    return (
        "The planner cuts each row's batch, by costs measured of its micro-batches (0 is the stem, then the blocks): "
        f"{cuts}. Schedule: 1F1B, no recomputation."
    )
