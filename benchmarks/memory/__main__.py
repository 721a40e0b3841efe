"""Predicted over real: the most bytes that each rank holds at once in a step.

    pipetransformer bench memory [--models vit bert]

Costs are measured unit by unit, as a job does before training, and the planner predicts from them. Real is what lies in
tensors at the peak of a second step (weights, gradients, optimizer state, batch, activations), counted storage by
storage as torch makes and frees them: no allocator's habits, no resident pages. On 2 ranks, with pp 1 and 2.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import product
from statistics import median

import numpy as np
import torch.distributed as dist
from matplotlib.figure import Figure
from torch import Tensor

from benchmarks.support.command_line import bench_parser
from benchmarks.support.measure import CONFIGS
from benchmarks.support.ranks import as_ranks
from benchmarks.support.table import Row, write_table
from pipetransformer.adapter import LiveBytes
from pipetransformer.config import Config, load_config
from pipetransformer.data import epoch_batches
from pipetransformer.engine import Engine
from pipetransformer.launch.entry import run_guarded
from pipetransformer.pipe.measure.profile import measure_profile
from pipetransformer.pipe.measure.workload import Workload
from pipetransformer.pipe.planner.search import predict
from pipetransformer.plan import ParallelPlan
from pipetransformer.plan.schedules import SCHEDULES, fewest_stages
from pipetransformer.process.collectives import led_by
from pipetransformer.process.world import World
from pipetransformer.run.job import Job, build_job

MODELS = {
    "vit": ("digits_no_freeze", "{patch_size: 2, embed_dim: 64, depth: 6, num_heads: 4}", ("data.image_size=8",)),
    "bert": (
        "demo_text",
        "{hidden_size: 64, intermediate_size: 256, num_attention_heads: 4, num_hidden_layers: 6}",
        ("freeze.policy=none",),
    ),
}
BATCH, NUM_BLOCKS = 64, 6
MODES, OPTIMIZERS, MICROBATCHES = ("never", "except_last", "always", "selective"), ("adamw", "sgd"), (2, 4, 8)
FROZEN = (0, NUM_BLOCKS // 2)


@dataclass(frozen=True, slots=True)
class Real:
    """Bytes of one rank under one plan. Attributes: lasting: weights and optimizer state. peak: the most in a step."""

    peak: int
    lasting: int


def main() -> None:
    parser = bench_parser("memory", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    arguments = parser.parse_args()
    as_ranks(__file__, partial(run, models=arguments.models), num_ranks=2)


def run(world: World, *, models: list[str]) -> None:
    rows: list[Row] = []
    everything = list(plans(world.size))
    for model, optimizer, mode in product(models, OPTIMIZERS, MODES):
        config = configuration(model, mode=mode, optimizer=optimizer)
        mine = list(zip(predicted_bytes(world, config, everything), real_bytes(world, config, everything)))
        everyone = [mine] * world.size
        dist.all_gather_object(everyone, mine)
        for plan, *of_plan in zip(everything, *everyone):
            for rank, (predicted, real) in enumerate(of_plan):
                known: Row = {"model": model, "optimizer": optimizer, "checkpoint": mode, "rank": rank}
                rows.append({**known, **row_of(plan, predicted=predicted, real=real.peak)})
        if world.rank == 0:
            ratios = [predicted / real.peak for of_rank in everyone for predicted, real in of_rank]
            print(f"{model} {optimizer} {mode}: predicted / real {min(ratios):.3f} .. {max(ratios):.3f}", flush=True)
    if world.rank == 0:
        tell(rows)


def plans(world_size: int) -> Iterator[ParallelPlan]:
    for frozen, num_microbatches in product(FROZEN, MICROBATCHES):
        yield plan_of(frozen, 1, world_size=world_size, num_microbatches=num_microbatches, schedule="1f1b")
        for schedule in SCHEDULES:
            yield plan_of(frozen, 2, world_size=world_size, num_microbatches=num_microbatches, schedule=schedule)


def plan_of(
    frozen: int,
    pp: int,
    *,
    world_size: int,
    num_microbatches: int,
    schedule: str,
    stages_per_rank: int | None = None,
    units_per_block: int = 1,
) -> ParallelPlan:
    """Evenly cut stages; the fewest of a rank that the schedule runs with, unless told."""
    per_rank = stages_per_rank or fewest_stages(schedule)
    first = frozen * units_per_block + 1 if frozen else 0
    num_stages, active = pp * per_rank, NUM_BLOCKS * units_per_block + 2 - first
    return ParallelPlan(
        frozen=frozen,
        pp=pp,
        dp=world_size // pp,
        boundaries=tuple(first + round(stage * active / num_stages) for stage in range(1, num_stages)),
        num_microbatches=num_microbatches,
        schedule=schedule,
        cached=None,
        num_blocks=NUM_BLOCKS,
        stages_per_rank=per_rank,
        units_per_block=units_per_block,
    )


def configuration(model: str, *, mode: str, optimizer: str) -> Config:
    """Its profile knows what every schedule holds: only that of zero bubble has what split backwards hold."""
    file, kwargs, overrides = MODELS[model]
    every = (
        *(f"model.kwargs={kwargs}", f"train.batch_size={BATCH}", f"train.optimizer={optimizer}", "model.dropout=0.1"),
        *(f"pipe.recompute={mode}", "pipe.schedule=zero_bubble", "log.wandb=disabled"),
    )
    return load_config(CONFIGS / f"train_config_{file}.yaml", [*every, *overrides])


def predicted_bytes(world: World, config: Config, plans: Sequence[ParallelPlan]) -> list[int]:
    """Collective. What the planner says of this rank under each plan."""
    job = build_job(config, world, lead=partial(led_by, 0))
    data, workload = job.datasets["train"], _workload(job, config, world)
    costs = measure_profile(job.chain, data, workload=workload, config=config, world=world).job
    predictions = [predict(plan, costs=costs, global_batch_size=BATCH) for plan in plans]
    return [told.memory_bytes[told.plan.stage_of(world.rank)] for told in predictions]


def real_bytes(world: World, config: Config, plans: Sequence[ParallelPlan]) -> list[Real]:
    """Collective. What this rank holds under each plan in its second step; the first makes the optimizer's state."""
    found = []
    with LiveBytes() as live:
        job = build_job(config, world, lead=partial(led_by, 0))
        gc.collect()
        others = live.alive - _weights(job)  # data, buffers
        workload = _workload(job, config, world)
        batch = workload.examples[workload.modal_length]
        engine = Engine(job.chain, job.datasets, config, world)
        for plan in plans:
            engine.enter(plan)
            job.chain.train()
            with closing(engine.feed("train").batches([batch] * 2, epoch=0)) as incoming:
                for step, given in enumerate(incoming):
                    live.peak = live.alive
                    engine.step(given, step=step, lr=1e-3)
                    del given
            moments = sum(_size(t) for state in engine.layout.state().values() for t in state.values())
            found.append(Real(peak=live.peak - others, lasting=moments + _weights(job)))
        engine.forget()
    return found


