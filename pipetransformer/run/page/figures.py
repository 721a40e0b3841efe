"""The figures of a report, by matplotlib, as SVG that takes its colours from the page."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from typing import Any, cast

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from pipetransformer.run.page.history import History

_INK = "#010203"  # stands for the page's own colour of text
_COLOURS = ("#2f7ed8", "#e8743b", "#19a979", "#945ecf", "#d9a514", "#ed4a7b", "#13a4b4", "#6c8893")
_STYLE: dict[str, Any] = {
    **{
        "svg.fonttype": "none",
        "svg.hashsalt": "report",
        "font.size": 9,
        "axes.titlesize": 10,
        "font.family": "sans-serif",
    },
    **{
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.alpha": 0.25,
        "grid.linewidth": 0.6,
    },
    **dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "grid.color"), _INK
    ),
    **{"legend.frameon": False, "legend.fontsize": 8, "lines.linewidth": 1.6},
}
_PHASES = {"data": 7, "prefix": 3, "forward": 0, "backward": 1, "wait": 6, "reduction": 4, "optimizer": 2}


def _drawn(draw: Callable[[Axes], None], *, height: float = 2.7) -> str:
    """The SVG of one pair of axes, as wide as a telephone shows in its own size."""
    with matplotlib.rc_context(cast(Any, _STYLE)):
        figure = Figure(figsize=(5.4, height), layout="constrained")
        figure.patch.set_alpha(0.0)
        axes = figure.add_subplot()
        axes.patch.set_alpha(0.0)
        draw(axes)
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    text = text[text.index("<svg") :].replace(_INK, "currentColor")
    return re.sub(
        r'(<svg [^>]*?)height="[^"]*" ([^>]*?)width="[^"]*"|(<svg [^>]*?)width="[^"]*" ([^>]*?)height="[^"]*"',
        lambda m: "".join(part or "" for part in m.groups()),
        text,
        count=1,
    )


def _x(points: Sequence[Any], over: str) -> list[float]:
    return [getattr(point, over) for point in points]


def _label(axes: Axes, over: str, y: str) -> None:
    axes.set_xlabel("seconds of training" if over == "train_s" else "steps")
    axes.set_ylabel(y)


def metric(runs: Sequence[History], *, over: str) -> str:
    """The metric that decides, of every evaluation."""

    def draw(axes: Axes) -> None:
        for run, colour in zip(runs, cycle(_COLOURS)):
            y = [point.figures[run.best_by] for point in run.evaluations]
            axes.plot(_x(run.evaluations, over), y, marker="o", markersize=3, color=colour, label=run.run_id)
        if len(runs) > 1:
            axes.legend()
        _label(axes, over, runs[0].best_by.replace("_", " "))

    return _drawn(draw)


def loss(runs: Sequence[History], *, over: str) -> str:
    """Loss of training, and of evaluations (dashed)."""

    def draw(axes: Axes) -> None:
        for run, colour in zip(runs, cycle(_COLOURS)):
            axes.plot(_x(run.steps, over), [p.figures["loss"] for p in run.steps], color=colour, label=run.run_id)
            y = [point.figures["loss"] for point in run.evaluations]
            axes.plot(_x(run.evaluations, over), y, color=colour, linestyle="--", marker="o", markersize=3)
        if len(runs) > 1:
            axes.legend()
        _label(axes, over, "loss (dashed: evaluation)")

    return _drawn(draw)


def frozen(runs: Sequence[History]) -> str:
    """The number of frozen blocks over time, of runs beside each other."""

    def draw(axes: Axes) -> None:
        for run, colour in zip(runs, cycle(_COLOURS)):
            end = run.steps[-1].train_s if run.steps else 0.0
            x, y = _stairs(run, end)
            axes.step(x, y, where="post", color=colour, label=f"{run.run_id} (of {run.num_blocks})")
        axes.legend()
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylim(bottom=0)
        _label(axes, "train_s", "frozen blocks")

    return _drawn(draw)


def _stairs(run: History, end: float) -> tuple[list[float], list[int]]:
    x = [change.train_s for change in run.plans]
    y = [int(change.plan["frozen"]) for change in run.plans]
    return [*x, end], [*y, y[-1] if y else 0]


def freeze(run: History) -> str:
    """Blocks over steps: gradient norms by colour, what is frozen in grey, transitions as lines."""

    def draw(axes: Axes) -> None:
        edges = np.array([0, *(point.step for point in run.steps)], dtype=float)
        rows = np.arange(run.num_blocks + 1) - 0.5
        norms = np.ma.masked_invalid(np.log10(_norms(run)))
        if norms.count():
            mesh = axes.pcolormesh(edges, rows, norms, cmap="viridis")
            axes.figure.colorbar(mesh, ax=axes, pad=0.01).set_label("log10 of gradient norm")
        x, y = [*(float(change.step) for change in run.plans), edges[-1]], [int(c.plan["frozen"]) for c in run.plans]
        for first, stop, number in zip(x, x[1:], y):
            axes.fill_between([first, stop], -0.5, number - 0.5, color="#9aa4b0", linewidth=0)
        for change in run.plans[1:]:
            axes.axvline(change.step, color="#e8743b", linewidth=1.0)
        axes.set_ylim(-0.5, run.num_blocks - 0.5)
        axes.set_xlim(0, edges[-1])
        axes.grid(False)
        axes.set_xlabel("steps (orange: another plan; grey: frozen)")
        axes.set_ylabel("block")
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))

    return _drawn(draw, height=3.0)


def _norms(run: History) -> np.ndarray:
    """[blocks, points]: the last norm taken of each block, the next one before the first; none of what is frozen."""
    found = np.full((run.num_blocks, len(run.steps)), np.nan)
    last = next((point.figures["gradient_norms"] for point in run.steps if point.figures["gradient_norms"]), None)
    for column, point in enumerate(run.steps):
        last = point.figures["gradient_norms"] or last
        if last is not None:
            found[:, column] = [norm if norm > 0 else np.nan for norm in last]
    return found


def throughput(runs: Sequence[History]) -> str:
    """Samples a second."""

    def draw(axes: Axes) -> None:
        for run, colour in zip(runs, cycle(_COLOURS)):
            y = [point.figures["samples_per_s"] for point in run.steps]
            axes.plot(_x(run.steps, "step"), y, color=colour, label=run.run_id)
        if len(runs) == 1:
            before = ""
            for change in runs[0].plans:
                words = f"{change.plan['pp']} x {change.plan['dp']}"
                if words != before:
                    axes.annotate(words, (change.step, 1), xycoords=("data", "axes fraction"), fontsize=8)
                axes.axvline(change.step, color="#e8743b", linewidth=0.8)
                before = words
        else:
            axes.legend()
        axes.set_ylim(bottom=0)
        _label(axes, "step", "samples a second")

    return _drawn(draw)


def balance(run: History) -> str:
    """Seconds of a step on each rank, by phase, in the stretch of steps between two plans."""
    stretches = [*run.plans[1:], None]
    first, groups = 0, []
    for change in stretches:
        stop = run.total_steps + 1 if change is None else change.step
        points = [point for point in run.steps if first < point.step <= stop]
        first = stop
        if points:
            groups.append(points)

    def draw(axes: Axes) -> None:
        position, ticks = 0.0, []
        for points in groups:
            phases = points[0].figures["phase_seconds_by_rank"]
            num_steps = sum(point.figures["num_steps"] for point in points)
            for rank in range(len(next(iter(phases.values())))):
                bottom = 0.0
                for name, colour in _PHASES.items():
                    seconds = sum(
                        p.figures["phase_seconds_by_rank"].get(name, [0.0] * (rank + 1))[rank] for p in points
                    )
                    height = 1e3 * seconds / num_steps
                    label = name if position == 0.0 else None
                    axes.bar(position, height, bottom=bottom, color=_COLOURS[colour], width=0.8, label=label)
                    bottom += height
                ticks.append((position, f"r{rank}"))
                position += 1
            position += 0.7
        axes.set_xticks([x for x, _ in ticks], [name for _, name in ticks])
        axes.set_ylabel("milliseconds of a step")
        axes.set_xlabel("ranks, a group for each plan in turn")
        axes.legend(ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0))
        axes.grid(axis="x", visible=False)

    return _drawn(draw, height=3.0)


def timeline(name: str, work: Sequence[Mapping[str, Any]]) -> str:
    """A real step: the pieces of work of each rank over time, micro-batches by their numbers."""

    def draw(axes: Axes) -> None:
        ranks = sorted({piece["tid"] for piece in work})
        end = max(piece["ts"] + piece["dur"] for piece in work) / 1e3
        named = set[str]()
        for piece in work:
            kind, length = piece["cat"], piece["dur"] / 1e3
            label = None if kind in named else kind
            named.add(kind)
            colour = _COLOURS[_PHASES.get(kind, 7)]
            axes.barh(piece["tid"], length, left=piece["ts"] / 1e3, height=0.8, color=colour, label=label, linewidth=0)
            number = piece["args"].get("micro-batch")
            if number is not None and length > end / 40:
                centre = piece["ts"] / 1e3 + length / 2
                axes.text(centre, piece["tid"], str(number), ha="center", va="center", fontsize=7, color="#ffffff")
        axes.set_yticks(ranks, [f"rank {rank}" for rank in ranks])
        axes.invert_yaxis()
        axes.set_xlim(0, end)
        axes.set_xlabel(f"milliseconds of {name}")
        axes.grid(False)
        axes.legend(ncols=5, loc="lower center", bbox_to_anchor=(0.5, 1.0))

    return _drawn(draw, height=1.3 + 0.32 * len({piece["tid"] for piece in work}))


def cache(run: History) -> str:
    """The share of samples that were read from the cache."""

    def draw(axes: Axes) -> None:
        looked = [p for p in run.steps if p.figures["hits"] + p.figures["misses"]]
        y = [100 * p.figures["hits"] / (p.figures["hits"] + p.figures["misses"]) for p in looked]
        axes.plot(_x(looked, "step"), y, color=_COLOURS[2])
        axes.set_ylim(0, 105)
        axes.set_xlim(0, run.total_steps)
        _label(axes, "step", "% read from the cache")

    return _drawn(draw, height=2.2)


def memory(run: History) -> str:
    """The most memory of each rank."""

    def draw(axes: Axes) -> None:
        peaks = [size / 1e6 for size in run.summary["peak_memory_bytes"]]
        axes.bar([f"rank {rank}" for rank in range(len(peaks))], peaks, color=_COLOURS[3], width=0.6)
        axes.set_ylabel("MB at most")
        axes.grid(axis="x", visible=False)

    return _drawn(draw, height=2.2)


def times(parts: Sequence[tuple[str, float]]) -> str:
    """A bar whose parts are seconds by kind."""

    def draw(axes: Axes) -> None:
        left = 0.0
        for (name, seconds), colour in zip(parts, cycle(_COLOURS)):
            axes.barh(0, seconds, left=left, color=colour, label=f"{name} {seconds:.1f}")
            left += seconds
        axes.set_yticks([])
        axes.set_xlim(0, left or 1.0)
        axes.set_xlabel("seconds of the whole run")
        axes.grid(False)
        axes.legend(ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))

    return _drawn(draw, height=1.7)
