"""DDP beside Pipe+DDP, as PipeTransformer tabled it: largest batch, memory, images/s; and its all-frozen probe.

    pipetransformer bench ddp-vs-pipe [--scale small|full] [--ranks-per-node 2] [--nodes 2] [--repeats 7]

Published: the notes on experiments in PipeTransformer's repository, Distributed-AI/PipeTransformer (He et al., ICML
2021): pipelines of 3 and of 4 GPUs on 2 machines. Here all ranks are on this machine. DDP is torch's own at its best
settings, "our plan" the trainer's own data parallelism, and Pipe+DDP the trainer's pipelines (1F1B) as its planner cuts
them, by costs of the micro-batches that they then run. Every figure is one of fresh ranks; those of a table take turns,
round by round.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch

from benchmarks.ddp_vs_pipe.fresh_ranks import FreshRanks, OutOfMemory
from benchmarks.ddp_vs_pipe.methods import Bench, Method
from benchmarks.ddp_vs_pipe.report import DDP, Frozen, Line, Shape, probe_table, speed_table
from benchmarks.ddp_vs_pipe.trials import Probe, Trial, measure_costs, probe_frozen
from benchmarks.support.command_line import add_output, bench_parser
from benchmarks.support.measure import CONFIGS
from pipetransformer.config import load_config
from pipetransformer.config.quantities import parse_num_bytes
from pipetransformer.errors import UserError
from pipetransformer.launch.arguments import count
from pipetransformer.launch.entry import run_guarded
from pipetransformer.pipe.planner.constraints import Constraints
from pipetransformer.pipe.planner.costs import JobCosts
from pipetransformer.pipe.planner.search import best_plans
from pipetransformer.plan import ParallelPlan

CONFIG = CONFIGS / "train_config_digits_no_freeze.yaml"
OUR_PLAN, PIPE = "our plan, pp 1", "Pipe+DDP"
CHUNKS = {3: (4,), 4: (8,)}
"""Of the original by ranks of a machine; other pipelines are tried with both."""
STEP_ROWS = 4
"""Batches are tried in steps of so many samples a rank: the original's are 4 (DDP) and about 3 to 5 (Pipe) apart."""
DDP_BUCKETS_MB = (1, 8, 25)
"""Of which the fastest is DDP's setting; 25 is torch's default."""
TUNING_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Scale:
    """The training that is measured.

    Attributes:
        job: overrides of ``CONFIG``. num_blocks: of its model. ranks_per_node: of each table.
        memory: of a rank, where no GPU sets the limit. most_rows: samples a rank beyond which no batch is tried.
        probed: batches of a machine, all blocks frozen. steps: in a measurement.
        timeout_seconds: of a measurement, the building of its model included.
    """

    job: tuple[str, ...]
    num_blocks: int
    ranks_per_node: tuple[int, ...]
    memory: str
    most_rows: int
    probed: tuple[int, ...]
    steps: int
    timeout_seconds: float


SCALES = {
    # 32 x 32 pictures in patches of 4: 65 tokens, 0.4 M parameters
    "small": Scale(
        job=("model.kwargs={patch_size: 4, embed_dim: 64, depth: 8, num_heads: 4}", "data.image_size=32"),
        num_blocks=8,
        ranks_per_node=(2,),
        memory="80 MB",
        most_rows=512,
        probed=(16, 80),
        steps=2,
        timeout_seconds=600.0,
    ),
    "full": Scale(
        job=(
            *("model.name=vit_base_patch16_224", "model.kwargs={in_chans: 3}", "data.image_size=224"),
            *("train.optimizer=sgd", "data.num_workers=2"),
        ),
        num_blocks=12,
        ranks_per_node=(3, 4),
        memory="16 GB",
        most_rows=4096,
        probed=(64, 320),
        steps=5,
        timeout_seconds=3600.0,
    ),
}


def main() -> None:
    parser = bench_parser("ddp-vs-pipe", description=__doc__)
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--scale", choices=SCALES, default="full" if on_gpu else "small", help="sizes of the model")
    parser.add_argument("--ranks-per-node", type=count, help="length of a pipeline; as the scale says without it")
    parser.add_argument("--nodes", type=count, default=2, help="simulated machines, each one pipeline")
    parser.add_argument("--chunks", type=count, nargs="+", metavar="M", help="the original's without it")
    parser.add_argument("--memory-per-rank", type=num_bytes, help='such as "150 MB"; a GPU says itself what it holds')
    parser.add_argument("--largest-batch", type=count, help="no larger global batch is tried")
    parser.add_argument("--repeats", type=count, default=7, help="timed rounds over all rows (default 7)")
    add_output(parser)
    arguments = parser.parse_args()
    scale = SCALES[arguments.scale]
    lengths = (arguments.ranks_per_node,) if arguments.ranks_per_node else scale.ranks_per_node
    shapes = [Shape(length, arguments.nodes) for length in lengths]
    for shape in shapes:
        check(shape, arguments, scale)
    memory = arguments.memory_per_rank or (None if on_gpu else parse_num_bytes(scale.memory))
    with FreshRanks.ready(timeout_seconds=scale.timeout_seconds) as ranks:
        bench = Bench(ranks, memory)
        for shape in shapes:
            tell_speed(bench, shape, arguments, scale)
        tell_frozen(bench, shapes[0], arguments, scale)