def _weights(job: Job) -> int:
    return sum(_size(parameter) for parameter in job.chain.model.parameters() if not parameter.is_meta)


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _workload(job: Job, config: Config, world: World) -> Workload:
    batches = epoch_batches(job.datasets["train"].lengths, batch_size=BATCH, seed=0, epoch=0, num_nodes=1)
    return Workload.of(batches, config, num_ranks=world.size, local_size=2)


def row_of(plan: ParallelPlan, *, predicted: int, real: int) -> Row:
    return {
        "pp": plan.pp,
        "schedule": plan.schedule if plan.pp > 1 else None,
        "M": plan.num_microbatches,
        "n": plan.frozen,
        "predicted MB": predicted / 1e6,
        "real MB": real / 1e6,
        "predicted / real": predicted / real,
    }


def ranges(rows: Sequence[Row]) -> list[str]:
    """Least to most over all cells that they name: no rank, model, optimizer or n is left out."""
    told = []
    for schedule in dict.fromkeys(row["schedule"] for row in rows):
        family = [_float(row, "predicted / real") for row in rows if row["schedule"] == schedule]
        told.append(f"{schedule or 'pp 1'} {_range(family)}")
    first = [row for row in rows if row["rank"] == 0 and row["M"] == 4 and row["checkpoint"] == "never"]
    gpipe = [row for row in rows if row["schedule"] == "gpipe" and row["M"] == 8]
    return [
        f"predicted / real by schedule: {', '.join(told)}.",
        f"Real, 1F1B over GPipe, stage 0, M 4, never: {_range(paired(first, 'schedule', '1f1b', 'gpipe'))}, all cells.",
        f"Real, always over never, GPipe, M 8: {_range(paired(gpipe, 'checkpoint', 'always', 'never'))}, all cells.",
    ]


def paired(rows: Sequence[Row], key: str, mine: str, other: str) -> list[float]:
    """Real bytes of rows with ``mine`` over those of the rows that differ from them in ``key`` alone."""

    names = [name for name in ("model", "optimizer", "checkpoint", "rank", "schedule", "M", "n") if name != key]

    def rest(row: Row) -> tuple[object, ...]:
        return tuple(row[name] for name in names)

    real = {rest(row): _float(row, "real MB") for row in rows if row[key] == other}
    return [_float(row, "real MB") / real[rest(row)] for row in rows if row[key] == mine]


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.3f} .. {max(values):.3f}"


def _float(row: Row, name: str) -> float:
    value = row[name]
    assert isinstance(value, (int, float)), name
    return float(value)


def tell(rows: list[Row]) -> None:
    ratios = [float(row["predicted / real"] or 0) for row in rows]
    models = [f"{name} ({MODELS[name][1].strip('{}')})" for name in dict.fromkeys(str(row["model"]) for row in rows)]
    notes = [
        f"predicted / real: median {median(ratios):.3f}, {min(ratios):.3f} .. {max(ratios):.3f}",
        f"Models: {', '.join(models)}. float32, batch {BATCH} over 2 ranks, dropout 0.1; M: micro-batches, n: frozen "
        "blocks. Real: bytes in tensors at the peak of a second step, storage by storage.",
        *ranges(rows),
    ]

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        real, predicted = (np.array([row[f"{name} MB"] for row in rows], dtype=float) for name in ("real", "predicted"))
        for mode in MODES:
            chosen = [row["checkpoint"] == mode for row in rows]
            axes.scatter(real[chosen], predicted[chosen], s=12, label=mode)
        ends = np.array([real.min(), real.max()])
        axes.plot(ends, ends, color="black", linewidth=0.8, label="as predicted")
        axes.fill_between(ends, 0.9 * ends, 1.1 * ends, color="grey", alpha=0.2, label="within 10 %")
        axes.set(xscale="log", yscale="log", xlabel="real MB of a rank", ylabel="predicted MB of a rank")
        axes.legend()

    write_table("memory", rows, title="Peak memory of a rank in a step, predicted and real", notes=notes, draw=draw)


if __name__ == "__main__":
    sys.exit(run_guarded(main))
