"""The summary on the screen at the end of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from statistics import median

from rich import box
from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.table import Column, Table
from rich.text import Text

from pipetransformer.run.tracking.summary import Summary

_MEGABYTE = 1e6


def render(summary: Summary) -> RenderableType:
    """``summary`` as tables of at most 80 columns. Strings of the user are shown unchanged, never read as markup."""
    parts: list[RenderableType] = [Rule(Text(f"run {summary.run_id}")), _facts(summary), Text(), _times(summary)]
    if summary.transitions:
        parts += [Text(), _transitions(summary)]
    return Group(*parts, Rule())


def _facts(summary: Summary) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, value in _fact_rows(summary):
        table.add_row(Text(name), Text(value))
    return table


def _fact_rows(summary: Summary) -> Iterator[tuple[str, str]]:
    yield "task", f"{summary.task}: {summary.model} on {summary.dataset}"
    length = f"{_count(summary.epochs, 'epoch')}, {_count(summary.steps, 'step')}"
    size = f"{summary.global_batch_size:,} samples on {_count(summary.world_size, 'rank')}"
    yield "length", f"{length} of {size}, seed {summary.seed}"
    if summary.resumed_from is not None:
        yield "resumed from", summary.resumed_from
    for name, value in summary.metrics.items():
        yield name, _metric(value, best=summary.best_metrics, name=name)
    if summary.samples_per_s:
        yield "samples/s", ", ".join(f"{value:,.0f}" for value in summary.samples_per_s) + " (by epoch)"
    if summary.peak_memory_bytes:
        yield "peak memory", ", ".join(map(_megabytes, summary.peak_memory_bytes)) + " (by rank)"
    yield "cache", _cache(summary)
    if summary.static_step_s is not None and (summary.transitions or summary.cache.hits):
        yield "without freezing", _unfrozen(summary, summary.static_step_s)
    if summary.train_s > 0 and summary.compute_floor_s > 0 and summary.t0_start_s:
        share = summary.compute_floor_s / summary.train_s
        yield (
            "compute floor",
            f"{summary.compute_floor_s:.1f} s of {summary.train_s:.1f} s trained = {share:.2f}: {_floor(summary)}",
        )


def _unfrozen(summary: Summary, step_s: float) -> str:
    """The time that the run would have taken with nothing frozen, beside its own: by the steps that were timed before
    and behind it, which differ as far as the machine's speed has moved.
    """
    steps, timed = [step_s], f"a step of {step_s * 1e3:,.0f} ms, timed before it"
    if summary.t0_start_s and summary.t0_end_s:
        steps.append(step_s * median(summary.t0_end_s) / median(summary.t0_start_s))
        timed = f"steps of {step_s * 1e3:,.0f} and {steps[-1] * 1e3:,.0f} ms, timed before and behind it"
    seconds = sorted(summary.steps * step for step in steps)
    about = " to ".join(f"{each:.1f}" for each in seconds)
    less = " to ".join(f"{summary.train_s / each - 1:+.0%}" for each in seconds)
    return f"about {about} s of training, by {timed}; this run: {summary.train_s:.1f} s ({less})"


def _floor(summary: Summary) -> str:
    told = f"against its own calibrated static step, {_spread(summary.t0_start_s)} before training"
    if summary.t0_end_s:
        told += f", {_spread(summary.t0_end_s)} behind it"
    if summary.compute_floor_s > summary.train_s:
        return f"{told}: the machine was slower while it was timed, and the share tells nothing"
    return f"{told}; compare the share of a no_freeze run" if summary.transitions else told


def _spread(seconds: Sequence[float]) -> str:
    return f"{median(seconds) * 1e3:,.0f} ms [{min(seconds) * 1e3:,.0f} .. {max(seconds) * 1e3:,.0f}]"


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}" + ("" if number == 1 else "s")


def _metric(value: float, *, best: Mapping[str, float], name: str) -> str:
    if name not in best:
        return f"{value:.4f} final"
    return f"{value:.4f} final, {best[name]:.4f} {'with the best weights' if name == 'loss' else 'best'}"


def _cache(summary: Summary) -> str:
    cache = summary.cache
    lookups = cache.hits + cache.misses
    if not lookups:
        return "not used"
    held = ", ".join(f"{_megabytes(size)} on {tier}" for tier, size in asdict(cache.bytes).items() if size)
    rate = f"{cache.hits:,} hits, {cache.misses:,} misses ({100 * cache.hits / lookups:.1f} % hit)"
    return f"{rate}; {held}" if held else rate


def _times(summary: Summary) -> Table:
    steps_s = summary.train_s - summary.transition_s - summary.cache_advance_s
    other_s = summary.wall_s - summary.train_s - summary.eval_s - summary.setup_s - summary.save_s
    rows = [
        ("train", summary.train_s),
        ("  steps", steps_s),
        ("  transitions", summary.transition_s),
        ("  cache advance", summary.cache_advance_s),
        ("evaluation", summary.eval_s),
        ("set-up", summary.setup_s),
        ("checkpoints", summary.save_s),
        ("other", other_s),
        ("wall", summary.wall_s),
    ]
    figures = (Column(title, justify="right") for title in ("seconds", "share"))
    table = Table("time", *figures, box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name, seconds in rows:
        share = seconds / summary.wall_s if summary.wall_s > 0 else 0.0
        table.add_row(name, f"{seconds:,.2f}", f"{100 * share:.1f} %")
    return table


def _transitions(summary: Summary) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for title in ("step", "epoch", "frozen", "pp x dp", "M"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("boundaries", max_width=15)
    for title in ("seconds", "MB moved"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("reason", ratio=1, min_width=12)
    for move in summary.transitions:
        table.add_row(
            str(move.step),
            str(move.epoch + 1),  # counted from 1, as on the bar
            str(move.frozen),
            f"{move.pp} x {move.dp}",
            str(move.microbatches),
            ", ".join(map(str, move.boundaries)) or "-",
            f"{move.seconds:.3f}",
            f"{move.bytes_moved / _MEGABYTE:,.1f}",
            Text(move.reason),
        )
    return table


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / _MEGABYTE:,.1f} MB"