def num_bytes(text: str) -> int:
    try:
        number = parse_num_bytes(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f'{text} is not allowed; give a size such as "150 MB"')
    return number


def check(shape: Shape, arguments: argparse.Namespace, scale: Scale) -> None:
    """Raises UserError."""
    num_units = scale.num_blocks + 2
    if not 2 <= shape.ranks_per_node <= num_units:
        raise UserError(
            f"--ranks-per-node: a pipeline of {shape.ranks_per_node} is not allowed; give 2 to {num_units}, which are "
            "the model's stem, blocks and head"
        )
    for m in chunks_of(shape, arguments):
        if m < shape.ranks_per_node:
            raise UserError(f"--chunks: {m} do not fill a pipeline of {shape.ranks_per_node}; give at least as many")
    largest, step = arguments.largest_batch, max(step_of(shape, m) for m in chunks_of(shape, arguments))
    if largest is not None and largest < step:
        raise UserError(f"--largest-batch: {largest} is less than one step of {step}; give at least {step}")
    num_gpus = torch.cuda.device_count()
    if torch.cuda.is_available() and num_gpus < shape.world_size:
        raise UserError(
            f"--ranks-per-node: {shape} ranks need as many GPUs and this machine has {num_gpus}; give fewer, or set "
            "CUDA_VISIBLE_DEVICES= to run on the CPU"
        )


def chunks_of(shape: Shape, arguments: argparse.Namespace) -> tuple[int, ...]:
    if arguments.chunks:
        return tuple(dict.fromkeys(arguments.chunks))
    usual = CHUNKS.get(shape.ranks_per_node, (4, 8))
    return tuple(m for m in usual if m >= shape.ranks_per_node) or (2 * shape.ranks_per_node,)


def step_of(shape: Shape, num_microbatches: int) -> int:
    return math.lcm(STEP_ROWS * shape.world_size, shape.nodes * num_microbatches)


def methods_of(bench: Bench, shape: Shape, arguments: argparse.Namespace, scale: Scale) -> list[Method]:
    """DDP, ours without a pipeline, and a pipeline for every M, cut for its smallest batch."""
    config = load_config(CONFIG, scale.job)
    together = ParallelPlan(0, 1, shape.world_size, (), 1, "1f1b", None, scale.num_blocks)
    trial = Trial(config, together, ddp_bucket_mb=None, batch=STEP_ROWS * shape.world_size, steps=scale.steps)
    ddp = replace(trial, ddp_bucket_mb=DDP_BUCKETS_MB[-1])
    pipes = [
        cut_for(bench, trial, shape, m, step=step_of(shape, m), batch=step_of(shape, m))
        for m in chunks_of(shape, arguments)
    ]
    return [Method(DDP, ddp, trial.batch), Method(OUR_PLAN, trial, trial.batch), *pipes]


def cut_for(bench: Bench, trial: Trial, shape: Shape, m: int, *, step: int, batch: int) -> Method:
    """The pipeline as the planner cuts it, by costs that are measured here of the micro-batches of ``batch``."""
    num_blocks = trial.plan.num_blocks
    shaped = ParallelPlan(0, 1, shape.nodes, (), m, "1f1b", None, num_blocks)  # says how many rows a micro-batch has
    measured = replace(trial, plan=shaped, batch=batch)
    (costs, *_) = bench.ranks.run(measure_costs, measured, num_ranks=shape.world_size)
    plan, bubble = planned(costs, shape, m, batch=batch, num_blocks=num_blocks)
    return Method(PIPE, replace(trial, plan=plan, batch=batch), step, bubble)


def recut(bench: Bench, method: Method, shape: Shape, *, batch: int) -> Method:
    """A pipeline as it is cut for ``batch``; any other method is the same at every batch."""
    if method.chunks is None or batch in (0, method.trial.batch):
        return method
    try:
        return cut_for(bench, method.trial, shape, method.chunks, step=method.step, batch=batch)
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
    best, *_ = best_plans(0, cached=None, costs=costs, constraints=constraints, num_blocks=num_blocks, corrections={})
    return best.plan, best.bubble


