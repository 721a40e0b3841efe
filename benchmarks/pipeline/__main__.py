"""A pipeline of 2 ranks beside everything else that 2 cores can run, at one batch size, round by round in one run.

    pip install -e ".[bench]"
    pipetransformer bench pipeline [--repeats 7]

Rows: a plain loop with one thread and with two, plain data parallel on 2 ranks, 1F1B on 2 ranks, and torchgpipe 0.0.7
on two CPU "devices" of one process, which are one worker, with one thread and with two; all train the same ViT on the
same batch without an optimizer step. "Halves" are the stages of 1F1B without communication, both ranks at once and one
after the other: what a pipeline can reach is made of these, see ``ceiling``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from torch import Tensor, nn

from benchmarks.support.command_line import bench_parser
from benchmarks.support.measure import CONFIGS, spread
from benchmarks.support.ranks import as_ranks
from benchmarks.support.table import write_table
from benchmarks.support.torchgpipe import build_gpipe, require_torchgpipe, threads
from pipetransformer.config import load_config
from pipetransformer.data import epoch_batches
from pipetransformer.engine import Engine
from pipetransformer.launch.arguments import count
from pipetransformer.launch.entry import run_guarded
from pipetransformer.models import Chain, Stage
from pipetransformer.plan import ParallelPlan
from pipetransformer.process.collectives import led_by, slowest
from pipetransformer.process.world import World
from pipetransformer.run.job import build_job

CONFIG = CONFIGS / "train_config_digits_no_freeze.yaml"
BATCH = 64
# A ViT of 5.4 M parameters on 32 x 32 pictures in patches of 4.
JOB = (
    "model.kwargs={patch_size: 4, embed_dim: 192, depth: 12, num_heads: 3}",
    "data.image_size=32",
    f"train.batch_size={BATCH}",
)
NUM_BLOCKS, CUT, MICROBATCHES = 12, 7, (2, 4, 8)
STEPS = 4  # timed in a round
Round = Callable[[], None]
READING = (
    "Medians [least .. most] of the rounds; ratios are of one round each. A pipeline of 2 waits for its first and its",
    "last micro-batch, 1 / (M + 1) of its time; replicas wait for one sum of gradients alone.",
    "The ceiling is a step of the halves in 1F1B without communication: M - 1 slots in which both ranks compute, and",
    "two in which one computes alone, each as long as measured so.",
    'torchgpipe has one worker for each distinct device, and "cpu" is one: its partitions follow one another, and only',
    "threads inside operators use the second core.",
)


def main() -> None:
    parser = bench_parser("pipeline", description=__doc__)
    parser.add_argument("--repeats", type=count, default=7, help="timed rounds (default 7)")
    arguments = parser.parse_args()
    require_torchgpipe()
    as_ranks(__file__, partial(run, repeats=arguments.repeats), num_ranks=2)


def run(world: World, *, repeats: int) -> None:
    bench = Bench(world)
    times: dict[str, list[float]] = {}
    for repeat in range(repeats + 1):
        for rows in bench.rows():
            for name, seconds in bench.time(rows).items():
                if repeat:
                    times.setdefault(name, []).append(seconds)
    if world.rank == 0:
        tell(times)


class Bench:
    """One rank's share of every row. What one process does alone, rank 0 does while rank 1 waits."""

    def __init__(self, world: World) -> None:
        self.world = world
        config = load_config(CONFIG, JOB)
        job = build_job(config, world, lead=partial(led_by, 0))
        data = job.datasets["train"]
        self.batches = epoch_batches(data.lengths, batch_size=BATCH, seed=0, epoch=0, num_nodes=1)
        self.engine = Engine(job.chain, job.datasets, config, world)
        self.objective = self.engine.objective
        self.plan: ParallelPlan | None = None
        own = build_job(config, world, lead=partial(led_by, 0))  # that no transition takes apart
        own.whole_model()
        whole = own.chain
        self.alone, self.gpipes = whole, {m: gpipe_of(whole, m) for m in MICROBATCHES}
        raw = data.inputs(self.batches[0].ids, length=self.batches[0].length, epoch=0)
        self.inputs, self.labels = raw[whole.family.main_input], data.labels[self.batches[0].ids]

    def rows(self) -> list[Mapping[str, Round]]:
        """By name what is timed, what is compared closely side by side; entering a layout is not timed."""
        rows: list[Mapping[str, Round]] = [
            {"plain loop, 1 thread": partial(self.by_rank_0, self.plain, num_threads=1)},
            {"plain loop, 2 threads": partial(self.by_rank_0, self.plain, num_threads=2)},
            {"data parallel, 2 ranks": self.entered(ParallelPlan(0, 1, 2, (), 1, "1f1b", None, NUM_BLOCKS))},
        ]
        for m in MICROBATCHES:
            plan = ParallelPlan(0, 2, 1, (CUT,), m, "1f1b", None, NUM_BLOCKS)
            rows.append(
                {
                    halves_name(m): partial(self.half, plan),
                    one_by_one_name(m): partial(self.one_by_one, plan),
                    f"1F1B, 2 ranks, M {m}": self.entered(plan),
                }
            )
            rows += [
                {
                    f"torchgpipe, 2 parts on 1 worker, {n} thread{'s' * (n > 1)}, M {m}": partial(
                        self.by_rank_0, self.gpipes[m], num_threads=n
                    )
                }
                for n in (1, 2)
            ]
        return rows

    def time(self, rows: Mapping[str, Round]) -> dict[str, float]:
        """Seconds of the slower rank: medians of some steps that take turns, after one that is not counted."""
        seconds: dict[str, list[float]] = {name: [] for name in rows}
        for _ in range(1 + STEPS):
            for name, action in rows.items():
                dist.barrier()
                start = perf_counter()
                action()
                seconds[name].append(slowest(perf_counter() - start))
        return {name: median(taken[1:]) for name, taken in seconds.items()}

    def entered(self, plan: ParallelPlan) -> Round:
        def action() -> None:
            if self.plan != plan:
                self.engine.enter(plan)
                self.engine.chain.train()
                self.plan = plan
                self.batch = next(iter(self.engine.feed("train").batches([self.batches[0]], epoch=0)))
            layout = self.engine.layout
            self.objective.begin(step=0, batch_size=self.batch.global_count)
            layout.reducer.begin(num_microbatches=plan.num_microbatches)
            layout.executor.train(self.batch)
            layout.reducer.finish()

        return action

    def one_by_one(self, plan: ParallelPlan) -> None:
        """The stages one after the other, while the other rank waits."""
        for rank in range(self.world.size):
            if rank == self.world.rank:
                self.half(plan)
            dist.barrier()

    def half(self, plan: ParallelPlan) -> None:
        """This rank's stage, on inputs and gradients of its own."""
        (units,) = plan.staged_units_of(self.world.rank)
        stage, rows = Stage(self.alone, units), BATCH // plan.num_microbatches
        self.objective.begin(step=0, batch_size=BATCH)
        for number in range(plan.num_microbatches):
            part = slice(number * rows, (number + 1) * rows)
            if units.start == 0:
                output = stage(self.inputs[part])
                torch.autograd.backward(output, torch.ones_like(output))
            else:
                entering = torch.ones(rows, 65, 192, requires_grad=True)
                torch.autograd.backward(self.objective(stage(entering), self.labels[part]))
        self.alone.model.zero_grad()

    def plain(self, inputs: Tensor) -> Tensor:
        return self.alone.run(range(NUM_BLOCKS + 2), inputs, {})

    def by_rank_0(self, forward: Callable[[Tensor], Tensor], *, num_threads: int) -> None:
        if self.world.rank == 0:
            with threads(num_threads):
                self.objective.begin(step=0, batch_size=BATCH)
                torch.autograd.backward(self.objective(forward(self.inputs), self.labels))
            self.alone.model.zero_grad()
        dist.barrier()


