"""The speed table of ``ddp_vs_pipe``: rows, what was published beside them, who wins, a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

from matplotlib.figure import Figure

from benchmarks.ddp_vs_pipe.scales import Shape
from benchmarks.support.table import Row, write_table

__all__ = ["DDP", "EPOCHS", "Line", "speed_table"]

DDP = "DDP (torch)"


@dataclass(frozen=True, slots=True)
class _Published:
    """A row of PipeTransformer's tables: its batch is one GPU's (DDP) or one pipeline's."""

    gpus: int
    chunks: int | None
    batch: int
    memory: str | None = None
    images_per_second: int | None = None
    minutes: int | None = None

    def __str__(self) -> str:
        if self.images_per_second is None:
            return f"{self.gpus} GPUs: {self.batch} OOM"
        return f"{self.gpus} GPUs: {self.batch}, {self.memory}, {self.images_per_second}/s, {self.minutes} min"


_PUBLISHED = (
    _Published(3, None, 128),
    _Published(3, None, 64, "14G", 260, 85),
    _Published(3, 4, 256),
    _Published(3, 4, 240, "15G", 294, 77),
    _Published(4, None, 64),
    _Published(4, None, 60, "16G", 416, 58),
    _Published(4, 8, 330),
    _Published(4, 8, 320, "15.5G", 326, 61),
)
_IMAGES = 50_000  # CIFAR-100's for training: the log counts 391 batches of 64 on each of 2 machines
_TRAINED = [p.images_per_second * p.minutes * 60 for p in _PUBLISHED if p.images_per_second and p.minutes]
EPOCHS = round(median(_TRAINED) / _IMAGES)
"""Epochs of a training: not told, but the published times at the published rates are so many (24 to 29)."""


@dataclass(frozen=True, slots=True)
class Line:
    """The figures of one method at one batch.

    Attributes:
        block: "largest" or "equal". chunks: M, None for a batch that is not cut. bubble: of a pipeline. replicas: that
            share the batch.
        fits: false is a row that is out of memory. peak_bytes: of the fullest rank, where it is known.
        images_per_second: one of each round, empty where it was not timed.
    """

    block: str
    method: str
    chunks: int | None
    bubble: float | None
    replicas: int
    batch: int
    fits: bool
    peak_bytes: int | None
    images_per_second: tuple[float, ...]

    @property
    def name(self) -> str:
        return self.method if self.chunks is None else f"{self.method}, M {self.chunks}"


def speed_table(
    lines: Sequence[Line], *, shape: Shape, device: str, scale: str, folder: Path, notes: Sequence[str]
) -> Path:
    title = f"DDP and Pipe+DDP, pipelines of {shape.ranks_per_node} on {shape.nodes} machines ({scale}, {device})"
    rows = [_row(line, _ddp_of(lines, line), shape=shape) for line in lines]
    told = (
        "batch: as the original counts it, of one rank (DDP) or of one pipeline. images/s: of the whole job, median of "
        "interleaved rounds, with least and most; x DDP: median of the rounds' ratios at the same kind of batch.",
        f"time: minutes for {EPOCHS} epochs of CIFAR-100's {_IMAGES:,} training images at that rate, evaluation left "
        "out. The original does not tell its epochs: its times at its rates are 24 to 29, and their median is taken.",
        "predicted wait: share of a step in which a pipeline's ranks wait for each other. published: GPUs a machine: "
        "batch, memory a GPU, images/s, minutes, on 2 machines; its 'OOM' rows are the smallest batch that it names as "
        "too large.",
        *notes,
        *_verdict(lines),
    )
    draw = partial(_draw_speed, lines)
    return write_table(
        f"ddp-vs-pipe-{shape.nodes}x{shape.ranks_per_node}", rows, title=title, notes=told, draw=draw, folder=folder
    )


def _ddp_of(lines: Sequence[Line], line: Line) -> Line | None:
    """Torch's, whose batch is not cut."""
    of_ddp = [other for other in lines if (other.block, other.method, other.chunks) == (line.block, DDP, None)]
    return next((other for other in of_ddp if other.images_per_second), None)


