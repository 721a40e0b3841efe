"""Freezing beside not freezing: metric and seconds of whole runs, over many seeds.

    pipetransformer bench elastic --sst2 FOLDER --model FOLDER [--phrases N] [--tune] [--rows NAME ...] [--seeds N]
                                  [--first-seed N] [--minutes M]
    pipetransformer bench elastic --cifar100 FOLDER [--timm-train FILE | --tune] [--rows ...] [--seeds N] [--minutes M]
    pipetransformer bench elastic --squad FOLDER --model FOLDER [--rows NAME ...] [--seeds N] [--minutes M]
    pipetransformer bench elastic --pool TASK ...

Three tasks, one a call: phrases of SST-2; half of CIFAR-100's classes, with a ViT that is pre-trained on the other half
first, once; windows of SQuAD's questions.

Each run is a cell: it is kept in elastic-TASK-runs.json when it ends, and the command given again does what is missing,
as long as package, benchmark and libraries are the same, or known to give the same. --minutes ends it before the next
cell, and the table says which are missing. Rows take turns, seed by seed, so that a slow hour of the machine meets all
of them. A ratio is of two runs with one seed on one kind of processor, a difference of two that began with the same
weights. Runs are in bfloat16; a machine without it runs in float32, and its tables are named so (TASK-float32).

--tune gives a table of other learning rates and epochs, nothing frozen, and of numbers of frozen blocks over time, on
other phrases and sentences of SST-2, or other pictures of CIFAR-100: the rows "no freeze, tuned" of the other tables,
and the default, come from it.

--confirm measures cells again that older code has measured, and writes no table: where each learns the same, to the
bit, all cells of that code of the same rows count as those of today's.

--pool measures nothing: it takes the kept runs of tasks, as sst2-minilm-l6, and tells the accuracy of their rows
together.

Bound: how many times faster than without freezing the plans of a run could have been, blocks alone counted.

Target: the mean final metric of the runs without freezing, less 0.3 points; SQuAD's few questions have none. Time to
target is of the first evaluation that reaches it, evaluations excluded; as many samples lie between two of them in all
rows, but for those that the guard has set aside: rows that freeze do without them, which is a part of their speed.
"""

from __future__ import annotations

import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean, median
from time import monotonic

import torch
from matplotlib.figure import Figure

from benchmarks.elastic.cells import Cell, Figures
from benchmarks.elastic.judged import half_interval, is_as_good
from benchmarks.elastic.pooled import write_pooled
from benchmarks.elastic.redrawn import redraw
from benchmarks.elastic.same_code import confirm, same_codes
from benchmarks.elastic.split_cifar import SPLIT_SEED, class_names, class_split, pretrained, write_classes
from benchmarks.elastic.tasks import (
    BASELINE,
    NUM_HELD_OUT,
    NUM_PHRASES,
    PEER,
    PLANTED,
    REDRAWN,
    ROWS,
    TUNED,
    Row,
    Task,
    ladder_rows,
    pictures,
    questions,
    recipe_rows,
    texts,
)
from benchmarks.support.command_line import add_minutes, add_output, bench_parser, deadline, refuse_without_effect
from benchmarks.support.kept import KeptRows
from benchmarks.support.measure import spread
from benchmarks.support.sst2 import hold_out
from benchmarks.support.table import Row as TableRow
from benchmarks.support.table import write_table
from pipetransformer.errors import UserError
from pipetransformer.launch.arguments import Parser, count
from pipetransformer.launch.entry import run_guarded
from pipetransformer.process.device import has_bfloat16

TASKS = ("sst2", "cifar100", "squad")
_TUNING = ("sst2", 6), ("sst2", 12), ("cifar100", 12)
ALL_ROWS = (
    *(*ROWS, *PLANTED, *recipe_rows("sst2"), *recipe_rows("cifar100")),
    *(row for kind, num_blocks in _TUNING for row in ladder_rows(kind, num_blocks)),
)
NAMES = [row.name for row in ALL_ROWS]
Runs = Mapping[int, Figures]  # by seed
ByRow = Mapping[str, Runs]
_TUNING_SEED = 100  # the first of --tune, so that nothing is chosen by what it is judged by


