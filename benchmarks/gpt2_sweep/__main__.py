"""A GPT of 90 M parameters over K stages and M micro-batches, checkpointing off and on: ours beside torchgpipe.

    pip install -e ".[bench]"
    pipetransformer bench gpt2-sweep [--scale small|full|original] [--repeats 7] [--schedule gpipe|1f1b]
                                    [--stages 1,2,4] [--microbatches 1,2,4,8,16,32,64]
                                    [--checkpoint False,True] [--implementation ours,torchgpipe]

Both run the zoo's ``gpt2_90m`` from the same weights on the same batch of 64, cut before the same blocks, without an
optimizer step; first their gradients are compared, dropout off. Checkpointing "True" is torchgpipe's default in both,
``except_last``, so that M = 1 recomputes nothing. Ours is GPipe; ``--schedule 1f1b`` adds rows of 1F1B.

Ours has a rank for each stage, with one thread. torchgpipe has one process, on K GPUs or on K times "cpu"; there it has
one thread or K, whichever is faster. Rounds are interleaved; memory is measured behind the timed ones.

``--scale original`` has the published sweep's cells beside its figures on any machine: no storage is allocated and no
arithmetic done for its memory, and its times are simulated.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from copy import deepcopy
from functools import partial
from itertools import product
from multiprocessing import get_context
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.gpt2_sweep.growth import peak_growth
from benchmarks.gpt2_sweep.original import Original, read_published, write_original
from benchmarks.gpt2_sweep.pipes import Batch, Ours, Pipe, Torchgpipe, block_cuts, layers_of
from benchmarks.gpt2_sweep.report import Cell, Figures, Shape, Variants, write_sweep
from benchmarks.support.command_line import add_output, bench_parser, keep_whole, refuse_without_effect
from benchmarks.support.ranks import as_ranks
from benchmarks.support.torchgpipe import require_torchgpipe
from pipetransformer.errors import UserError
from pipetransformer.graphs.graph import Graph, trace
from pipetransformer.graphs.zoo import zoo_model
from pipetransformer.launch.arguments import count
from pipetransformer.launch.entry import run_guarded
from pipetransformer.process.collectives import slowest
from pipetransformer.process.world import World

MODEL, BATCH = "gpt2_90m", 64
STAGES, MICROBATCHES = (1, 2, 4), (1, 2, 4, 8, 16, 32, 64)
MODES, IMPLEMENTATIONS = ("False", "True"), ("ours", "torchgpipe")
SIZES: Mapping[str, Mapping[str, int]] = {
    "full": {"num_layers": 12, "width": 768, "num_heads": 12, "vocabulary_size": 3000, "sequence_length": 128},
    "small": {"num_layers": 8, "width": 128, "num_heads": 4, "vocabulary_size": 1000, "sequence_length": 32},
}
# Both add the same micro-batches, each over thousands of tokens, in another order: float32 keeps 1e-6 or so of the
# largest gradient. A micro-batch lost or counted twice would change 1 / M, 1.6 % at the least.
TOLERANCE = 1e-4


def main() -> None:
    arguments = parse()
    require_torchgpipe()
    check_arguments(arguments)
    if arguments.scale == "original":
        write_original(cells_of(arguments), sizes=SIZES["full"], batch_size=BATCH, folder=arguments.output)
        return
    as_ranks(__file__, partial(run, arguments=arguments), num_ranks=max(arguments.stages))


def parse() -> argparse.Namespace:
    parser = bench_parser("gpt2-sweep", description=__doc__)
    scale = "full" if torch.cuda.is_available() else "small"
    parser.add_argument(
        "--scale", choices=(*SIZES, "original"), default=scale, help="sizes of the model; original: see above"
    )
    parser.add_argument("--repeats", type=count, default=7, help="timed rounds over all cells (default 7)")
    parser.add_argument("--schedule", choices=("gpipe", "1f1b"), default="gpipe", help="1f1b adds its rows")
    for name, default, what in (("stages", STAGES, "stages"), ("microbatches", MICROBATCHES, "micro-batches")):
        parser.add_argument(f"--{name}", type=counts, default=default, metavar="N,N,...", help=f"numbers of {what}")
    for name, every in (("checkpoint", MODES), ("implementation", IMPLEMENTATIONS)):
        listed = ",".join(every)
        parser.add_argument(f"--{name}", type=some_of(every), default=every, metavar=listed, help=f"of {listed}")
    add_output(parser)
    arguments = parser.parse_args()
    if arguments.scale == "original":
        refuse_without_effect(parser, arguments, "repeats", where="--scale original")
    keep_whole(parser, arguments, "stages", "microbatches", "checkpoint", "implementation")
    return arguments


def counts(text: str) -> tuple[int, ...]:
    return tuple(sorted({count(part) for part in text.split(",")}))


def some_of(every: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    def read(text: str) -> tuple[str, ...]:
        wrong = [part for part in text.split(",") if part not in every]
        if wrong:
            raise argparse.ArgumentTypeError(f"{wrong[0]} is not allowed; give one or more of {','.join(every)}")
        return tuple(name for name in every if name in text.split(","))

    return read


def check_arguments(arguments: argparse.Namespace) -> None:
    """Raises UserError for what this machine or the model does not allow."""
    for m in arguments.microbatches:
        if BATCH % m:
            raise UserError(f"--microbatches: {m} does not divide the batch of {BATCH}; give powers of 2 up to {BATCH}")
    if arguments.scale == "original":
        if arguments.schedule == "1f1b":
            raise UserError("--schedule: 1f1b was not published; leave it out with --scale original")
        if cells := sorted({cell[:2] for cell in cells_of(arguments)} - {cell[:2] for cell in read_published()}):
            raise UserError(
                "--stages, --microbatches: K {} with M {} was not published; give of {} and of {}".format(
                    *cells[0], ",".join(map(str, STAGES)), ",".join(map(str, MICROBATCHES))
                )
            )
        return
    longest, num_blocks = max(arguments.stages), SIZES[arguments.scale]["num_layers"]
    if longest > num_blocks:
        raise UserError(f"--stages: {longest} is more than the {num_blocks} blocks of --scale {arguments.scale}")
    if torch.cuda.is_available() and longest > torch.cuda.device_count():
        raise UserError(
            f"--stages: {longest} stages need as many GPUs and there are {torch.cuda.device_count()}; give fewer, or "
            "set CUDA_VISIBLE_DEVICES= to run on the CPU"
        )


def run(world: World, *, arguments: argparse.Namespace) -> None:
    found, difference = sweep(
        world,
        sizes=SIZES[arguments.scale],
        cells=cells_of(arguments),
        repeats=arguments.repeats,
    )
    if world.rank == 0:
        shape = Shape(BATCH, SIZES[arguments.scale], on_gpus=world.device.type == "cuda")
        # Ranks that are not there need a process without ranks that are.
        with ProcessPoolExecutor(1, get_context("spawn")) as other:
            told = partial(other.submit, variant_bytes, shape.sizes)
            variants = Variants(
                apart=lambda cell: told(cell, "activation_bytes").result(),
                by_stage=lambda cell: told(cell, "by_stage").result(),
            )
            write_sweep(found, difference, shape=shape, variants=variants, folder=arguments.output)


def variant_bytes(sizes: Mapping[str, int], cell: Cell, method: str) -> int:
    return sum(getattr(Original(sizes=sizes, batch_size=BATCH), method)(cell))


def sweep(
    world: World,
    *,
    sizes: Mapping[str, int],
    cells: Sequence[Cell],
    repeats: int,
) -> tuple[dict[Cell, Figures], float]:
    """Collective. Every cell's figures, on rank 0, and the largest difference of gradients, over the largest gradient.

    Raises RuntimeError if ours are not torchgpipe's.
    """
    stages = tuple(sorted({cell.num_stages for cell in cells}))
    most = max(cell.num_microbatches for cell in cells)
    difference = gradient_difference(
        Bench(world, sizes=sizes, stages=stages, dropout=0.0), stages=stages, num_microbatches=most
    )
    if difference > TOLERANCE:
        raise RuntimeError(f"gradients of ours and torchgpipe's differ by {difference:.1e} of the largest")
    bench = Bench(world, sizes=sizes, stages=stages, dropout=0.1)
    found = {cell: Figures() for cell in cells}
    pipes = {cell: bench.build(cell) for cell in found}
    for cell, pipe in pipes.items():
        found[cell].num_threads = bench.pick_threads(pipe, cell)
    for repeat in range(repeats + 1):  # the first builds schedules and is not counted
        for cell, figures in found.items():
            seconds, forward = bench.time(pipes[cell])
            if repeat:
                figures.seconds.append(seconds)
                figures.forward_seconds.append(forward)
    pipes.clear()
    for cell, figures in found.items():
        figures.parameter_bytes, figures.growth_bytes = bench.memory(bench.build(cell))
    return found, difference


def cells_of(arguments: argparse.Namespace) -> list[Cell]:
    """1F1B takes as many micro-batches as stages, at least; one stage has no schedule."""
    found = []
    for k, m, mode in product(arguments.stages, arguments.microbatches, arguments.checkpoint):
        names = list(arguments.implementation)
        if arguments.schedule == "1f1b" and "ours" in names and m >= k > 1:
            names.append("ours 1f1b")
        found += [Cell(k, m, mode == "True", name) for name in names]
    return found


def gradient_difference(bench: Bench, *, stages: tuple[int, ...], num_microbatches: int) -> float:
    """Collective. The most that a gradient of ours differs from torchgpipe's, over the largest of its tensor."""
    worst = 0.0
    for k, is_checkpointed in product(stages, (False, True)):
        theirs = bench.gradients(Cell(k, num_microbatches, is_checkpointed, "torchgpipe"))
        ours = bench.gradients(Cell(k, num_microbatches, is_checkpointed, "ours"))
        for name, parameter in bench.model.named_parameters():
            expected = theirs.get(name, torch.empty(parameter.shape))
            dist.broadcast(expected, src=0)
            holders = torch.tensor(int(name in ours))
            dist.all_reduce(holders)
            if holders != 1:
                raise RuntimeError(f"{int(holders)} of {k} stages have a gradient of {name}")
            if name in ours:
                worst = max(worst, float((ours[name] - expected).abs().max() / expected.abs().max()))
    return slowest(worst)


