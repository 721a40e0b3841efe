"""torchgpipe's table of AmoebaNet-D's memory: naive-1 and pipelines of 1 to 8 devices with models that grow with them.

    pipetransformer bench amoebanet-memory [--scale small|full|original] [--ranks 8] [--device-memory BYTES]

The models are the published rows': (L, F) are normal cells a group and filters, 10 classes, and their parameters times
12 bytes (weights, gradients, RMSprop's squares, as benchmarks/amoebanetd-memory/main.py at a471026 counts) are its
"GB", of 2^30. Batch 128 in 128 micro-batches, two steps, gradients kept, are that script's too. Each row runs on ranks
of its own, so that one which runs out of memory is named and the next goes on.

``--scale original`` counts the published rows at their own sizes on any machine, ours beside torchgpipe itself and the
planner's formula: no storage is allocated and no arithmetic done.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from matplotlib.figure import Figure

from benchmarks.amoebanet_memory.jobs import BYTES_PER_PARAMETER, Held, Job, Model, find_boundaries, measure
from benchmarks.amoebanet_memory.table import write_original
from benchmarks.ddp_vs_pipe.fresh_ranks import FreshRanks, OutOfMemory
from benchmarks.support.command_line import add_output, bench_parser, refuse_without_effect
from benchmarks.support.graphs import Setting, add_scale, needs, num_ranks, pick_scale
from benchmarks.support.table import Row, write_table
from pipetransformer.launch.arguments import count
from pipetransformer.launch.entry import run_guarded

NAME = "amoebanet-memory"


@dataclass(frozen=True, slots=True)
class Size:
    models: Mapping[str, Model]
    batch_size: int
    image_size: int
    timeout_seconds: float  # of a row: tracing, cutting and two steps


SIZES = {
    "full": Size(
        models={
            "naive-1": Model(6, 208),
            "pipeline-1": Model(6, 416),
            "pipeline-2": Model(6, 544),
            "pipeline-4": Model(12, 544),
            "pipeline-8": Model(24, 512),
        },
        batch_size=128,
        image_size=224,
        timeout_seconds=7200.0,
    ),
    "small": Size(
        models={
            "naive-1": Model(1, 32),
            "pipeline-1": Model(1, 64),
            "pipeline-2": Model(1, 88),
            "pipeline-4": Model(2, 88),
            "pipeline-8": Model(4, 80),
        },
        batch_size=16,
        image_size=96,
        timeout_seconds=600.0,
    ),
}
# (L, F), parameters, memory of parameters, peak memory of activations: as printed.
PUBLISHED = {
    "naive-1": ("(6, 208)", "90M", "1.00GB", None),
    "pipeline-1": ("(6, 416)", "358M", "4.01GB", "6.64GB"),
    "pipeline-2": ("(6, 544)", "613M", "6.45GB", "11.31GB"),
    "pipeline-4": ("(12, 544)", "1.16B", "13.00GB", "18.72GB"),
    "pipeline-8": ("(24, 512)", "2.01B", "22.42GB", "35.78GB"),
}
NOT_CUT = "not cut: its units are timed on one device, which has not the memory"
NOTES = (
    "Model memory: 12 bytes a parameter: weight, gradient, RMSprop's mean square, as the original counts. Activations: "
    "the most that a second step added to what lay there after the first, of all devices together; the original "
    "takes what its allocator had reserved, less the model. A device's memory is both, of its own stage.",
    "Pipelines: GPipe, as many micro-batches as rows, except_last (the original's default: what enters a unit is kept, "
    "all of the last micro-batch), cut by the exact partitioner by measured time, without regard to memory. Times are "
    "taken before, by ranks of their own: rank 0's device holds the whole model then, and its stage alone in the row.",
    "The base of pipelines is pipeline-1: naive-1 runs its batch at once and recomputes nothing, so that what is below "
    "its memory is recomputation and micro-batches, not the pipeline.",
    "Published figures are of 24 GB Tesla P40, in units of 2^30 bytes; 613M times 12 bytes are 6.85 of them, not the "
    "6.45 printed. naive-1 ran out of memory there.",
)


def main() -> None:
    parser = bench_parser(NAME, description=__doc__)
    add_scale(parser, predicted="original")
    parser.add_argument(
        "--device-memory",
        type=count,
        metavar="BYTES",
        help="call a row out of memory beyond this, and find the largest of the table's models that fits each row",
    )
    add_output(parser)
    arguments = parser.parse_args()
    if arguments.scale == "original":
        refuse_without_effect(parser, arguments, "ranks", "device_memory", where="--scale original")
        write_original(SIZES["full"].models, settings(SIZES["full"]), PUBLISHED, folder=arguments.output)
        return
    scale, most = pick_scale(arguments.scale), num_ranks(arguments.ranks)
    size = SIZES[scale]
    with FreshRanks.ready(timeout_seconds=size.timeout_seconds) as ranks:
        bench = Bench(size, ranks, most_ranks=most, limit=arguments.device_memory)
        rows = [bench.row(setting) for setting in settings(size)]
    add_base(rows)
    notes = [f"Batch {size.batch_size}, {size.image_size} x {size.image_size} random pixels.", *NOTES]
    if not torch.cuda.is_available():
        notes.append(
            "On the CPU a device is a process and its memory what is resident, so that figures below a few MiB are "
            "those of libraries' buffers; nothing runs out of memory but by --device-memory."
        )
    title = "AmoebaNet-D memory"
    write_table(NAME, rows, title=title, notes=notes, draw=lambda to: draw(to, rows), folder=arguments.output)


def settings(size: Size) -> list[Setting]:
    naive = Setting("naive-1", 1, size.batch_size, checkpoint=None)
    return [naive, *(Setting(f"pipeline-{n}", n, size.batch_size, size.batch_size) for n in (1, 2, 4, 8))]


class NotCut(Exception):
    """The times that a cut takes were not measured: rank 0 ran out of memory, which is not the row's own failure."""