def make_parser() -> Parser:
    parser = bench_parser("elastic", description=__doc__)
    parser.add_argument("--sst2", type=Path, metavar="FOLDER", help="SST-2's train.tsv and dev.tsv; with --model")
    parser.add_argument("--cifar100", type=Path, metavar="FOLDER", help="its parquet files; pre-trains a model once")
    parser.add_argument("--squad", type=Path, metavar="FOLDER", help="its train*.json and dev*.json; with --model")
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="a saved encoder; of 6 or 12 blocks for --sst2")
    parser.add_argument("--phrases", type=count, default=None, help=f"of --sst2, to train on (default {NUM_PHRASES})")
    parser.add_argument("--tune", action="store_true", help="other recipes, other ways to freeze; not of --squad")
    parser.add_argument("--timm-train", type=Path, metavar="FILE", help="timm's train.py, the peer of --cifar100")
    parser.add_argument(
        "--rows",
        nargs="+",
        choices=NAMES,
        metavar="NAME",
        help=f"of {[row.name for row in ROWS]}, where the task has them",
    )
    parser.add_argument("--seeds", type=count, default=8, help="most seeds of a row (default 8)")
    parser.add_argument("--first-seed", type=partial(count, least=0), default=0, help="of them (default 0)")
    parser.add_argument("--ranks", type=count, default=2, help="processes of one thread (default 2)")
    add_minutes(parser, what="cell")
    parser.add_argument("--confirm", action="store_true", help="cells of older code again: do they learn the same?")
    parser.add_argument("--pool", nargs="+", metavar="TASK", help="tasks whose kept runs to judge together")
    add_output(parser)
    return parser


def main() -> None:
    parser = make_parser()
    arguments = parser.parse_args()
    if arguments.pool is not None:
        own = sorted({*vars(arguments)} - {"pool", "output"})
        refuse_without_effect(parser, arguments, *own, where="--pool")
        write_pooled(arguments.pool, folder=arguments.output)
        return
    chosen = chosen_task(parser, arguments)
    stop = deadline(arguments)
    precision = "bfloat16" if has_bfloat16(torch.device("cpu")) else "float32"
    with tempfile.TemporaryDirectory() as folder:
        task = of_precision(make_task(chosen, arguments, precision=precision, scratch=Path(folder)), precision)
        rows = rows_of(task, arguments.rows)
        cells = [
            Cell(task, row, seed, arguments.ranks, precision)
            for number, seed in enumerate(seeds_of(arguments))
            for row in rows
            if number < row.seeds
        ]
        kept = KeptRows(arguments.output / f"elastic-{task.name}-runs.json")
        if arguments.confirm:
            confirm(cells, kept=kept, folder=arguments.output)
            return
        found = measured(cells, kept=kept, stop=stop, codes=partial(same_codes, arguments.output, task=task.name))
    tell(task, cells, found, folder=arguments.output)


def chosen_task(parser: Parser, arguments: Namespace) -> str:
    """The one of ``TASKS`` that is given. Raises UserError for none and for two, and for options that do not fit it."""
    given, known = [name for name in TASKS if getattr(arguments, name) is not None], "--sst2, --cifar100 and --squad"
    if not given:
        raise UserError(f"--sst2: missing; give one of {known}")
    if len(given) > 1:
        raise UserError(f"--{given[1]}: cannot go with --{given[0]}; give one of {known}")
    (chosen,) = given
    if chosen != "sst2":
        refuse_without_effect(parser, arguments, "phrases", where=f"--{chosen}")
    if chosen == "squad":
        refuse_without_effect(parser, arguments, "tune", where="--squad")
    if chosen == "cifar100":
        refuse_without_effect(parser, arguments, "model", where="--cifar100")
        if arguments.tune:
            refuse_without_effect(parser, arguments, "timm_train", where="--tune")
        timm = arguments.timm_train
        if timm is not None and not timm.is_file():
            raise UserError(f"--timm-train: {timm} is no file; give timm's train.py")
        if timm is None and PEER in (arguments.rows or ()):
            raise UserError(f"--rows: {PEER!r} of --cifar100 is timm's script; give --timm-train FILE, or leave it out")
    else:
        refuse_without_effect(parser, arguments, "timm_train", where=f"--{chosen}")
        if arguments.model is None:
            raise UserError(f"--model: missing; give --{chosen} the folder of a saved encoder")
    if arguments.rows and BASELINE not in arguments.rows and chosen != "squad" and not arguments.confirm:
        raise UserError(f"--rows: {BASELINE!r} sets the target; add it, what is kept is not measured again")
    return chosen


