"""The all-frozen probe: what PipeTransformer printed for one step with all blocks frozen, measured here beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

from matplotlib.figure import Figure

from benchmarks.ddp_vs_pipe.fresh_ranks import FreshRanks
from benchmarks.ddp_vs_pipe.scales import CONFIG, Scale, Shape, kind_of_device, where
from benchmarks.ddp_vs_pipe.trials import Probe, Trial, probe_frozen
from benchmarks.support.table import Row, write_table
from pipetransformer.config import load_config
from pipetransformer.plan import ParallelPlan

__all__ = ["tell_frozen"]

GRADIENT_BYTES = 4  # float32
NODES = 2  # machines of the original
PUBLISHED = (
    # batch, then as it was printed: data, forward, backward in ms, images/s, syncs/s, size_params_ddp_sum
    (64, 3.2522239685058594, 471.1454772949219, 8.642560005187988, 200, 1.569294, 0.0),
    (320, 15.884320259094238, 2313.234375, 31.178239822387695, 240, 0.375755, 0.0),
)


@dataclass(frozen=True, slots=True)
class Frozen:
    """One row: ``batch`` a machine, and the probe of every round."""

    batch: int
    global_batch: int
    prefix: str
    probes: tuple[Probe, ...]

    def middle(self, phase: str) -> float:
        """Milliseconds, the median of the rounds."""
        return 1e3 * median(getattr(probe, phase) for probe in self.probes)


def tell_frozen(ranks: FreshRanks, shape: Shape, scale: Scale, *, scale_name: str, repeats: int, folder: Path) -> None:
    """One step a round of every batch, the prefix computed or read from the cache."""
    samples = (f"data.max_train_samples={min(scale.probed)}", "data.max_eval_samples=1")  # all are cached first
    config = load_config(CONFIG, (*scale.job, *samples, "data.num_workers=0"))
    num_blocks = scale.num_blocks
    found = dict[tuple[int, str], list[Probe]]()
    for number in range(repeats):
        for batch in scale.probed:
            for prefix, cached in (("computed", None), ("cached", num_blocks)):
                plan = ParallelPlan(num_blocks, 1, shape.world_size, (), 1, "1f1b", cached, num_blocks)
                trial = Trial(config, plan, None, batch * shape.nodes, steps=1)
                probes = ranks.run(probe_frozen, trial, num_ranks=shape.world_size)
                found.setdefault((batch, prefix), []).append(probes[0])
                print(f"all blocks frozen, batch {batch}, prefix {prefix}: {probes[0].seconds:.2f} s", flush=True)
        print(f"round {number + 1} of {repeats}", flush=True)
    rows = [Frozen(batch, batch * shape.nodes, prefix, tuple(probes)) for (batch, prefix), probes in found.items()]
    write_table(
        "ddp-vs-pipe-frozen",
        [*map(row_of, rows), *map(published_row, PUBLISHED)],
        title=f"All blocks frozen, the head alone trains, {shape} ranks ({scale_name}, {kind_of_device()})",
        notes=notes_of(shape, num_samples=min(scale.probed)),
        draw=partial(_draw, rows),
        folder=folder,
    )


def row_of(frozen: Frozen) -> Row:
    rates = [frozen.global_batch / probe.seconds for probe in frozen.probes]
    syncs = 1 / median(probe.seconds for probe in frozen.probes)
    sent_bytes = frozen.probes[0].sent_bytes
    return {
        "batch": frozen.batch,
        "global batch": frozen.global_batch,
        "prefix": frozen.prefix,
        "data ms": frozen.middle("data"),
        "forward ms": frozen.middle("forward"),
        "backward ms": frozen.middle("backward"),
        "images/s": median(rates),
        "least": min(rates),
        "most": max(rates),
        "syncs/s": syncs,
        "size_params_ddp_sum": sent_bytes / GRADIENT_BYTES / 1e6,
        "sent bytes": sent_bytes,
        "bytes/s": sent_bytes * syncs,
    }


def published_row(figures: tuple[int, float, float, float, int, float, float]) -> Row:
    batch, data, forward, backward, rate, syncs, size = figures
    times = {"data ms": data, "forward ms": forward, "backward ms": backward}
    sums = {"syncs/s": syncs, "size_params_ddp_sum": size, "sent bytes": None, "bytes/s": None}
    first = {"batch": batch, "global batch": batch * NODES, "prefix": "published"}
    return {**first, **times, "images/s": rate, "least": None, "most": None, **sums}


def notes_of(shape: Shape, *, num_samples: int) -> list[str]:
    return [
        "batch: of one machine, which is one pipeline of the original. Medians of interleaved rounds of one step each, "
        "after one of one row a rank; forward is the frozen prefix and the head. images/s: of the whole job.",
        f"The same {num_samples} samples come again and again, so that few have to be cached.",
        "syncs/s: the original's 'communication frequency (cross machine sync/second)', one a step.",
        "sent bytes: gradient that a rank gave to the sum over all ranks in a step, counted as it was given; bytes/s: "
        "that over the step's seconds. size_params_ddp_sum: the same in millions of parameters, as the original counts "
        "in a hook of DDP's buckets; its head of 768 x 100 would be 0.077 there, but 0 is what it printed.",
        "The original's data loading is the copy to its GPU, and its backward contains loss, clipping and update; ours "
        "are the reading of the batch, of which nothing is read ahead, and the backward alone.",
        "Our trainer has no pipeline any more where all is frozen: every rank is a replica and runs the prefix on its "
        "share. The original sent all batches through its pipelines, and had no cache here.",
        where(shape),
    ]


def _draw(found: Sequence[Frozen], figure: Figure) -> None:
    axes = figure.subplots()
    names = [f"batch {frozen.batch}\nprefix {frozen.prefix}" for frozen in found]
    below = [0.0] * len(found)
    for phase in ("data", "forward", "backward"):
        heights = [frozen.middle(phase) for frozen in found]
        axes.bar(names, heights, bottom=below, label=phase)
        below = [low + height for low, height in zip(below, heights)]
    axes.set_ylabel("ms of a step")
    axes.legend()
