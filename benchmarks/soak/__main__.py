"""Runs whose ranks are killed at random instants, resumed until they end: with the weights of the undisturbed run.

    pipetransformer bench soak [--kills 900] [--by-script 100] [--seed 0] [--minutes 60]

Digits and a text task on 4 ranks, pipeline to replicas, frozen and cached on the way, a checkpoint every 2 steps. At a
random instant one rank gets SIGKILL, or, one time in five, all do. Final weights are compared to the bit; nothing may
be left behind: shared memory, half-written files, a checkpoint that is not what its name says.

The tally is a file in the folder of the results, and the command goes on with it: 900 kills of forked ranks, of which
all libraries are imported once, and 100 through run_pipetransformer.sh, in as many calls as it takes.

Detect: from the kill to the end of the last rank. Restart: from the start of the processes to the resumption (forked
ranks have their imports). Load: from there to the first step, weights and moments. Refill: of the cache, if it
had one.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from statistics import median
from time import monotonic

from matplotlib.figure import Figure

from benchmarks.soak.attempts import TASKS, Soak, Tally
from benchmarks.support.command_line import add_output, bench_parser
from benchmarks.support.table import Row, write_table
from pipetransformer.launch.arguments import count

_KILLS_A_RUN = 6


def main() -> None:
    parser = bench_parser("soak", description=__doc__)
    parser.add_argument("--kills", type=count, default=900, help="kills of forked ranks in all (default 900)")
    parser.add_argument("--by-script", type=count, default=100, help="kills through the script in all (default 100)")
    parser.add_argument("--seed", type=int, default=0, help="of the instants and the ranks")
    parser.add_argument("--minutes", type=count, default=60, help="the most to take in this call (default 60)")
    add_output(parser)
    arguments = parser.parse_args()
    path = arguments.output / "soak.tally"
    tallies = read_tallies(path)
    until = monotonic() + 60 * arguments.minutes
    with tempfile.TemporaryDirectory() as scratch:
        done = sum(tally.runs for tally in tallies.values())
        soaks = {task: Soak(task, Path(scratch) / task, seed=arguments.seed + 1000 * done) for task in TASKS}
        wanted = {"forked": arguments.kills, "script": arguments.by_script}
        while monotonic() < until:
            left = {name: kills - tallies[name].kills for name, kills in wanted.items()}
            if max(left.values()) <= 0:
                break
            name = max(left, key=lambda name: left[name] / max(wanted[name], 1))
            task = min(TASKS, key=lambda task: tallies[name].runs % len(TASKS) != list(TASKS).index(task))
            soaks[task].run(tallies[name], most_kills=min(_KILLS_A_RUN, left[name]), through_script=name == "script")
            path.write_text(json.dumps({name: asdict(tally) for name, tally in tallies.items()}, indent=1) + "\n")
            print(f"{name}: {tallies[name].kills} kills survived in {tallies[name].runs} runs", flush=True)
    report(tallies, folder=arguments.output)


def read_tallies(path: Path) -> dict[str, Tally]:
    kept = json.loads(path.read_text()) if path.exists() else {}
    return {name: Tally(**kept.get(name, {})) for name in ("forked", "script")}


def report(tallies: dict[str, Tally], *, folder: Path) -> None:
    rows: list[Row] = [
        {
            "ranks started": {"forked": "as forks", "script": "by the script"}[name],
            "kills survived": tally.kills,
            "runs, to the bit": tally.runs,
            **{f"{what} s": _spread(getattr(tally, what)) for what in ("detect", "restart", "load", "refill")},
        }
        for name, tally in tallies.items()
    ]
    write_table(
        "soak",
        rows,
        title="SIGKILL of ranks at random instants, 4 ranks, elastic; digits and texts in turn",
        notes=["Seconds are the median [smallest .. largest]."],
        draw=lambda figure: draw(figure, tallies),
        folder=folder,
    )


def _spread(seconds: list[float]) -> str | None:
    return f"{median(seconds):.2f} [{min(seconds):.2f} .. {max(seconds):.2f}]" if seconds else None


def draw(figure: Figure, tallies: dict[str, Tally]) -> None:
    """A histogram of each time."""
    for number, what in enumerate(("detect", "restart", "load", "refill"), start=1):
        axes = figure.add_subplot(1, 4, number)
        for name, tally in tallies.items():
            if seconds := getattr(tally, what):
                axes.hist(seconds, bins=30, alpha=0.6, label=name)
        axes.set_xlabel(f"{what}, seconds")
        axes.legend()


if __name__ == "__main__":
    main()
