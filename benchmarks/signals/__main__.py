"""Which signal tells how deep freezing is safe? The number of blocks that each one's rule names, and the safe one.

    pipetransformer bench signals --sst2 FOLDER --models FOLDER [FOLDER ...] [--seeds N] [--minutes M]
    pipetransformer bench signals --cifar100 FOLDER [--sst2 FOLDER --models ...] [--seeds N] [--minutes M]

Tasks and recipes are those of `bench elastic`; a model of 12 blocks comes again with half of its blocks drawn anew,
which no rule may freeze. Safe: the most sixths of the blocks, frozen from the first step on and cached, with which, as
with all fewer, runs end at most 0.3 points below those without freezing, by the mean over the seeds. Signals are of a
run without freezing, of its steps 50 to 100; the linear probe's is of the time before training.

Each run is kept in signals-runs.json when it ends: the command given again does what is missing. --minutes ends it
before the next one. Runs are in bfloat16; a machine without it runs in float32, and its files are named so
(signals-float32).
"""

from __future__ import annotations

import json
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean
from time import monotonic

import torch
from matplotlib.figure import Figure

from benchmarks.elastic.__main__ import blocks_of, name_of, of_precision, split_pictures
from benchmarks.elastic.cells import Cell, code_digest
from benchmarks.elastic.judged import half_interval
from benchmarks.elastic.processes import launch
from benchmarks.elastic.redrawn import redraw
from benchmarks.elastic.same_code import same_codes
from benchmarks.elastic.tasks import BASELINE, NUM_HELD_OUT, NUM_PHRASES, REPLICAS, ROWS, Row, Task, texts
from benchmarks.support.command_line import add_minutes, add_output, bench_parser, deadline, refuse_without_effect
from benchmarks.support.kept import KeptRows, key_of
from benchmarks.support.sst2 import hold_out
from benchmarks.support.table import Row as TableRow
from benchmarks.support.table import write_table
from pipetransformer.errors import UserError
from pipetransformer.launch.arguments import Parser, count
from pipetransformer.launch.entry import run_guarded
from pipetransformer.process.device import has_bfloat16

SIXTHS = (1, 2, 3, 4, 5)
MOST_LOST = 0.003  # of the metric: the margin of the target of `bench elastic`
CODE = ("benchmarks/signals/collect.py", "benchmarks/signals/rules.py")


def row_of(blocks: int, *, epochs: int) -> Row:
    """So many blocks frozen from the first step on, evaluated at the end alone."""
    at_end = f"train.eval_every={epochs} epochs"
    if not blocks:
        baseline = next(row for row in ROWS if row.name == BASELINE)
        return replace(baseline, overrides=(*baseline.overrides, at_end))
    how = ("freeze.policy=static", f"freeze.max_frozen={blocks}", "freeze.guard=false", REPLICAS)
    return Row(f"static {blocks}", (*how, at_end), 8)


def make_parser() -> Parser:
    parser = bench_parser("signals", description=__doc__)
    parser.add_argument("--sst2", type=Path, metavar="FOLDER", help="SST-2's train.tsv and dev.tsv; with --models")
    parser.add_argument("--models", type=Path, nargs="+", default=(), metavar="FOLDER", help="saved encoders")
    parser.add_argument("--cifar100", type=Path, metavar="FOLDER", help="its parquet files; pre-trains a model once")
    parser.add_argument("--seeds", type=count, default=3, help="runs of each kind (default 3)")
    add_minutes(parser, what="run")
    add_output(parser)
    return parser


def main() -> None:
    arguments = parsed(make_parser(), sys.argv[1:])
    stop = deadline(arguments)
    precision = "bfloat16" if has_bfloat16(torch.device("cpu")) else "float32"
    table_name = name_of("signals", precision)
    kept = KeptRows(arguments.output / f"{table_name}-runs.json")
    rows, missing = list[TableRow](), list[str]()
    with tempfile.TemporaryDirectory() as folder:
        for task in tasks(arguments, precision=precision, scratch=Path(folder)):
            seeds = range(arguments.seeds)
            finals, away = measured(
                *(task, seeds),
                kept=kept,
                stop=stop,
                precision=precision,
                codes=partial(same_codes, arguments.output, task=task.name),
            )
            told = [signals(task, seed, kept=kept, stop=stop, precision=precision) for seed in seeds]
            missing += [*away, *(f"{task.name}, signals, seed {seed}" for seed in seeds if told[seed] is None)]
            rows += table(task, finals, [each for each in told if each is not None])
    if not rows:
        raise UserError("--minutes: no task has ended; give more")
    notes = [
        "Numbers of blocks; of a rule, one for each seed. Off: mean distance from the safe number, either way, in "
        "sixths of the blocks. ±: half of the 90 % interval of the mean difference to none "
        "frozen, by seed. ",
        f"Missing: {'; '.join(missing)}." if missing else "No run is missing.",
    ]
    title = "How deep is safe, and what tells it"
    write_table(table_name, rows, title=title, notes=notes, draw=partial(draw, rows=rows), folder=arguments.output)


def parsed(parser: Parser, given: Sequence[str]) -> Namespace:
    """Raises UserError where no task is given, or a half of one."""
    arguments = parser.parse_args(given)
    if arguments.sst2 is None:
        if arguments.cifar100 is None:
            raise UserError("--sst2: missing; give it with --models, or --cifar100, or all three")
        refuse_without_effect(parser, arguments, "models", where="--cifar100 alone")
    elif not arguments.models:
        raise UserError("--models: missing; give --sst2 the folders of saved encoders")
    return arguments


