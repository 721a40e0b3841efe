"""Drawings of plans, schedules and partitions. Imported by commands that draw alone, for it imports matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from pipetransformer.graphs.analysis.report import PartitionReport
from pipetransformer.graphs.graph import Graph
from pipetransformer.pipe.planner.step_simulator import Timeline
from pipetransformer.simulation.run import Segment

_COLOURS = {"F": "#4c78a8", "B": "#f58518", "I": "#ffbf79", "W": "#e3c23c"}
_NAMES = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights"}


def draw_run(segments: Sequence[Segment], timeline: Timeline, *, path: Path) -> None:
    """Draw a run: above, blocks, pipeline length and step time over epochs; below, the first plan's step by rank."""
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(10, 7), layout="constrained")
    _draw_segments(top, segments)
    draw_timeline(bottom, timeline, title=f"step of epoch {segments[0].first_epoch + 1}")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _draw_segments(axes: Axes, segments: Sequence[Segment]) -> None:
    edges = [segment.first_epoch for segment in segments]
    edges.append(segments[-1].first_epoch + segments[-1].num_epochs)

    def draw(on: Axes, values: Sequence[float], *, colour: str, label: str) -> None:
        on.stairs(values, edges, baseline=None, linewidth=2, color=colour, label=label)

    draw(axes, [s.prediction.plan.frozen for s in segments], colour="#4c78a8", label="frozen blocks")
    draw(axes, [s.prediction.plan.pp for s in segments], colour="#54a24b", label="pipeline length")
    axes.set_xlabel("epoch")
    axes.set_ylabel("blocks, ranks")
    axes.set_ylim(bottom=0)
    times = axes.twinx()
    draw(times, [1e3 * s.prediction.step_seconds for s in segments], colour="#f58518", label="step time")
    times.set_ylabel("milliseconds a step")
    times.set_ylim(bottom=0)
    handles = [handle for part in (axes, times) for handle in part.get_legend_handles_labels()[0]]
    _legend_below(axes, handles=handles)
    axes.set_title("the run")


def draw_timeline(axes: Axes, timeline: Timeline, *, title: str) -> None:
    """Draw a step: a bar a rank, with gaps for bubbles.

    A backward that leaves nothing for later, or all (stage 0 under zero bubble), is drawn as whole.
    """
    drawn: set[str] = set()
    empty = {span.work[1:] for span in timeline.spans if span.work.kind in "IW" and span.stop == span.start}
    for span in timeline.spans:
        if span.stop == span.start:
            continue
        kind = "B" if span.work.kind in "IW" and span.work[1:] in empty else span.work.kind
        axes.barh(
            span.rank,
            (span.stop - span.start) / 1e6,
            left=span.start / 1e6,
            color=_COLOURS[kind],
            edgecolor="white",
            linewidth=0.3,
            label=None if kind in drawn else _NAMES[kind],
        )
        drawn.add(kind)
    ranks = sorted({span.rank for span in timeline.spans})
    axes.set_yticks(ranks, [f"rank {rank}" for rank in ranks])
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds")
    axes.set_title(f"{title}: {100 * timeline.bubble:.0f} % bubble until the last backward")
    end = "end: gradients summed, weights updated"
    axes.axvline(timeline.total / 1e6, color="black", linestyle="--", linewidth=1, label=end)
    _legend_below(axes)


def _legend_below(axes: Axes, *, ncols: int = 3, **options: Any) -> None:
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=ncols, frameon=False, **options)


def draw_partition(graph: Graph, report: PartitionReport, *, path: Path) -> None:
    """Draw a partition: left, units in order, coloured by part, and edges as arcs; right, real times of the parts."""
    cuts = (0, *report.boundaries, graph.num_units)
    height = 4.5 + 0.25 * len(cuts)  # a line of the legend for each part
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, height), width_ratios=(3, 1), layout="constrained")
    part_of = [part for part, (first, stop) in enumerate(pairwise(cuts)) for _ in range(first, stop)]
    colours = plt.get_cmap("tab10")
    for tensor in graph.tensors:
        for consumer in tensor.consumers:
            crosses = part_of[tensor.producer] != part_of[consumer]
            span = consumer - tensor.producer
            if span > 1 or crosses:
                _draw_arc(left, tensor.producer, consumer, crosses=crosses)
    for part, (first, stop) in enumerate(pairwise(cuts)):
        left.bar(
            range(first, stop),
            [-1.0] * (stop - first),
            width=0.9,
            color=colours(part % 10),
            label=f"part {part}: {graph.units[first].name} to {graph.units[stop - 1].name}",
        )
    left.set_xlabel("unit")
    left.set_yticks([])
    left.set_title(f"{graph.num_units} units, {len(report.edges)} cutting edges (a red arc for each use)")
    _legend_below(left, ncols=1)  # names are long
    parts = range(len(cuts) - 1)
    right.bar(parts, report.real.forward, color=_COLOURS["F"], label="forward")
    right.bar(parts, report.real.backward, bottom=report.real.forward, color=_COLOURS["B"], label="backward")
    right.axhline(sum(report.real.both) / len(parts), color="black", linestyle="--", linewidth=1, label="balanced")
    right.set_xticks(list(parts))
    right.set_xlabel("part")
    right.set_ylabel("milliseconds, measured")
    _legend_below(right, ncols=1)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _draw_arc(axes: Axes, first: int, last: int, *, crosses: bool) -> None:
    middle, half = (first + last) / 2, (last - first) / 2
    angles = np.linspace(0.0, np.pi, 30)
    axes.plot(
        middle - half * np.cos(angles),
        np.sqrt(half) * np.sin(angles),
        color="#d62728" if crosses else "#999999",
        linewidth=1.2 if crosses else 0.5,
        zorder=3 if crosses else 1,
    )