def make_task(chosen: str, arguments: Namespace, *, precision: str, scratch: Path) -> Task:
    """Writes its data to ``scratch``, where they are not taken as they are; pre-trains its model, where it has none."""
    if chosen == "cifar100":
        timm, tunes = arguments.timm_train, arguments.tune
        return split_pictures(arguments.cifar100, timm=timm, tunes=tunes, precision=precision, scratch=scratch)
    num_blocks = blocks_of(arguments.model)
    if chosen == "squad":
        return questions(arguments.squad.resolve(), arguments.model, num_blocks=num_blocks)
    num_phrases, tunes = arguments.phrases or NUM_PHRASES, arguments.tune
    data = scratch / "SST-2"
    task = texts(data, arguments.model, num_blocks=num_blocks, num_phrases=num_phrases, tunes=tunes)
    if REDRAWN in task.row_names:
        redraw(arguments.model, scratch / "redrawn", num_blocks=num_blocks // 2)
    write = partial(hold_out, arguments.sst2, num_train=num_phrases, num_held_out=NUM_HELD_OUT)
    if not tunes:
        write(data, part="judged")
    for seed in seeds_of(arguments) if tunes else ():
        write(data / str(seed), part="tuned", seed=seed)
    return task


def of_precision(task: Task, precision: str) -> Task:
    """The task under a name of its own where the machine has no bfloat16: its runs must not replace those of one that
    has."""
    return replace(task, name=name_of(task.name, precision))


def name_of(name: str, precision: str) -> str:
    """Of a table or a task: as it is in bfloat16."""
    return name if precision == "bfloat16" else f"{name}-{precision}"


def seeds_of(arguments: Namespace) -> range:
    """The seeds of a table: those of ``--tune`` are others than those of the table that its choices are judged by."""
    first = arguments.first_seed + (_TUNING_SEED if arguments.tune else 0)
    return range(first, first + arguments.seeds)


def split_pictures(source: Path, *, timm: Path | None, precision: str, scratch: Path, tunes: bool = False) -> Task:
    first, others = class_split(len(class_names(source)), seed=SPLIT_SEED)
    content = write_classes(source, scratch / "pictures", classes=others, part="tuned" if tunes else "judged")
    model = pretrained(source, classes=first, precision=precision, scratch=scratch)
    return pictures(
        scratch / "pictures",
        model.folder,
        about=f"A ViT of 12 blocks, pre-trained on {len(first)} classes (accuracy {model.accuracy:.3f}).",
        origin=(model.folder.name, content),
        start=model.digest,
        timm=timm,
        tunes=tunes,
    )


def rows_of(task: Task, names: Sequence[str] | None) -> list[Row]:
    """The task's rows, or those of them that are named. Raises UserError for a name that it has not."""
    for name in names or ():
        if name not in task.row_names:
            raise UserError(f"--rows: {task.name} has no {name!r}; give some of {', '.join(map(repr, task.row_names))}")
    return [row for row in ALL_ROWS if row.name in (names or task.row_names)]


def blocks_of(model: Path) -> int:
    """Raises UserError for a folder that holds no model."""
    from transformers import AutoConfig

    try:
        return int(AutoConfig.from_pretrained(model).num_hidden_layers)
    except (OSError, ValueError) as error:
        raise UserError(f"--model: {model} holds no model ({' '.join(str(error).split())[:200]})") from error


def measured(
    cells: Sequence[Cell], *, kept: KeptRows, stop: float, codes: Callable[[str], Collection[str]]
) -> dict[Cell, Figures]:
    """The figures of all cells that are kept, by code of the digests for their row, or that are measured before
    ``stop``."""
    found = {cell: figures for cell in cells if (figures := cell.found(kept, codes=codes(cell.row.name))) is not None}
    for cell in cells:
        if cell not in found and monotonic() < stop:
            found[cell] = figures = cell.measure(kept)
            told = f"{figures.final:.4f} in {figures.train_s:.1f} s, {figures.wall_s:.1f} s in all"
            print(f"{cell.name}: {told} ({len(found)} of {len(cells)} cells)", flush=True)
    return found


def tell(task: Task, cells: Sequence[Cell], found: Mapping[Cell, Figures], *, folder: Path) -> None:
    """Raises UserError where no run is there, or none without freezing, which sets the target."""
    by_row = {name: {c.seed: found[c] for c in cells if c.row.name == name and c in found} for name in NAMES}
    if not found:
        raise UserError("--minutes: no run has ended; give more")
    target = None
    if task.margin is not None and BASELINE in task.row_names:
        if not by_row[BASELINE]:
            raise UserError(f"--minutes: no run of {BASELINE!r} has ended, which sets the target; give more")
        target = mean(figures.final for figures in by_row[BASELINE].values()) - task.margin
    rows = [row_of(name, by_row, task=task, target=target) for name, runs in by_row.items() if runs]
    missing = [cell.name for cell in cells if cell not in found]
    notes = [
        f"{'No target' if target is None else f'Target: {target:.4f}'}. {task.about} {cells[0].ranks} ranks of one "
        f"thread, {cells[0].precision}.",
        "±: half of the 95 % interval of the mean over seeds (Student's t), of the difference to no freeze at the same "
        "seed: of the 90 % interval. Other figures: medians, of ratios with the least and the most; a ratio is of two "
        f"runs with one seed on one kind of processor, here {' and '.join(sorted({f.cpu for f in found.values()}))}.",
        "As good: no, where the upper end of that interval lies below 0, or the mean below -0.3 points with a standard "
        "error of at most 0.2. Loss less: the last evaluation's less that of no freeze at the same seed, with half of "
        "its 90 % interval; it tells small differences sooner than a share of right answers does.",
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


def row_of(name: str, by_row: ByRow, *, task: Task, target: float | None) -> TableRow:
    runs, without = list(by_row[name].values()), by_row[BASELINE]
    finals, reached = [run.final for run in runs], times_to(target, runs)
    pairs = [own.final - other.final for other, own in pairs_of(without, by_row[name])]
    told = [(own.loss, other.loss) for other, own in pairs_of(without, by_row[name])]
    losses = [own - other for own, other in told if own is not None and other is not None]
    floors = [run.floor_s / run.train_s for run in runs if run.floor_s]
    epochs = task.epochs_of(next(row for row in ALL_ROWS if row.name == name))
    bounds = [b for run in runs if (b := run.bound(num_blocks=task.num_blocks, epochs=epochs)) is not None]
    return {
        "row": name,
        "seeds": len(runs),
        "final": mean(finals),
        "±": half_interval(finals),
        "less no freeze": mean(pairs) if pairs and name != BASELINE else None,
        "± of it": half_interval(pairs, level=0.9) if name != BASELINE else None,
        "as good": None if name == BASELINE else {None: None, True: "yes", False: "no"}[is_as_good(pairs)],
        "best": mean(run.best for run in runs),
        "± of best": half_interval([run.best for run in runs]),
        "loss less": mean(losses) if losses and name != BASELINE else None,
        "± of that": half_interval(losses, level=0.9) if name != BASELINE else None,
        "train s": median(run.train_s for run in runs),
        "guard s": median(run.guard_s for run in runs),
        "wall s": median(run.wall_s for run in runs),
        "to target s": median(reached) if reached else None,
        "reached": None if target is None else f"{len(reached)} of {len(runs)}",
        "x no freeze": ratios(without, by_row[name], "train_s"),
        "x tuned": ratios(by_row[TUNED], by_row[name], "train_s"),
        "x peer": ratios(by_row[PEER], by_row[name], "train_s"),
        "wall, x peer": ratios(by_row[PEER], by_row[name], "wall_s"),
        "bound": median(bounds) if bounds else None,
        "to target, x no freeze": target_ratios(without, by_row[name], target=target),
        "to target, x tuned": target_ratios(by_row[TUNED], by_row[name], target=target),
        "floor over train": median(floors) if floors else None,
        "frozen blocks at step": frozen_over_time(runs),
    }


def frozen_over_time(runs: Sequence[Figures]) -> str | None:
    """Those of the first run, and how many have them; None where it freezes nothing."""
    told = [", ".join(f"{n} at {step}" for step, n in changes(run.plans)) for run in runs]
    alike = "" if len(set(told)) == 1 else f" ({told.count(told[0])} of {len(told)})"
    return f"{told[0]}{alike}" if told[0] else None


def changes(plans: Sequence[tuple[int, int, int | None]]) -> list[tuple[int, int]]:
    """The plans that changed the number of frozen blocks, from 0 blocks on."""
    found, now = [], 0
    for step, frozen, _ in plans:
        if frozen != now:
            found.append((step, frozen))
            now = frozen
    return found


def ratios(theirs: Runs, ours: Runs, seconds: str) -> str | None:
    """How many times faster ours are, seed by seed: the median, the least and the most; None where no pair is there."""
    pairs = pairs_of(theirs, ours, on_one_processor=True)
    return _spread([getattr(other, seconds) / getattr(own, seconds) for other, own in pairs])


def times_to(target: float | None, runs: Sequence[Figures]) -> list[float]:
    """Seconds of the runs that reach the target; none where there is no target."""
    return [] if target is None else [s for run in runs if (s := run.seconds_to(target)) is not None]


def target_ratios(theirs: Runs, ours: Runs, *, target: float | None) -> str | None:
    """The same of times to target, of the pairs that both reach it; None where half or more of either miss it."""
    for runs in (theirs, ours):
        if 2 * len(times_to(target, list(runs.values()))) <= len(runs):
            return None
    reached = [times_to(target, pair) for pair in pairs_of(theirs, ours, on_one_processor=True)]
    return _spread([pair[0] / pair[1] for pair in reached if len(pair) == 2])


def pairs_of(theirs: Runs, ours: Runs, *, on_one_processor: bool = False) -> list[tuple[Figures, Figures]]:
    """Runs of both with one seed and the same weights to begin with."""
    found = [(theirs[seed], own) for seed, own in ours.items() if seed in theirs]
    alike = [(other, own) for other, own in found if other.start == own.start]
    return [(other, own) for other, own in alike if not on_one_processor or other.cpu == own.cpu]


def _spread(values: Sequence[float]) -> str | None:
    return spread(values, digits=2) if values else None


def _draw(by_row: ByRow, figure: Figure, *, target: float | None) -> None:
    axes = figure.subplots()
    for number, (name, runs) in enumerate((name, runs) for name, runs in by_row.items() if runs):
        points = zip(*(run.curve for run in runs.values()))  # of the same evaluation
        seconds, metrics = zip(*((mean(s for s, _ in at), mean(m for _, m in at)) for at in points))
        style = "-" if number < 10 else "--"  # there are ten colours
        axes.plot(seconds, metrics, style, marker="o", markersize=3, color=f"C{number % 10}", label=name)
    if target is not None:
        axes.axhline(target, color="black", linestyle=":", linewidth=1, label="target")
    axes.set_xlabel("seconds of training")
    axes.set_ylabel("metric, mean over seeds")
    axes.legend(fontsize=8)


if __name__ == "__main__":
    sys.exit(run_guarded(main))