class Unit(nn.Module):
    """One unit of a chain as a layer of torchgpipe's sequence; it holds its parameters, shared with the chain."""

    def __init__(self, chain: Chain, unit: int) -> None:
        super().__init__()
        self._run = partial(chain.run, range(unit, unit + 1))
        for name, parameter in chain.named_parameters([unit]).items():
            self.register_parameter(name.replace(".", "_"), parameter)

    def forward(self, hidden: Tensor) -> Tensor:
        return self._run(hidden, {})


def gpipe_of(chain: Chain, m: int) -> nn.Module:
    layers = nn.Sequential(*(Unit(chain, unit) for unit in range(chain.num_units)))
    return build_gpipe(layers, balance=[CUT, chain.num_units - CUT], devices=["cpu", "cpu"], num_microbatches=m)


def tell(times: dict[str, list[float]]) -> None:
    """A table, and which wins here."""
    fastest = min((name for name in times if "halves" not in name), key=lambda name: median(times[name]))
    others = [name for name in times if name != fastest and "halves" not in name]
    near = [name for name in others if min(times[name]) <= max(times[fastest])]
    beside = f"; within its spread: {', '.join(near)}" if near else ""
    rows = []
    for name, seconds in times.items():
        over = [mine / other for mine, other in zip(seconds, times[fastest])]
        reached = None
        if name.startswith("1F1B"):
            m = int(name.rpartition(" ")[2])
            parts = zip(times[halves_name(m)], times[one_by_one_name(m)], seconds)
            reached = spread([ceiling(both, apart, m) / mine for both, apart, mine in parts])
        rows.append(
            {
                "what": name,
                "ms": spread([1e3 * s for s in seconds], digits=0),
                "pictures/s": BATCH / median(seconds),
                "over the fastest": spread(over),
                "of the ceiling": reached,
            }
        )
    write_table(
        "pipeline",
        rows,
        title=f"A ViT of 5.4 M parameters, {BATCH} pictures a step, forward and backward, on 2 cores",
        notes=[f"Fastest here: {fastest}{beside}.", *READING],
        draw=lambda figure: draw(figure, times),
    )


def halves_name(m: int) -> str:
    return f"halves without communication, M {m}"


def one_by_one_name(m: int) -> str:
    return f"halves one after the other, M {m}"


def ceiling(both: float, apart: float, m: int) -> float:
    """Seconds of 1F1B on two ranks without communication.

    A step of M + 1 slots has M - 1 in which both ranks work on a micro-batch, and one in which each does alone: ranks
    that share caches and memory are faster then.

    Args:
        both: seconds of all M micro-batches on both halves at once.
        apart: likewise, one half after the other.
    """
    return ((m - 1) * both + apart) / m


def draw(figure: Figure, times: dict[str, list[float]]) -> None:
    axes = figure.subplots()
    for number, seconds in enumerate(times.values()):
        axes.plot([1e3 * s for s in seconds], [number] * len(seconds), ".", color="#4c78a8")
        axes.plot(1e3 * median(seconds), number, "|", color="#f58518", markersize=14, markeredgewidth=2)
    axes.set_yticks(range(len(times)), list(times))
    axes.invert_yaxis()
    axes.set_xlabel("ms a step: rounds, and their median")
    axes.set_xlim(left=0)


if __name__ == "__main__":
    sys.exit(run_guarded(main))