class Bench:
    """Runs jobs, each once, and knows what fits."""

    def __init__(self, size: Size, ranks: FreshRanks, *, most_ranks: int, limit: int | None) -> None:
        self._size = size
        self._ranks = ranks
        self._most_ranks = most_ranks
        self._limit = limit
        self._held: dict[Job, list[Held] | None] = {}

    def row(self, setting: Setting) -> dict[str, str | int | float | None]:
        model = self._size.models[setting.name]
        number = model.num_parameters
        published = PUBLISHED[setting.name]
        row: dict[str, str | int | float | None] = {
            "experiment": setting.name,
            "AmoebaNet-D (L, F)": str(model),
            "parameters": number,
            "model MiB": BYTES_PER_PARAMETER * number / 2**20,
            "peak activations MiB": None,
            "largest device MiB": None,
            "model over pipeline-1": None,
            "memory over pipeline-1": None,
            "published (L, F)": published[0],
            "published parameters": published[1],
            "published model": published[2],
            "published activations": published[3],
        }
        if self._limit is not None:
            row["largest that fits"] = None
        row["note"] = needs(setting, world_size=self._most_ranks)
        if row["note"] is not None:
            return row
        try:
            held = self._measured(setting, model)
        except NotCut:
            row["note"] = NOT_CUT
            return row
        if held is None:
            row["note"] = "out of memory"
        else:
            row["peak activations MiB"] = sum(rank.activation_bytes for rank in held) / 2**20
            row["largest device MiB"] = max(rank.num_bytes for rank in held) / 2**20
            if not self._fits(held):
                row["note"] = "out of memory: beyond --device-memory"
        if self._limit is not None:
            row["largest that fits"] = self._largest(setting)
        return row

    def _measured(self, setting: Setting, model: Model) -> list[Held] | None:
        """By rank; None where one of them ran out of memory. Raises NotCut."""
        job = Job(setting, model, self._size.image_size)
        if job not in self._held:
            print(f"{setting.name}: AmoebaNet-D {model}", flush=True)
            cut = replace(job, boundaries=self._boundaries(job))
            try:
                self._held[job] = self._ranks.run(measure, cut, num_ranks=setting.num_devices)
            except OutOfMemory:
                self._held[job] = None
        return self._held[job]

    def _boundaries(self, job: Job) -> tuple[int, ...]:
        if job.setting.num_devices == 1:
            return ()
        try:
            return self._ranks.run(find_boundaries, job, num_ranks=job.setting.num_devices)[0]
        except OutOfMemory as error:
            raise NotCut from error

    def _fits(self, held: Sequence[Held] | None) -> bool:
        return held is not None and (self._limit is None or max(rank.num_bytes for rank in held) <= self._limit)

    def _largest(self, setting: Setting) -> str:
        """Of the table's models, which grow from row to row."""
        largest = "none of these"
        for model in self._size.models.values():
            try:
                if not self._fits(self._measured(setting, model)):
                    break
            except NotCut:
                return f"{largest}; {model} is {NOT_CUT}"
            largest = str(model)
        return largest


def add_base(rows: Sequence[dict[str, str | int | float | None]]) -> None:
    """Fills the columns over pipeline-1, which recomputes and cuts its batch as the longer pipelines do."""
    base = {row["experiment"]: row for row in rows}["pipeline-1"]
    for row in rows:
        if row["experiment"] == "naive-1" or None in (row["peak activations MiB"], base["peak activations MiB"]):
            continue
        row["model over pipeline-1"] = _number(row["model MiB"]) / _number(base["model MiB"])
        held, beside = (_number(r["model MiB"]) + _number(r["peak activations MiB"]) for r in (row, base))
        row["memory over pipeline-1"] = held / beside


def draw(figure: Figure, rows: Sequence[Row]) -> None:
    """Memory of all devices of a row: the model's, and the activations' on top."""
    ours, theirs = figure.subplots(1, 2)
    names = [f"{row['experiment']}\n{row['AmoebaNet-D (L, F)']}" for row in rows]
    _stack(ours, names, [(row["model MiB"], row["peak activations MiB"]) for row in rows], unit="MiB")
    ours.set_title("measured here")
    names = [f"{row['experiment']}\n{row['published (L, F)']}" for row in rows]
    _stack(theirs, names, [(row["published model"], row["published activations"]) for row in rows], unit="GB (2^30)")
    theirs.set_title("published")


def _stack(axes, names, pairs, *, unit: str) -> None:  # type: ignore[no-untyped-def]
    model, activations = ([_number(value) for value in column] for column in zip(*pairs))
    axes.bar(names, model, label="model")
    bars = axes.bar(names, activations, bottom=model, label="activations")
    axes.bar_label(bars, ["not known" if pair[1] is None else "" for pair in pairs], fontsize=8)
    axes.set_ylabel(unit)
    axes.tick_params(axis="x", labelsize=7)
    axes.legend()


def _number(value: str | int | float | None) -> float:
    return float(value.removesuffix("GB")) if isinstance(value, str) else float(value or 0)


if __name__ == "__main__":
    sys.exit(run_guarded(main))
