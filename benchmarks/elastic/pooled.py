"""The judged tasks together: accuracy of each row less that without freezing, over all their seeds."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean

from matplotlib.figure import Figure

from benchmarks.elastic.judged import half_interval, is_as_good
from benchmarks.elastic.same_code import same_codes
from benchmarks.elastic.tasks import BASELINE, PEER
from benchmarks.support.table import Row, write_table
from pipetransformer.errors import UserError

__all__ = ["write_pooled"]


def write_pooled(tasks: Sequence[str], *, folder: Path) -> None:
    """Writes ``elastic-pooled`` from the kept runs of these tasks, which lie in ``folder``; rows that all of them have,
    measured by today's code.

    Raises:
        UserError: the runs of a task are missing or unreadable, or hold no row that can be judged.
    """
    found = {task: _differences(folder, task=task) for task in tasks}
    names = [name for name in found[tasks[0]] if all(name in of_task for of_task in found.values())]
    if not names:
        of_today = f"beside {BASELINE!r} that all of {', '.join(tasks)} have of today's code"
        raise UserError(f"--pool: no row {of_today}; measure it")
    rows = [_row(name, {task: of_task[name] for task, of_task in found.items()}) for name in names]

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for number, task in enumerate(tasks):
            for place, name in enumerate(names):
                points = [100 * each for each in found[task][name]]
                label = task if place == 0 else None
                axes.plot([place + 0.15 * number] * len(points), points, "o", color=f"C{number}", label=label)
        axes.axhline(0, color="black", linewidth=1)
        axes.set_xticks(range(len(names)), names)
        axes.set_ylabel("accuracy less no freeze at the same seed, points")
        axes.legend()

    notes = [
        "Accuracy less that of the run of the same task and seed without freezing, in points; ±: half of the 90 % "
        "interval of the mean over all pairs (Student's t).",
        "As good: no, where the upper end of that interval lies below 0, or the mean below -0.3 points with a standard "
        "error of at most 0.2.",
    ]
    title = f"{len(tasks)} tasks together: accuracy beside no freeze"
    write_table("elastic-pooled", rows, title=title, notes=notes, draw=draw, folder=folder)


def _differences(folder: Path, *, task: str) -> Mapping[str, list[float]]:
    """By row: final metric less that without freezing, of each seed that both have from the same weights on and by the
    code that counts as today's.

    Raises UserError.
    """
    path = folder / f"elastic-{task}-runs.json"
    finals = defaultdict[str, dict[tuple[int, str], float]](dict)
    try:
        for kept in json.loads(path.read_text(encoding="ascii"))["rows"]:
            name, seed = kept["name"].removeprefix(f"{task}, ").rsplit(", seed ", 1)
            if kept.get("code") in same_codes(folder, name, task=task):
                finals[name][int(seed), kept.get("start", "")] = kept["curve"][-1][1]
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise UserError(f"--pool: {path} does not hold the runs of {task}; measure it first") from error
    without = finals[BASELINE]
    pairs = {
        name: [final - without[run] for run, final in sorted(of_row.items()) if run in without]
        for name, of_row in finals.items()
        if name not in (BASELINE, PEER)
    }
    return {name: own for name, own in pairs.items() if own}


def _row(name: str, by_task: Mapping[str, list[float]]) -> Row:
    pairs = [each for own in by_task.values() for each in own]
    half = half_interval(pairs, level=0.9)
    return {
        "row": name,
        "pairs": len(pairs),
        "points": 100 * mean(pairs),
        "±": None if half is None else 100 * half,
        "as good": {None: None, True: "yes", False: "no"}[is_as_good(pairs)],
        **{task: 100 * mean(own) for task, own in by_task.items()},
    }
