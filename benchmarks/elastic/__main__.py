"""Freezing beside not freezing: metric and seconds of whole runs, over many seeds.

    pipetransformer bench elastic --sst2 FOLDER --model FOLDER [--rows NAME ...] [--seeds N] [--minutes M]

Each run is a cell: it is kept in elastic-TASK-runs.json when it ends, and the command given again does what is missing,
as long as package, benchmark, libraries and machine are the same. --minutes ends it before the next cell, and the table
says which are missing. Rows take turns, seed by seed, so that a slow hour of the machine meets all of them.

Target: the mean final metric of the runs without freezing, less 0.3 points. Time to target is of the first evaluation
that reaches it, evaluations excluded; the same number of steps lies between two of them in all rows.
"""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import mean, median, stdev
from time import monotonic

import torch
from matplotlib.figure import Figure
from scipy.stats import t as student

from benchmarks.elastic.cells import Cell, Figures
from benchmarks.elastic.tasks import BASELINE, ROWS, TUNED, Task, texts
from benchmarks.support.command_line import add_output, bench_parser
from benchmarks.support.kept import KeptRows
from benchmarks.support.sst2 import hold_out
from benchmarks.support.table import Row as TableRow
from benchmarks.support.table import write_table
from pipetransformer.errors import UserError
from pipetransformer.launch.arguments import count
from pipetransformer.launch.entry import run_guarded
from pipetransformer.process.device import has_bfloat16

NUM_TRAIN, NUM_HELD_OUT = 2000, 4500
NAMES = [row.name for row in ROWS]


def main() -> None:
    parser = bench_parser("elastic", description=__doc__)
    parser.add_argument("--sst2", type=Path, required=True, metavar="FOLDER", help="the task's train.tsv and dev.tsv")
    parser.add_argument("--model", type=Path, required=True, metavar="FOLDER", help="a saved encoder of 6 or 12 blocks")
    parser.add_argument("--rows", nargs="+", choices=NAMES, default=NAMES, metavar="NAME", help=f"of {NAMES}")
    parser.add_argument("--seeds", type=count, default=8, help="most seeds of a row (default 8)")
    parser.add_argument("--ranks", type=count, default=2, help="processes of one thread (default 2)")
    parser.add_argument("--minutes", type=count, default=None, help="begin no cell after so long")
    add_output(parser)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "SST-2"
        hold_out(arguments.sst2, data, num_train=NUM_TRAIN, num_held_out=NUM_HELD_OUT)
        task = texts(data, arguments.model, num_blocks=blocks_of(arguments.model))
        precision = "bfloat16" if has_bfloat16(torch.device("cpu")) else "float32"
        cells = [
            Cell(task, row, seed, arguments.ranks, precision)
            for seed in range(arguments.seeds)
            for row in ROWS
            if row.name in arguments.rows and seed < row.seeds
        ]
        kept = KeptRows(arguments.output / f"elastic-{task.name}-runs.json")
        stop = math.inf if arguments.minutes is None else monotonic() + 60 * arguments.minutes
        found = measured(cells, kept=kept, stop=stop)
    tell(task, cells, found, folder=arguments.output)


def blocks_of(model: Path) -> int:
    """Raises UserError for a folder that holds no model."""
    from transformers import AutoConfig

    try:
        return int(AutoConfig.from_pretrained(model).num_hidden_layers)
    except (OSError, ValueError) as error:
        raise UserError(f"--model: {model} holds no model ({' '.join(str(error).split())[:200]})") from error


def measured(cells: Sequence[Cell], *, kept: KeptRows, stop: float) -> dict[Cell, Figures]:
    """The figures of all cells that are kept or that are measured before ``stop``."""
    found = {cell: figures for cell in cells if (figures := cell.found(kept)) is not None}
    for cell in cells:
        if cell not in found and monotonic() < stop:
            found[cell] = figures = cell.measure(kept)
            told = f"{figures.final:.4f} in {figures.train_s:.1f} s, {figures.wall_s:.1f} s in all"
            print(f"{cell.name}: {told} ({len(found)} of {len(cells)} cells)", flush=True)
    return found


