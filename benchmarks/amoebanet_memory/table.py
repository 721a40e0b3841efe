"""The published table beside ours, torchgpipe's own and the planner's prediction, at the original's sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.amoebanet_memory.jobs import BYTES_PER_PARAMETER, Model
from benchmarks.amoebanet_memory.original import Original
from benchmarks.support.graphs import Setting
from benchmarks.support.table import Row, write_table
from benchmarks.support.torchgpipe import require_torchgpipe

__all__ = ["draw", "row_of", "write_original"]

GIB = 2**30
Published = Mapping[str, tuple[str, str, str, str | None]]
# Layers of each stage: the stem, cells, the classifier.
BALANCES = {
    "naive-1": (24,),
    "pipeline-1": (24,),
    "pipeline-2": (16, 8),
    "pipeline-4": (16, 12, 7, 7),
    "pipeline-8": (23, 16, 11, 6, 6, 5, 5, 6),
}
NOTES = (
    "Batch 128, 224 x 224, 10 classes; pipelines in 128 micro-batches, except_last, naive-1 in one.",
    "Bytes of tensors alive above weights and gradients in a step that finds gradients in place, of each device at its "
    "own peak, counted on torch's meta device. 128 micro-batches: on the line through the real schedules of three runs "
    "of a few more micro-batches than devices where these are on one, else run whole. Model: 12 bytes a parameter, as "
    "the original's.",
    "Ours recomputes cell by cell and keeps what enters each cell of every micro-batch; torchgpipe recomputes a whole "
    "partition at once and keeps what enters that. Both are cut at the same cells, by the balances of the original's "
    "script (benchmarks/amoebanetd-memory at a471026).",
    "Published are bytes that the allocator had reserved, less the model. torchgpipe reserved: by the rules of torch's "
    "CUDA allocator, its rounding and fragments being those of the longest of the three runs. What is published beyond "
    "that is neither; nothing here can tell libraries' workspaces from it.",
    "The base is pipeline-1: naive-1 runs its batch at once and recomputes nothing.",
)


def write_original(
    models: Mapping[str, Model], settings: Sequence[Setting], published: Published, *, folder: Path
) -> None:
    """Prints and writes ``amoebanet-memory-original``. Raises UserError without torchgpipe."""
    require_torchgpipe()
    rows: list[dict[str, str | int | float | None]] = []
    for setting in settings:
        rows.append(row_of(setting, models[setting.name], published[setting.name], image_size=224))
        print(" ".join(f"{name}: {value};" for name, value in rows[-1].items()), flush=True)
    base = {row["experiment"]: row for row in rows}["pipeline-1"]
    for row in rows:
        is_pipeline = row["experiment"] != "naive-1"
        row["model over pipeline-1"] = float(row["model GiB"] or 0) / float(base["model GiB"] or 1)
        row["memory over pipeline-1"] = _all(row) / _all(base) if is_pipeline else None
    title = "AmoebaNet-D memory at the original's sizes"
    write_table(
        "amoebanet-memory-original", rows, title=title, notes=NOTES, draw=lambda to: draw(to, rows), folder=folder
    )


def row_of(
    setting: Setting, model: Model, published: tuple[str, str, str, str | None], *, image_size: int
) -> dict[str, str | int | float | None]:
    original = Original(setting, model, balance=BALANCES[setting.name], image_size=image_size)
    number = model.num_parameters
    ours, predicted = original.of_ours(), original.predicted()
    theirs = original.of_torchgpipe() if setting.checkpoint is not None else None
    reserved = original.reserved_of_torchgpipe() if setting.checkpoint is not None else None
    shape, parameters, memory, activations = published
    return {
        "experiment": setting.name,
        "AmoebaNet-D (L, F)": str(model),
        "parameters": number,
        "published parameters": parameters,
        "model GiB": BYTES_PER_PARAMETER * number / GIB,
        "published model": memory,
        "ours GiB": sum(ours) / GIB,
        "predicted GiB": sum(predicted) / GIB,
        "torchgpipe GiB": None if theirs is None else sum(theirs) / GIB,
        "torchgpipe reserved GiB": None if reserved is None else sum(reserved) / GIB,
        "published activations": activations,
        "published beyond reserved, GiB a device": _beyond(activations, reserved),
        "ours by rank GiB": _list(ours),
        "predicted by rank GiB": _list(predicted),
        "torchgpipe by device GiB": None if theirs is None else _list(theirs),
    }


def _beyond(activations: str | None, reserved: Sequence[int] | None) -> float | None:
    if activations is None or reserved is None:
        return None
    return (float(activations.removesuffix("GB")) - sum(reserved) / GIB) / len(reserved)


def _list(numbers: Sequence[int]) -> str:
    return " ".join(f"{number / GIB:.2f}" for number in numbers)


def _all(row: Row) -> float:
    return float(row["model GiB"] or 0) + float(row["ours GiB"] or 0)


def draw(figure: Figure, rows: Sequence[Row]) -> None:
    """Activations of all devices of a row, by source."""
    axes = figure.subplots()
    sources = ("ours GiB", "predicted GiB", "torchgpipe GiB", "published activations")
    for number, source in enumerate(sources):
        values = [float(str(row[source] or 0).removesuffix("GB")) for row in rows]
        places = [place + 0.2 * (number - 1.5) for place in range(len(rows))]
        axes.bar(places, values, width=0.19, label=source.removesuffix(" GiB"))
    axes.set_xticks(range(len(rows)), [f"{row['experiment']}\n{row['AmoebaNet-D (L, F)']}" for row in rows])
    axes.set_ylabel("peak activations, GiB")
    axes.legend()
