"""The findings of the sweep over K, M and checkpointing: table, picture, and the cells where ours takes more memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import NamedTuple

from matplotlib.figure import Figure

from benchmarks.support.table import Row, write_table

__all__ = ["Cell", "Figures", "Shape", "Variants", "memory_notes", "rows_of", "write_sweep"]

MIB = 2**20


class Cell(NamedTuple):
    """implementation: "ours", "ours 1f1b" or "torchgpipe"."""

    num_stages: int
    num_microbatches: int
    is_checkpointed: bool
    implementation: str


@dataclass(slots=True)
class Figures:
    """The figures of a cell.

    Attributes:
        num_threads: of our ranks together, or of torchgpipe's operators.
        seconds, forward_seconds: of a step and of its forward phase, by round.
        parameter_bytes: by partition.
        growth_bytes: peaks above the parameters, by device; one where devices are not told apart.
    """

    num_threads: int = 1
    seconds: list[float] = field(default_factory=list)
    forward_seconds: list[float] = field(default_factory=list)
    parameter_bytes: list[int] = field(default_factory=list)
    growth_bytes: list[int] = field(default_factory=list)

    @property
    def activation_bytes(self) -> list[int]:
        """By device: the peak without parameters and their gradients."""
        return [growth - held for growth, held in zip(self.growth_bytes, self._held())]

    @property
    def total_bytes(self) -> list[int]:
        return [growth + held for growth, held in zip(self.growth_bytes, self._held())]

    def _held(self) -> list[int]:
        by_device = len(self.growth_bytes) == len(self.parameter_bytes)
        return self.parameter_bytes if by_device else [sum(self.parameter_bytes)]


@dataclass(frozen=True, slots=True)
class Shape:
    """sizes: num_layers, width, sequence_length and so on."""

    batch_size: int
    sizes: Mapping[str, int]
    on_gpus: bool


def rows_of(found: Mapping[Cell, Figures], *, batch_size: int) -> list[Row]:
    rows: list[Row] = []
    for cell, figures in found.items():
        has_phases = cell.implementation != "ours 1f1b"
        rates = [batch_size / seconds for seconds in figures.seconds]
        backward = [step - forward for step, forward in zip(figures.seconds, figures.forward_seconds)]
        is_apart = len(figures.total_bytes) == cell.num_stages
        rows.append(
            {
                "K_partitions": cell.num_stages,
                "M_microbatches": cell.num_microbatches,
                "checkpoint": str(cell.is_checkpointed),
                "implementation": cell.implementation,
                "threads": figures.num_threads,
                "parameter_bytes": " ".join(map(str, figures.parameter_bytes)),
                "peak_activation_bytes": sum(figures.activation_bytes),
                "total_bytes": sum(figures.total_bytes),
                "forward_s": median(figures.forward_seconds) if has_phases else None,
                "backward_s": median(backward) if has_phases else None,
                "samples_per_s": median(rates),
                "lowest": min(rates),
                "highest": max(rates),
                "activation_per_device_MiB": _mebibytes(figures.activation_bytes) if is_apart else None,
                "total_per_device_MiB": _mebibytes(figures.total_bytes) if is_apart else None,
            }
        )
    return rows


def _mebibytes(numbers: Sequence[int]) -> str:
    return " ".join(f"{number / MIB:.1f}" for number in numbers)


def write_sweep(
    found: Mapping[Cell, Figures], difference: float, *, shape: Shape, variants: Variants, folder: Path
) -> None:
    """Prints and writes all of it. ``difference``: of the gradients, over the largest gradient."""
    rows = rows_of(found, batch_size=shape.batch_size)
    sizes = ", ".join(f"{name.replace('_', ' ')} {number}" for name, number in shape.sizes.items())
    notes = [
        f"Model: {sizes}; batch {shape.batch_size}, dropout 0.1. With dropout off, gradients of ours and torchgpipe's "
        f"differ by at most {difference:.1e} of the largest of their tensor.",
        *(NOTES_ON_GPUS if shape.on_gpus else NOTES_ON_CPU),
        *NOTES,
        *ratio_notes(found),
        *memory_notes(found, shape=shape, variants=variants),
    ]
    title = "A GPT: K stages, M micro-batches, checkpointing"
    write_table("gpt2-sweep", rows, title=title, notes=notes, draw=lambda to: draw(to, rows), folder=folder)


NOTES = (
    "K 1 of ours is gradient accumulation, another algorithm than torchgpipe's, and is counted apart.",
    "checkpoint True: except_last in both. Forward is from the start to the loss of the last micro-batch, backward the "
    "rest of the step on the slowest rank; where ours has one stage, forwards and backwards take turns and are added "
    "up. 1F1B has no such phases. samples_per_s: the median of whole steps, the lowest and the highest round.",
    "total_bytes: parameters, and the peak above them in two steps, the second of which finds gradients in place. "
    "peak_activation_bytes: that without parameters and gradients. Of all devices together, each at its own peak.",
)
NOTES_ON_GPUS = ("Memory is what torch's allocator gave out on each GPU.",)
NOTES_ON_CPU = (
    "On the CPU memory is the bytes of tensors alive; torchgpipe's devices are one process, where they cannot be told "
    "apart and peak together; ours is the sum of what the ranks reached, each for itself. torchgpipe has one worker "
    'for all devices "cpu": its partitions follow one another, and threads inside operators are all that it can use of '
    "a second core.",
)


Variant = Callable[[Cell], int]


@dataclass(frozen=True, slots=True)
class Variants:
    """Peaks above weights and gradients of the same cell done otherwise, of all devices together.

    Attributes:
        apart: of torchgpipe, on as many devices as stages.
        by_stage: of ours, a stage recomputed at once.
    """

    apart: Variant
    by_stage: Variant


def ratio_notes(found: Mapping[Cell, Figures]) -> list[str]:
    """Ours over torchgpipe's, a line for each K and checkpoint: medians of samples a second, and total bytes, by M."""
    notes = []
    pairs = [(cell, cell._replace(implementation="torchgpipe")) for cell in found if cell.implementation == "ours"]
    groups = dict.fromkeys((mine.num_stages, mine.is_checkpointed) for mine, theirs in pairs if theirs in found)
    for group in groups:
        chosen = [pair for pair in pairs if (pair[0].num_stages, pair[0].is_checkpointed) == group and pair[1] in found]
        m = " ".join(str(mine.num_microbatches) for mine, _ in chosen)
        rates = " ".join(f"{median(found[b].seconds) / median(found[a].seconds):.2f}" for a, b in chosen)
        sizes = " ".join(f"{sum(found[a].total_bytes) / sum(found[b].total_bytes):.2f}" for a, b in chosen)
        notes.append(
            f"Ours over torchgpipe's, K {group[0]}, checkpoint {group[1]}, M {m}: samples/s {rates}; memory {sizes}."
        )
    return notes