def _row(line: Line, ddp: Line | None, *, shape: Shape) -> Row:
    rates = line.images_per_second
    ratios = [mine / other for mine, other in zip(rates, ddp.images_per_second)] if ddp is not None else []
    return {
        "block": f"{line.block} batch",
        "method": line.method,
        "chunks": line.chunks,
        "batch": -(-line.batch // line.replicas),
        "global batch": line.batch,
        "memory": "fits" if line.fits else "out of memory",
        "MB a rank": None if line.peak_bytes is None else line.peak_bytes / 1e6,
        "images/s": median(rates) if rates else None,
        "least": min(rates, default=None),
        "most": max(rates, default=None),
        "x DDP": median(ratios) if ratios else None,
        "predicted wait": line.bubble,
        "time": EPOCHS * _IMAGES / median(rates) / 60 if rates else None,
        "published": _published(line, shape=shape) if line.block == "largest" else None,
    }


def _published(line: Line, *, shape: Shape) -> str | None:
    """Of the same shape; where the original has no such one, of all of its shapes. Its DDP cuts no batch."""
    if line.bubble is None and (line.method, line.chunks) != (DDP, None):
        return None
    own = [p for p in _PUBLISHED if p.gpus == shape.ranks_per_node] or _PUBLISHED
    same = [p for p in own if p.chunks == line.chunks and (p.images_per_second is not None) == line.fits]
    return "; ".join(map(str, same)) or None


def _verdict(lines: Sequence[Line]) -> list[str]:
    """The winner here, what is within its spread, and the largest batches."""
    told = []
    for block in ("largest", "equal"):
        timed = [line for line in lines if line.block == block and line.images_per_second]
        timed.sort(key=lambda line: -median(line.images_per_second))
        if not timed:
            continue
        best, others = timed[0], timed[1:]
        near = [other.name for other in others if max(other.images_per_second) >= min(best.images_per_second)]
        beside = f"; within its spread: {', '.join(near)}" if near else ""
        at = f"at one global batch of {best.batch}" if block == "equal" else "each at its largest batch"
        told.append(f"Fastest {at}: {best.name}, {median(best.images_per_second):,.4g} images/s{beside}.")
    largest = [line for line in lines if line.block == "largest" and line.fits]
    if largest:
        most = max(line.batch for line in largest)
        told.append(
            f"Largest global batch: {most:,} ({'; '.join(line.name for line in largest if line.batch == most)})."
        )
    for m in dict.fromkeys(line.chunks for line in largest if line.bubble is not None):
        batches = "; ".join(f"{line.method} {line.batch:,}" for line in largest if line.chunks == m)
        told.append(f"Largest global batches at M {m}: {batches}.")
    return told


def _draw_speed(lines: Sequence[Line], figure: Figure) -> None:
    names = list(dict.fromkeys(line.name for line in lines))
    batches, rates = figure.subplots(1, 2)
    found = {line.name: line.batch for line in lines if line.block == "largest" and line.fits}
    batches.bar(names, [found.get(name, 0) for name in names], color="tab:gray")
    batches.set_title("largest global batch in memory")
    for offset, block, colour in ((-0.2, "largest", "tab:gray"), (0.2, "equal", "tab:blue")):
        timed = [line for line in lines if line.block == block and line.images_per_second]
        middles = [median(line.images_per_second) for line in timed]
        spread = [
            [middle - min(line.images_per_second) for middle, line in zip(middles, timed)],
            [max(line.images_per_second) - middle for middle, line in zip(middles, timed)],
        ]
        places = [names.index(line.name) + offset for line in timed]
        rates.bar(places, middles, width=0.4, yerr=spread, capsize=3, color=colour, label=f"{block} batch")
    rates.set_xticks(range(len(names)), names)
    rates.set_title("images/s, median and spread")
    rates.legend()
    for axes in (batches, rates):
        axes.tick_params(axis="x", rotation=30)
