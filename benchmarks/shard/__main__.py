"""Replicas that share out what they hold (dp.shard) beside torch's FSDP2, on the same model and batches.

    pipetransformer bench shard [--ranks 2] [--repeats 7]

A ViT of 12 blocks, width 192, 32 pictures of 16 patches a step, float32, AdamW. FSDP2 wraps each block and the model,
and frees weights behind each forward, as its documentation has it. All take turns; a time is of the slowest rank.

Held: bytes of this rank's tensors between two steps: weights, gradients, moments.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from matplotlib.figure import Figure

from benchmarks.support.command_line import add_output, bench_parser
from benchmarks.support.measure import CONFIGS, spread
from benchmarks.support.ranks import as_ranks
from benchmarks.support.table import Row, write_table
from pipetransformer.config import Config, load_config
from pipetransformer.data import Batch
from pipetransformer.engine import Engine
from pipetransformer.launch.arguments import count
from pipetransformer.launch.entry import run_guarded
from pipetransformer.plan import SHARDS, ParallelPlan
from pipetransformer.process.collectives import led_by, slowest, values_of_ranks
from pipetransformer.process.world import World
from pipetransformer.run.job import Job, build_job

BLOCKS, STEPS, FSDP2 = 12, 5, "FSDP2"
JOB = (
    *("model.kwargs={patch_size: 4, in_chans: 1, embed_dim: 192, depth: 12, num_heads: 6}", "data.image_size=16"),
    *("train.batch_size=32", "train.precision=float32", "train.max_grad_norm=null", "model.dropout=0"),
)
LEARNING_RATE = 1e-3


def main() -> None:
    parser = bench_parser("shard", description=__doc__)
    parser.add_argument("--ranks", type=count, default=2, help="replicas (default 2)")
    parser.add_argument("--repeats", type=count, default=7, help="timed rounds (default 7)")
    add_output(parser)
    arguments = parser.parse_args()
    body = partial(run, repeats=arguments.repeats, folder=arguments.output)
    as_ranks(__file__, body, num_ranks=arguments.ranks)


def run(world: World, *, repeats: int, folder: Path) -> None:
    config = load_config(CONFIGS / "train_config_digits_no_freeze.yaml", JOB)
    steppers: dict[str, Callable[[], Iterator[int]]] = {
        **{shard: partial(ours, config, world, shard) for shard in SHARDS},
        FSDP2: partial(theirs, config, world),
    }
    running = {name: stepper() for name, stepper in steppers.items()}
    held = {name: max(values_of_ranks(next(steps))) for name, steps in running.items()}  # each has warmed up
    times: dict[str, list[float]] = {name: [] for name in running}
    for number in range(repeats):
        names = list(running)[:: 1 if number % 2 else -1]
        for name in names:
            dist.barrier()
            start = perf_counter()
            for _ in range(STEPS):
                next(running[name])
            times[name].append(slowest(perf_counter() - start) / STEPS)
    if world.rank == 0:
        tell(times, held, world=world, folder=folder)


def ours(config: Config, world: World, shard: str) -> Iterator[int]:
    """Steps of the engine. The first one gives the bytes that are held behind it."""
    job = build_job(config, world, lead=partial(led_by, 0))
    engine = Engine(job.chain, job.datasets, job.config, world)
    engine.enter(ParallelPlan(0, 1, world.size, (), 1, "1f1b", None, BLOCKS, shard=shard))
    batches = list(islice(engine.feed("train").batches(job.train_batches(0), epoch=0), STEPS))
    job.chain.train()
    number = 0
    while True:
        for batch in batches:
            engine.step(batch, step=number, lr=LEARNING_RATE)
            number += 1
            yield _bytes_of(job.chain.model, engine.layout.optimizer)


def theirs(config: Config, world: World) -> Iterator[int]:
    """The same steps of the library's own model under FSDP2."""
    from torch.distributed.fsdp import fully_shard

    job = build_job(config, world, lead=partial(led_by, 0))
    network = job.whole_model()
    for block in network.blocks:  # type: ignore[union-attr]
        fully_shard(block)
    fully_shard(network)
    optimizer = torch.optim.AdamW(network.parameters(), lr=LEARNING_RATE, fused=True)
    batches = [_own(job, batch, world) for batch in job.train_batches(0)[:STEPS]]
    network.train()
    while True:
        for pixels, labels in batches:
            F.cross_entropy(network(pixels), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            yield _bytes_of(network, optimizer)


def _own(job: Job, batch: Batch, world: World) -> tuple[torch.Tensor, torch.Tensor]:
    ids, data = batch.ids[world.rank :: world.size], job.datasets["train"]
    return data.inputs(ids, length=batch.length, epoch=0)["pixel_values"], data.labels[ids]


def _bytes_of(network: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Of weights, gradients and moments; storages that hold several tensors count once."""
    tensors: list[Any] = [*network.parameters(), *(p.grad for p in network.parameters() if p.grad is not None)]
    tensors += [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    local = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in local if not t.is_meta}
    return sum(storages.values())


def tell(times: dict[str, list[float]], held: dict[str, int], *, world: World, folder: Path) -> None:
    rows: list[Row] = []
    for name, seconds in times.items():
        ratios = [mine / peer for mine, peer in zip(seconds, times[FSDP2])]
        rows.append(
            {
                "shared out": name,
                "step s": median(seconds),
                "over FSDP2": spread(ratios),
                "held MB": held[name] / 1e6,
            }
        )
    notes = [
        f"{world.size} ranks of one thread, {STEPS} steps a round, {len(times[FSDP2])} rounds in turn. Over FSDP2: "
        "seconds of a step over those of FSDP2 in the same round, median with the least and the most."
    ]
    title = "Replicas that share out, beside FSDP2"

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for row in rows:
            axes.scatter([row["held MB"]], [row["step s"]], label=row["shared out"])
        axes.set(xlabel="MB of weights, gradients and moments of a rank", ylabel="seconds of a step", ylim=(0, None))
        axes.legend()

    write_table(f"shard-{world.size}-ranks", rows, title=title, notes=notes, draw=draw, folder=folder)


if __name__ == "__main__":
    sys.exit(run_guarded(main))
