"""The price of a checkpoint: steps behind one beside steps without one, on 2 ranks and a model of 21 million weights.

    pipetransformer bench saving [--windows 8]

Every second window of steps begins with a checkpoint. Its price is the time that the window takes beyond the next one,
and is told as a share of a minute: what one checkpoint a minute costs. Written beside training, and with training
waiting (checkpoint.asynchronous).
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist

from benchmarks.support.command_line import bench_parser
from benchmarks.support.measure import CONFIGS, save
from benchmarks.support.ranks import as_ranks
from pipetransformer.config import load_config
from pipetransformer.launch.arguments import count
from pipetransformer.launch.entry import run_guarded
from pipetransformer.process.world import World
from pipetransformer.run import events
from pipetransformer.trainer import Trainer

CONFIG = CONFIGS / "train_config_digits_no_freeze.yaml"
WINDOW = 12  # steps
JOB = (
    *("model.kwargs={patch_size: 4, embed_dim: 384, depth: 12, num_heads: 6}", "data.image_size=32"),
    *("train.batch_size=8", "train.eval_every=1000 epochs", "log.wandb=disabled", "run.id=saving"),
    *(f"data.max_train_samples={8 * 8 * WINDOW}", f"checkpoint.every={2 * WINDOW} steps", "train.epochs=1000"),
    *("freeze.policy=none", "pipe.initial_length=1", "pipe.measure=false", "run.verify_every=null"),
)


def main() -> None:
    parser = bench_parser("saving", description=__doc__)
    parser.add_argument("--windows", type=count, default=8, help="windows with a checkpoint")
    arguments = parser.parse_args()
    as_ranks(__file__, partial(run, windows=arguments.windows), num_ranks=2)


def run(world: World, *, windows: int) -> None:
    """Both ways of saving on one rank; rank 0 tells what they cost."""
    rows = []
    for name in ("true", "false"):
        times, saved, num_weights = _trained(world, asynchronous=name, windows=windows)
        everyone: list[list[float]] = [[] for _ in range(world.size)]
        dist.all_gather_object(everyone, times)
        rows.append(row_of(name, everyone, saved, num_weights=num_weights, windows=windows))
    if world.rank == 0:
        for row in rows:
            print(row)
        print(f"saved {save('saving', rows)}")


def _trained(world: World, *, asynchronous: str, windows: int) -> tuple[list[float], list[events.Saved], int]:
    """The time behind the reduction of each step, and the checkpoints."""
    times, saved = list[float](), list[events.Saved]()

    def note(step: int, gradients: Mapping[str, torch.Tensor]) -> None:
        times.append(perf_counter())
        if step == 2 * WINDOW * (windows + 1):
            raise StopIteration  # all that was asked for has been measured

    def hear(event: events.Event) -> None:
        if isinstance(event, events.Saved):
            saved.append(event)

    with tempfile.TemporaryDirectory() as folder:
        folder = str(Path(folder, str(world.rank))) if world.num_nodes > 1 else folder
        shared = [folder]
        dist.broadcast_object_list(shared)
        overrides = (f"checkpoint.asynchronous={asynchronous}", f"run.dir={shared[0]}")
        trainer = Trainer(load_config(CONFIG, [*JOB, *overrides]), world, probe=note, listeners=[hear])
        with suppress(StopIteration):
            trainer.run()
        chain = trainer.job.chain
        num_weights = sum(p.numel() for p in chain.named_parameters(range(chain.num_units)).values())
        dist.barrier()
    return times, saved, num_weights


def row_of(
    asynchronous: str,
    everyone: Sequence[Sequence[float]],
    saved: Sequence[events.Saved],
    *,
    num_weights: int,
    windows: int,
) -> dict[str, object]:
    """A row of the table. A checkpoint lies between the times of steps 2 k W - 1 and 2 k W."""

    def seconds(first: int) -> float:
        return max(times[first + WINDOW - 1] - times[first - 1] for times in everyone)

    firsts = [2 * WINDOW * number for number in range(1, windows + 1)]
    usual = [seconds(first + WINDOW) for first in firsts]
    prices = [seconds(first) - without for first, without in zip(firsts, usual)]
    return {
        "written": "beside training" if asynchronous == "true" else "while training waits",
        "weights": num_weights,
        "seconds of a step": round(median(usual) / WINDOW, 3),
        "price, seconds": [round(price, 3) for price in prices],
        "price, median seconds": round(median(prices), 3),
        "share of a minute": round(median(prices) / 60, 4),
        "training waits, median seconds": round(median(event.seconds for event in saved), 3),
        "write, median seconds": round(median(event.write_seconds for event in saved), 3),
    }


if __name__ == "__main__":
    sys.exit(run_guarded(main))
