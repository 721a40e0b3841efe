"""The tables of ``ddp_vs_pipe``: rows, what was published beside them, who wins, pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

from matplotlib.figure import Figure

from benchmarks.support.table import Row, write_table

__all__ = ["DDP", "EPOCHS", "Frozen", "Line", "Shape", "probe_table", "speed_table"]

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

_PROBED = (
    "64: data 3.25, forward 471, backward 8.64 ms, 200/s, 1.57 syncs/s",
    "320: data 15.9, forward 2313, backward 31.2 ms, 240/s, 0.376 syncs/s",
)


@dataclass(frozen=True, slots=True)
class Shape:
    """Ranks of this job: pipelines of ``ranks_per_node``, one on each of ``nodes`` (simulated) machines."""

    ranks_per_node: int
    nodes: int

    @property
    def world_size(self) -> int:
        return self.ranks_per_node * self.nodes

    def __str__(self) -> str:
        return f"{self.nodes} x {self.ranks_per_node}"


@dataclass(frozen=True, slots=True)
class Line:
    """The figures of one method at one batch.

    Attributes:
        block: "largest" or "equal". chunks, bubble: of a pipeline. replicas: that share the batch.
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


@dataclass(frozen=True, slots=True)
class Frozen:
    """One row of the all-frozen probe: ``batch`` a machine; seconds of every round, by phase."""

    batch: int
    global_batch: int
    prefix: str
    seconds: tuple[float, ...]
    data: tuple[float, ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    reduced_bytes: int


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
        "published: GPUs a machine: batch, memory a GPU, images/s, minutes, on 2 machines; its 'OOM' rows are the "
        "smallest batch that it names as too large.",
        *notes,
        *_verdict(lines, device=device),
    )
    draw = partial(_draw_speed, lines)
    return write_table(
        f"ddp-vs-pipe-{shape.nodes}x{shape.ranks_per_node}", rows, title=title, notes=told, draw=draw, folder=folder
    )


def _ddp_of(lines: Sequence[Line], line: Line) -> Line | None:
    found = [other for other in lines if (other.block, other.method) == (line.block, DDP) and other.images_per_second]
    return found[0] if found else None


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
        "time": EPOCHS * _IMAGES / median(rates) / 60 if rates else None,
        "published": _published(line, shape=shape) if line.block == "largest" else None,
    }


def _published(line: Line, *, shape: Shape) -> str | None:
    """Of the same shape; where the original has no such one, of all of its shapes."""
    if line.chunks is None and line.method != DDP:
        return None
    own = [p for p in _PUBLISHED if p.gpus == shape.ranks_per_node] or _PUBLISHED
    same = [p for p in own if p.chunks == line.chunks and (p.images_per_second is not None) == line.fits]
    return "; ".join(map(str, same)) or None


def _verdict(lines: Sequence[Line], *, device: str) -> list[str]:
    """The winner here, and its reasons."""
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
        most = max(largest, key=lambda line: line.batch)
        told.append(f"Largest global batch: {most.name}, {most.batch:,}.")
    return [
        *told,
        *_reason([line for line in lines if line.block == "equal" and line.images_per_second], device=device),
    ]


def _reason(equal: Sequence[Line], *, device: str) -> list[str]:
    """The reasons of the fastest at one batch."""
    pipes = [line for line in equal if line.bubble is not None]
    if not pipes or len(pipes) == len(equal):
        return []
    waits = ", ".join(f"{line.bubble:.0%} of a step with {line.name}" for line in pipes)
    best = max(equal, key=lambda line: median(line.images_per_second))
    price = f"a pipeline's ranks wait for each other (predicted: {waits}) and send activations"
    gain = "sums over the machines only what a stage's weights are, where data parallelism sums the whole model's"
    if best.bubble is not None:
        return [f"Why a pipeline wins: {price}, but each {gain}, and that is worth more here."]
    cores = "Ranks that share cores can use what others wait, but no pipeline computes less. " * (device == "cpu")
    return [
        f"Why data parallelism wins: {price}. {cores}What a pipeline has for it: each rank holds a stage, so that "
        f"larger batches may fit, and {gain}; here that is worth less."
    ]


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
        axes.tick_params(axis="x", rotation=20)


def probe_table(
    found: Sequence[Frozen], *, shape: Shape, device: str, scale: str, folder: Path, notes: Sequence[str]
) -> Path:
    title = f"All blocks frozen, the head alone trains, {shape} ranks ({scale}, {device})"
    published = dict(zip(sorted({frozen.batch for frozen in found}), _PROBED))
    rows = [_probe_row(frozen, shape=shape, published=published) for frozen in found]
    notes = (
        "batch: of one machine, which is one pipeline of the original. Medians of interleaved rounds; forward is the "
        "frozen prefix and the head. images/s: of the whole job, with least and most.",
        "syncs/s: the original's 'communication frequency (cross machine sync/second)', one a step. reduced: bytes of "
        "gradient that our reducer sums over all ranks a step; the original's size_params_ddp_sum rounds to 0.",
        "bytes/s: what a rank sends for that, by a ring 2 (d - 1) / d of the bytes with d replicas, x syncs/s.",
        "Our trainer has no pipeline any more where all is frozen: every rank is a replica and runs the prefix on its "
        "share. The original sent all batches through its pipelines, and had no cache here.",
        *notes,
    )
    return write_table(
        "ddp-vs-pipe-frozen", rows, title=title, notes=notes, draw=partial(_draw_probe, found), folder=folder
    )


def _probe_row(frozen: Frozen, *, shape: Shape, published: Mapping[int, str]) -> Row:
    rates = [frozen.global_batch / seconds for seconds in frozen.seconds]
    syncs = 1 / median(frozen.seconds)
    sent = 2 * (shape.world_size - 1) / shape.world_size * frozen.reduced_bytes
    return {
        "batch": frozen.batch,
        "global batch": frozen.global_batch,
        "prefix": frozen.prefix,
        "data ms": 1e3 * median(frozen.data),
        "forward ms": 1e3 * median(frozen.forward),
        "backward ms": 1e3 * median(frozen.backward),
        "images/s": median(rates),
        "least": min(rates),
        "most": max(rates),
        "syncs/s": syncs,
        "reduced": frozen.reduced_bytes,
        "bytes/s": sent * syncs,
        "published": published.get(frozen.batch) if frozen.prefix == "computed" else None,
    }


def _draw_probe(found: Sequence[Frozen], figure: Figure) -> None:
    axes = figure.subplots()
    names = [f"batch {frozen.batch}\nprefix {frozen.prefix}" for frozen in found]
    below = [0.0] * len(found)
    for phase in ("data", "forward", "backward"):
        heights = [1e3 * median(getattr(frozen, phase)) for frozen in found]
        axes.bar(names, heights, bottom=below, label=phase)
        below = [low + height for low, height in zip(below, heights)]
    axes.set_ylabel("ms of a step")
    axes.legend()