class Bench:
    """One rank's part in every cell; ranks without a part wait. All methods but ``build`` are collective."""

    def __init__(self, world: World, *, sizes: Mapping[str, int], stages: tuple[int, ...], dropout: float) -> None:
        zoo = zoo_model(MODEL)
        torch.manual_seed(0)
        self.model = zoo.build(**sizes, dropout=dropout).to(world.device)
        length, vocabulary_size = sizes["sequence_length"], sizes["vocabulary_size"]
        ids = zoo.example(batch_size=BATCH, seed=1, size=length + 1, vocabulary_size=vocabulary_size).to(world.device)
        self._batch = Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
        self._world = world
        self._groups = {k: dist.new_group(list(range(k)), timeout=world.timeout) for k in stages if k > 1}
        self._graphs: dict[int, Graph] = {}
        # Of torchgpipe's own, which it spreads over its devices; by length, since each spreads them otherwise.
        self._copies = {k: deepcopy(self.model) for k in stages} if world.rank == 0 else {}

    def build(self, cell: Cell) -> Pipe | None:
        """This rank's share of it."""
        k, m = cell.num_stages, cell.num_microbatches
        cuts = block_cuts(len(self.model.blocks), num_stages=k)
        mode = "except_last" if cell.is_checkpointed else "never"
        if cell.implementation == "torchgpipe":
            if self._world.rank > 0:
                return None
            on_gpus = self._world.device.type == "cuda"
            devices = [torch.device("cuda", index) if on_gpus else torch.device("cpu") for index in range(k)]
            return Torchgpipe(
                layers_of(self._copies[k]), self._batch, cuts=cuts, num_microbatches=m, checkpoint=mode, devices=devices
            )
        if self._world.rank >= k:
            return None
        if m not in self._graphs:
            self._graphs[m] = trace(self.model, (self._batch.inputs[: BATCH // m],), depth=1)
        kind = "1f1b" if cell.implementation == "ours 1f1b" else "gpipe"
        return Ours(
            self._graphs[m], self._batch, cuts=cuts, num_microbatches=m, checkpoint=mode, kind=kind,
            group=self._groups.get(k),
        )  # fmt: skip

    def pick_threads(self, pipe: Pipe | None, cell: Cell) -> int:
        """Threads that a cell has in all: of our ranks, or in torchgpipe's process. Where that runs is rank 0."""
        if not isinstance(pipe, Torchgpipe):
            return cell.num_stages
        most = min(cell.num_stages, os.cpu_count() or 1)
        if self._world.device.type == "cpu" and most > 1:
            pipe.pick_threads(most)
        return pipe.num_threads

    def time(self, pipe: Pipe | None) -> tuple[float, float]:
        """Seconds of a step on the slowest rank, and of its forward phase."""
        if pipe is not None:
            clear(pipe)
        dist.barrier()
        start = perf_counter()
        if pipe is not None:
            pipe.step()
        seconds = slowest(perf_counter() - start if pipe is not None else 0.0)
        forward = slowest(0.0 if pipe is None else pipe.forward_seconds)
        if pipe is not None:
            clear(pipe)
        return seconds, forward

    def memory(self, pipe: Pipe | None) -> tuple[list[int], list[int]]:
        """Bytes of the parameters of every partition, and by device the peak above them: of a first step, which makes
        the gradients, and a second that has them already."""

        def steps() -> None:
            assert pipe is not None
            pipe.step()
            for parameter in parameters(pipe):
                assert parameter.grad is not None
                parameter.grad.zero_()
            pipe.step()

        held, growth = list[int](), list[int]()
        if pipe is not None:
            clear(pipe)
            held = [sum(p.numel() * p.element_size() for p in part.parameters()) for part in pipe.partitions]
            growth = peak_growth(steps, partitions=pipe.partitions, devices=list(dict.fromkeys(pipe.devices)))
            clear(pipe)
        everyone = [(held, growth)] * self._world.size
        dist.all_gather_object(everyone, (held, growth))
        by_rank = zip(*everyone, strict=True)
        held, growth = ([num_bytes for of_rank in column for num_bytes in of_rank] for column in by_rank)
        return held, growth

    def gradients(self, cell: Cell) -> dict[str, Tensor]:
        """After one step, those that this rank has, by the parameter's name in the model."""
        pipe = self.build(cell)
        if pipe is None:
            return {}
        clear(pipe)
        pipe.step()
        models = [self.model, *self._copies.values()]
        names = {id(parameter): name for model in models for name, parameter in model.named_parameters()}
        found = {names[id(p)]: p.grad.cpu() for p in parameters(pipe) if p.grad is not None}
        clear(pipe)
        return found


def parameters(pipe: Pipe) -> list[nn.Parameter]:
    return [parameter for part in pipe.partitions for parameter in part.parameters()]


def clear(pipe: Pipe) -> None:
    for parameter in parameters(pipe):
        parameter.grad = None


if __name__ == "__main__":
    sys.exit(run_guarded(main))
