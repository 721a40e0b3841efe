"""DDP beside Pipe+DDP, as PipeTransformer tabled it: largest batch, memory, images/s; and its all-frozen probe.

    pipetransformer bench ddp-vs-pipe [--tables speed frozen state] [--scale small|full] [--ranks-per-node 3 4]

Published: the notes on experiments in PipeTransformer's repository, Distributed-AI/PipeTransformer (He et al., ICML
2021): pipelines of 3 and of 4 GPUs on 2 machines. Here all ranks are on this machine. DDP is torch's own at its best
settings, "our plan" the trainer's own data parallelism, and Pipe+DDP the trainer's pipelines (1F1B) as its planner cuts
them, by costs of the micro-batches that they then run. A batch is cut into micro-batches without a pipeline too. Every
figure of memory is one of fresh ranks; a timed round is one job of fresh ranks, in which the rows take turns.

``speed``: a table for each length of pipelines. ``frozen``: the probe. ``state``: what a pipeline saves in weights,
gradients and moments, at one batch.
"""

from __future__ import annotations

import argparse
import sys

import torch

from benchmarks.ddp_vs_pipe.fresh_ranks import FreshRanks
from benchmarks.ddp_vs_pipe.frozen import tell_frozen
from benchmarks.ddp_vs_pipe.methods import Bench
from benchmarks.ddp_vs_pipe.scales import SCALES, Scale, Shape
from benchmarks.ddp_vs_pipe.speed import chunks_of, step_of, tell_speed
from benchmarks.ddp_vs_pipe.state import tell_state
from benchmarks.support.command_line import add_output, bench_parser
from pipetransformer.config.quantities import parse_num_bytes
from pipetransformer.errors import UserError
from pipetransformer.launch.arguments import count
from pipetransformer.launch.entry import run_guarded

TABLES = ("speed", "frozen", "state")
RANKS_PER_NODE = (3, 4)
"""The original's."""


def main() -> None:
    parser = bench_parser("ddp-vs-pipe", description=__doc__)
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--tables", choices=TABLES, nargs="+", default=TABLES, help="all without it")
    parser.add_argument("--scale", choices=SCALES, default="full" if on_gpu else "small", help="sizes of the model")
    parser.add_argument(
        "--ranks-per-node", type=count, nargs="+", default=RANKS_PER_NODE, metavar="N", help="lengths of pipelines"
    )
    parser.add_argument("--nodes", type=count, default=2, help="simulated machines, each one pipeline")
    parser.add_argument("--chunks", type=count, nargs="+", metavar="M", help="the original's without it")
    parser.add_argument("--memory-per-rank", type=num_bytes, help='such as "150 MB"; a GPU says itself what it holds')
    parser.add_argument("--largest-batch", type=count, help="no larger global batch is tried")
    parser.add_argument("--repeats", type=count, default=5, help="timed rounds over all rows (default 5)")
    add_output(parser)
    arguments = parser.parse_args()
    scale = SCALES[arguments.scale]
    shapes = [Shape(length, arguments.nodes) for length in arguments.ranks_per_node]
    for shape in shapes:
        check(shape, arguments, scale)
    budget = arguments.memory_per_rank or (None if on_gpu else parse_num_bytes(scale.memory))
    with FreshRanks.ready(timeout_seconds=scale.timeout_seconds) as ranks:
        told = {"scale_name": arguments.scale, "folder": arguments.output}
        if "speed" in arguments.tables:
            bench = Bench(ranks, budget or torch.cuda.get_device_properties(0).total_memory)
            for shape in shapes:
                tell_speed(bench, shape, arguments, scale, budget=budget)
        if "frozen" in arguments.tables:
            tell_frozen(ranks, shapes[0], scale, repeats=arguments.repeats, **told)
        if "state" in arguments.tables:
            tell_state(ranks, scale, **told)


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
    chunks = chunks_of(shape, arguments.chunks)
    for m in chunks:
        if m < shape.ranks_per_node:
            raise UserError(f"--chunks: {m} do not fill a pipeline of {shape.ranks_per_node}; give at least as many")
    largest = arguments.largest_batch
    step = max(step_of(shape, m) for m in chunks)
    if largest is not None and largest < step:
        raise UserError(f"--largest-batch: {largest} is less than one step of {step}; give at least {step}")
    num_gpus = torch.cuda.device_count()
    if torch.cuda.is_available() and num_gpus < shape.world_size:
        raise UserError(
            f"--ranks-per-node: {shape} ranks need as many GPUs and this machine has {num_gpus}; give fewer, or set "
            "CUDA_VISIBLE_DEVICES= to run on the CPU"
        )


if __name__ == "__main__":
    sys.exit(run_guarded(main))