def tasks(arguments: Namespace, *, precision: str, scratch: Path) -> list[Task]:
    data, found = scratch / "SST-2", list[Task]()
    if arguments.sst2 is not None:
        hold_out(arguments.sst2, data, num_train=NUM_PHRASES, num_held_out=NUM_HELD_OUT, part="judged")
    for model in arguments.models:
        num_blocks = blocks_of(model)
        found.append(texts(data, model, num_blocks=num_blocks))
        if num_blocks == 12:
            other = scratch / f"{model.name}-redrawn"
            redraw(model, other, num_blocks=num_blocks // 2)
            found.append(texts(data, other, num_blocks=num_blocks))
    if arguments.cifar100 is not None:
        found.append(split_pictures(arguments.cifar100, timm=None, precision=precision, scratch=scratch))
    return [of_precision(task, precision) for task in found]


def measured(
    task: Task,
    seeds: Sequence[int],
    *,
    kept: KeptRows,
    stop: float,
    precision: str,
    codes: Callable[[str], Collection[str]],
) -> tuple[dict[int, list[float]], list[str]]:
    """Final metrics by the number of blocks frozen, of the seeds with all numbers, in their order; and the names of the
    runs that are missing.
    """
    numbers = [task.num_blocks * sixth // 6 for sixth in (0, *SIXTHS)]
    rows = {number: row_of(number, epochs=task.epochs) for number in numbers}
    finals: dict[int, list[float]] = {n: [] for n in rows}
    missing = list[str]()
    for seed in seeds:
        of_seed = dict[int, float]()
        for blocks, row in rows.items():
            cell = Cell(task, row, seed, 2, precision)
            figures = cell.found(kept, codes=codes(row.name))
            if figures is None and monotonic() < stop:
                figures = cell.measure(kept)
                print(f"{cell.name}: {figures.final:.4f} in {figures.train_s:.1f} s", flush=True)
            if figures is None:
                missing.append(cell.name)
            else:
                of_seed[blocks] = figures.final
        if len(of_seed) == len(rows):  # else a pair would be one of two seeds
            for blocks, final in of_seed.items():
                finals[blocks].append(final)
    return finals, missing


def signals(
    task: Task, seed: int, *, kept: KeptRows, stop: float, precision: str
) -> Mapping[str, Mapping[str, int]] | None:
    """What one run's signals say; None where it is missing."""
    baseline = Cell(task, row_of(0, epochs=task.epochs), seed, 2, precision)
    name, key = f"{task.name}, signals, seed {seed}", key_of([baseline.key, code_digest()], code=CODE)
    row = kept.row(key)
    if row is None and monotonic() < stop:
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder) / "result.json"
            place = ("pipe.measure=false", f"run.dir={folder}", "run.id=signals")
            script = ["-m", "benchmarks.signals.collect", str(task.config), str(result)]
            launch([*script, *baseline.settings, *place], ranks=1, name=name)
            kept.keep(name, key, json.loads(result.read_text()))
        row = kept.row(key)
        print(f"{name}: {row['depths'] if row else None}", flush=True)
    return row  # type: ignore[return-value]


def safe_depth(finals: Mapping[int, Sequence[float]]) -> int | None:
    """The most blocks with which, as with all fewer, runs end at most ``MOST_LOST`` below those with none, on average;
    None where a number was not measured. Note: ``is_as_good`` lets few seeds pass for their width.
    """
    if not all(finals.values()):
        return None
    safe = 0
    for blocks, found in sorted(finals.items()):
        if mean(own - without for own, without in zip(found, finals[0])) < -MOST_LOST:
            break
        safe = blocks
    return safe


def table(
    task: Task, finals: Mapping[int, Sequence[float]], told: Sequence[Mapping[str, Mapping[str, int]]]
) -> list[TableRow]:
    safe, sixth = safe_depth(finals), task.num_blocks / 6
    found = {f"metric at {k}/6": finals[task.num_blocks * k // 6] for k in (0, *SIXTHS)}
    metrics = {name: mean(values) if values else None for name, values in found.items()}
    for k in SIXTHS:
        less = [own - without for own, without in zip(finals[task.num_blocks * k // 6], finals[0])]
        metrics[f"± at {k}/6"] = half_interval(less, level=0.9)
    rows: list[TableRow] = []
    for name in told[0]["depths"] if told else ():
        depths = [each["depths"][name] for each in told]
        off = None if safe is None else mean(abs(depth - safe) / sixth for depth in depths)
        rows.append(
            {
                "task": task.name,
                "signal": name,
                "says": " ".join(map(str, depths)),
                "safe": safe,
                "off": off,
                **metrics,
            }
        )
    return rows


def draw(figure: Figure, *, rows: Sequence[TableRow]) -> None:
    axes = figure.subplots()
    names = list(dict.fromkeys(str(row["signal"]) for row in rows))
    of_tasks = list(dict.fromkeys(str(row["task"]) for row in rows))
    for place, task in enumerate(of_tasks):
        own = {str(row["signal"]): row["off"] for row in rows if row["task"] == task and row["off"] is not None}
        at = [number + 0.8 * place / len(of_tasks) for number, name in enumerate(names) if name in own]
        axes.barh(at, [float(str(own[name])) for name in names if name in own], height=0.7 / len(of_tasks), label=task)
    axes.set_yticks([number + 0.3 for number in range(len(names))], names)
    axes.set_xlabel("mean distance from the safe number, in sixths of the blocks")
    axes.legend(fontsize=8)


if __name__ == "__main__":
    sys.exit(run_guarded(main))