def tell_speed(bench: Bench, shape: Shape, arguments: argparse.Namespace, scale: Scale) -> None:
    methods = methods_of(bench, shape, arguments, scale)
    most = arguments.largest_batch or scale.most_rows * shape.world_size
    largest = [largest_of(bench, method, shape, most=most) for method in methods]
    common = math.lcm(*(method.step for method in methods))
    equal = max(common, min(batch for _, batch, _ in largest) // common * common)
    ddp, bucket_mb = tuned(bench, methods[0], batch=equal, repeats=min(TUNING_ROUNDS, arguments.repeats))
    if ddp.trial != methods[0].trial:
        largest[0] = largest_of(bench, ddp, shape, most=most)  # its buckets are part of its memory
    at_largest = [(method, batch) for method, batch, _ in largest if batch]
    at_equal = [(recut(bench, method, shape, batch=equal), equal) for method, _, _ in largest]
    rates = bench.rates([*dict.fromkeys([*at_largest, *at_equal])], repeats=arguments.repeats)

    def line(block: str, method: Method, batch: int, *, fits: bool) -> Line:
        return Line(
            block, method.name, method.chunks, method.bubble, replicas=method.trial.plan.dp, batch=batch, fits=fits,
            peak_bytes=bench.peaks.get((method, batch)),
            images_per_second=tuple(rates.get((method, batch), ())) if fits else (),
        )  # fmt: skip

    lines = []
    for method, batch, too_large in largest:
        lines += [line("largest", method, too_large, fits=False)] if too_large is not None else []
        lines += [line("largest", method, batch, fits=True)] if batch else []
    lines += [
        line("equal", method, batch, fits=(method, batch) in rates and bench.holds(method, batch))
        for method, batch in at_equal
    ]
    speed_table(
        lines,
        shape=shape,
        device=device_name(),
        scale=arguments.scale,
        folder=arguments.output,
        notes=[
            *memory_notes(bench.memory, most=most),
            ddp_note(bucket_mb),
            where(shape),
            plans_note(at_largest, at_equal),
        ],
    )


def tuned(bench: Bench, ddp: Method, *, batch: int, repeats: int) -> tuple[Method, int]:
    """DDP with the buckets that are fastest at this batch."""
    candidates = [replace(ddp, trial=replace(ddp.trial, ddp_bucket_mb=bucket_mb)) for bucket_mb in DDP_BUCKETS_MB]
    rates = bench.rates([(candidate, batch) for candidate in candidates], repeats=repeats)
    best = max(candidates, key=lambda candidate: median(rates.get((candidate, batch), (0.0,))))
    assert best.trial.ddp_bucket_mb is not None
    return best, best.trial.ddp_bucket_mb


def tell_frozen(bench: Bench, shape: Shape, arguments: argparse.Namespace, scale: Scale) -> None:
    num_blocks, found = scale.num_blocks, dict[tuple[int, str], list[Probe]]()
    for number in range(arguments.repeats):
        for batch in scale.probed:
            for prefix, cached in (("computed", None), ("cached", num_blocks)):
                plan = ParallelPlan(num_blocks, 1, shape.world_size, (), 1, "1f1b", cached, num_blocks)
                trial = Trial(load_config(CONFIG, scale.job), plan, None, batch * shape.nodes, scale.steps)
                probes = bench.ranks.run(probe_frozen, trial, num_ranks=shape.world_size)
                found.setdefault((batch, prefix), []).append(probes[0])
        print(f"all blocks frozen, round {number + 1} of {arguments.repeats}", flush=True)
    rows = [
        Frozen(
            batch,
            batch * shape.nodes,
            prefix,
            seconds=tuple(probe.seconds for probe in probes),
            data=tuple(probe.data for probe in probes),
            forward=tuple(probe.forward for probe in probes),
            backward=tuple(probe.backward for probe in probes),
            reduced_bytes=probes[0].reduced_bytes,
        )
        for (batch, prefix), probes in found.items()
    ]
    probe_table(
        rows,
        shape=shape,
        device=device_name(),
        scale=arguments.scale,
        folder=arguments.output,
        notes=[where(shape)],
    )


def device_name() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def where(shape: Shape) -> str:
    return f"Machines are simulated: all {shape.world_size} ranks are on this one, one thread each."


def memory_notes(memory: int | None, *, most: int) -> list[str]:
    ends = f"Batches above {most:,} are not tried."
    if memory is None:
        return [f"MB a rank: the GPU's peak in a step. Out of memory is the GPU's own error. {ends}"]
    return [
        "MB a rank: the peak of the fullest rank in its first steps, over what it held without the model "
        f"({'on the GPU' if torch.cuda.is_available() else 'resident memory of its process'}). Out of memory is a peak "
        f"above the budget of {memory / 1e6:,.0f} MB (--memory-per-rank): nothing failed. {ends}",
    ]


def ddp_note(bucket_mb: int) -> str:
    tried = ", ".join(map(str, DDP_BUCKETS_MB))
    return (
        f"DDP: static_graph, gradient_as_bucket_view, buckets of {bucket_mb} MB (the fastest of "
        f"{tried} at the equal batch). All methods have the same optimizer, data and loss."
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


if __name__ == "__main__":
    sys.exit(run_guarded(main))