def memory_notes(found: Mapping[Cell, Figures], *, shape: Shape, variants: Variants) -> list[str]:
    """In how many cells ours takes at most torchgpipe's memory, one stage apart, and the others with their causes."""
    pairs = [(cell, cell._replace(implementation="torchgpipe")) for cell in found if cell.implementation == "ours"]
    notes, others = [], list[str]()
    for is_pipeline in (True, False):
        chosen = [pair for pair in pairs if (pair[0].num_stages > 1) == is_pipeline and pair[1] in found]
        more = [pair for pair in chosen if sum(found[pair[0]].total_bytes) > sum(found[pair[1]].total_bytes)]
        what = "ours" if is_pipeline else "gradient accumulation (ours at K 1, one micro-batch at a time)"
        if chosen:
            notes.append(
                f"Memory: {what} takes at most torchgpipe's in {len(chosen) - len(more)} of {len(chosen)} cells."
            )
        for cell, beside in more:
            mine, theirs = sum(found[cell].total_bytes), sum(found[beside].total_bytes)
            causes = _causes(cell, mine - theirs, found=found, shape=shape, variants=variants)
            others.append(
                f"  K {cell.num_stages}, M {cell.num_microbatches}, checkpoint {cell.is_checkpointed}: "
                f"{mine / MIB:.1f} MiB, torchgpipe {theirs / MIB:.1f} MiB, {100 * (mine / theirs - 1):.1f} % more: "
                f"{causes}"
            )
    return [*notes, *([] if not others else ["The others:", *others])]


def _causes(cell: Cell, excess: int, *, found: Mapping[Cell, Figures], shape: Shape, variants: Variants) -> str:
    """What ours holds and torchgpipe does not: two measured, of one the most that it may be."""
    causes = {}
    k, m = cell.num_stages, cell.num_microbatches
    if not shape.on_gpus and k > 1:
        beside = cell._replace(implementation="torchgpipe")
        apart = variants.apart(beside) - sum(found[beside].activation_bytes)
        causes["torchgpipe on devices of its own, each at its own peak, holds more, measured"] = apart
    if cell.is_checkpointed and m > 1 and k > 1:  # one stage has one micro-batch alive at a time
        by_block = sum(found[cell].activation_bytes) - variants.by_stage(cell)
        causes["blocks recomputed one by one, not a stage at once, measured"] = by_block
        # Note: torch's GPipe schedule takes the backwards in the order of the forwards.
        everything = found.get(cell._replace(is_checkpointed=False))
        if everything is not None:
            causes[
                "a block run again while the last micro-batch waits, whose backward torchgpipe takes first: at most"
            ] = sum(everything.activation_bytes) * k // (m * shape.sizes["num_layers"])
    said = [f"{name}: {num_bytes / MIB:.1f} MiB" for name, num_bytes in causes.items()]
    if excess > sum(causes.values()):
        said.append("the rest is not explained")
    return "; ".join(said)


def draw(figure: Figure, rows: Sequence[Row]) -> None:
    """A column for each K: throughput above, memory below, over M."""
    stages = sorted({int(row["K_partitions"] or 0) for row in rows})
    names = sorted({str(row["implementation"]) for row in rows})
    grid = figure.subplots(2, len(stages), squeeze=False, sharex=True)
    for column, k in enumerate(stages):
        top, bottom = grid[0][column], grid[1][column]
        for number, name in enumerate(names):
            for checkpoint, style in (("False", "-"), ("True", "--")):
                cell = (k, checkpoint, name)
                chosen = [r for r in rows if (r["K_partitions"], r["checkpoint"], r["implementation"]) == cell]
                if chosen:
                    m = [row["M_microbatches"] for row in chosen]
                    look = {"color": f"C{number}", "linestyle": style, "marker": "."}
                    label = f"{name}{', checkpoint' if checkpoint == 'True' else ''}"
                    top.plot(m, [row["samples_per_s"] for row in chosen], **look, label=label)
                    bottom.plot(m, [int(row["total_bytes"] or 0) / MIB for row in chosen], **look)
        top.set_title(f"K = {k}")
        bottom.set_xscale("log", base=2)
        bottom.set_xlabel("M")
        for axes in (top, bottom):
            axes.set_ylim(bottom=0)
    grid[0][0].set_ylabel("samples/s")
    grid[1][0].set_ylabel("memory, MiB")
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize="small")