def tell(task: Task, cells: Sequence[Cell], found: Mapping[Cell, Figures], *, folder: Path) -> None:
    """Raises UserError where no run without freezing is there, which sets the target."""
    by_row = {name: [found[cell] for cell in cells if cell.row.name == name and cell in found] for name in NAMES}
    if not by_row[BASELINE]:
        raise UserError(f"--minutes: no run of {BASELINE!r} has ended, which sets the target; give more")
    target = mean(figures.final for figures in by_row[BASELINE]) - task.margin
    rows = [row_of(name, runs, by_row, target=target) for name, runs in by_row.items() if runs]
    missing = [cell.name for cell in cells if cell not in found]
    notes = [
        f"Target: {target:.4f}. {NUM_TRAIN:,} phrases; judged on the dev set and {NUM_HELD_OUT:,} full sentences of "
        f"which no phrase is trained on. {cells[0].ranks} ranks of one thread, {cells[0].precision}.",
        "±: half of the 95 % interval of the mean over seeds (Student's t).",
        f"Missing: {'; '.join(missing)}." if missing else "No cell is missing.",
    ]
    title = f"{task.name}: freezing beside not freezing"
    write_table(
        f"elastic-{task.name}",
        rows,
        title=title,
        notes=notes,
        draw=partial(_draw, by_row, target=target),
        folder=folder,
    )


def row_of(name: str, runs: Sequence[Figures], by_row: Mapping[str, Sequence[Figures]], *, target: float) -> TableRow:
    finals = [run.final for run in runs]
    reached = [seconds for run in runs if (seconds := run.seconds_to(target)) is not None]
    floors = [run.floor_s / run.train_s for run in runs if run.floor_s]
    return {
        "row": name,
        "seeds": len(runs),
        "final": mean(finals),
        "±": half_interval(finals),
        "best": mean(run.best for run in runs),
        "train s": median(run.train_s for run in runs),
        "wall s": median(run.wall_s for run in runs),
        "to target s": median(reached) if reached else None,
        "reached": f"{len(reached)} of {len(runs)}",
        "x no freeze": ratio([run.train_s for run in by_row[BASELINE]], [run.train_s for run in runs]),
        "to target, x no freeze": target_ratio(by_row[BASELINE], runs, target=target),
        "to target, x tuned": target_ratio(by_row[TUNED], runs, target=target),
        "floor over train": median(floors) if floors else None,
        "frozen blocks at step": ", ".join(f"{n} at {step}" for step, n in changes(runs[0].frozen)) or None,
    }


def changes(plans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The plans that changed the number of frozen blocks, from 0 blocks on."""
    found, now = [], 0
    for step, frozen in plans:
        if frozen != now:
            found.append((step, frozen))
            now = frozen
    return found


def half_interval(values: Sequence[float], *, level: float = 0.95) -> float | None:
    """Half of the confidence interval of the mean."""
    if len(values) < 2:
        return None
    return float(student.ppf((1 + level) / 2, len(values) - 1)) * stdev(values) / math.sqrt(len(values))


def ratio(theirs: Sequence[float], ours: Sequence[float]) -> float | None:
    """How many times faster ours are, by medians."""
    return median(theirs) / median(ours) if theirs and ours else None


def target_ratio(theirs: Sequence[Figures], ours: Sequence[Figures], *, target: float) -> float | None:
    """The same of times to target; None where half or more of either miss it."""
    times = [[seconds for run in runs if (seconds := run.seconds_to(target)) is not None] for runs in (theirs, ours)]
    if any(2 * len(reached) <= len(runs) for reached, runs in zip(times, (theirs, ours))):
        return None
    return ratio(*times)


def _draw(by_row: Mapping[str, Sequence[Figures]], figure: Figure, *, target: float) -> None:
    axes = figure.subplots()
    for number, (name, runs) in enumerate((name, runs) for name, runs in by_row.items() if runs):
        points = zip(*(run.curve for run in runs))  # of the same evaluation
        seconds, metrics = zip(*((mean(s for s, _ in at), mean(m for _, m in at)) for at in points))
        axes.plot(seconds, metrics, marker="o", markersize=3, color=f"C{number % 10}", label=name)
    axes.axhline(target, color="black", linestyle="--", linewidth=1, label="target")
    axes.set_xlabel("seconds of training")
    axes.set_ylabel("metric, mean over seeds")
    axes.legend(fontsize=8)


if __name__ == "__main__":
    sys.exit(run_guarded(main))
