"""Train a configuration with many settings, side by side where there is room, and rank what comes out.

FILE is YAML: a configuration, keys with their values, and how they are combined. A killed sweep goes on where it was
when the command is given again. Trials that freeze the same blocks from their first step share a cache of activations.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from pipetransformer.commands.tables import make_console, make_table
from pipetransformer.config.sweeps import Sweep, Trial, load_sweep
from pipetransformer.errors import UserError, check_folder, writing
from pipetransformer.launch.arguments import count

EXAMPLES = """a file:
  config: digits                        # of a training: a file, or a shipped name
  combine: grid                         # every combination; list: the n-th values together; random: `trials` draws
  keys:
    train.lr: [1e-3, 3e-3]
    train.seed: [0, 1, 2]
    freeze.policy: [none, guarded]
  settings: [train.epochs=10]           # the same in all trials

examples:
  pipetransformer sweep lr.yaml
  pipetransformer sweep lr.yaml --jobs 2 --ranks 1
  pipetransformer sweep ablation        # shipped: ablation, alpha, microbatches
  pipetransformer sweep lr.yaml --wandb # the same as a definition for 'wandb sweep'"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="YAML file, or the name of a shipped sweep")
    parser.add_argument("--folder", type=Path, metavar="FOLDER", help="of its runs (default sweeps/NAME)")
    parser.add_argument("--jobs", type=count, metavar="N", help="trials at once; as many as the cores or GPUs hold")
    parser.add_argument("--ranks", type=count, default=1, metavar="N", help="processes of a trial (default 1)")
    parser.add_argument("--wandb", action="store_true", help="print the sweep as wandb defines one, and train nothing")


def run(arguments: argparse.Namespace) -> None:
    sweep = load_sweep(arguments.file)
    if arguments.wandb:
        print(sweep.as_wandb(), end="")
        return
    folder = (arguments.folder or Path("sweeps") / sweep.name).expanduser()
    check_folder(folder, key="--folder")
    jobs = arguments.jobs or max(1, (len(_gpus()) or len(os.sched_getaffinity(0))) // arguments.ranks)
    waiting = [trial for trial in sweep.trials if _summary(folder, trial) is None]
    done = len(sweep.trials) - len(waiting)
    print(f"{len(sweep.trials)} trials in {folder}, {done} of them done; {jobs} at once", flush=True)
    failed, places = list[str](), _places(jobs, ranks=arguments.ranks)
    with ThreadPoolExecutor(jobs) as pool:
        for trial, line in pool.map(
            lambda trial: (trial, _train(sweep, trial, folder, arguments.ranks, places)), waiting
        ):
            print(f"{trial.name}: {line or 'done'}", flush=True)
            failed += [trial.name] if line else []
    _rank(sweep, folder)
    if failed:
        raise UserError(f"sweep: {len(failed)} of {len(sweep.trials)} trials failed: {', '.join(failed[:5])}")


def _gpus() -> list[str]:
    """Those that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    if (given := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name for name in given.split(",") if name]
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]


def _places(jobs: int, *, ranks: int) -> SimpleQueue[str | None]:
    """GPUs of their own for so many trials at once, as far as there are; None for the CPU."""
    gpus, places = _gpus(), SimpleQueue[str | None]()
    for job in range(jobs):
        first = job * ranks % max(1, len(gpus))
        places.put(",".join((gpus * 2)[first : first + ranks]) if gpus else None)
    return places


def _train(sweep: Sweep, trial: Trial, folder: Path, ranks: int, places: SimpleQueue[str | None]) -> str:
    """Runs a trial, or goes on with it. Returns the last line of one that has failed; empty for one that has ended."""
    command = [sys.executable, "-m", "pipetransformer", "train", sweep.config, "--ranks", str(ranks)]
    own = (f"run.id={json.dumps(trial.name)}", f"run.dir={folder}", f"log.group={sweep.name}", "run.resume=auto")
    environment = {"OMP_NUM_THREADS": "1"} if "OMP_NUM_THREADS" not in os.environ else {}
    place = places.get()
    environment |= {"CUDA_VISIBLE_DEVICES": place} if place is not None else {}
    with (folder / f"{trial.name}.log").open("w", encoding="utf-8") as log:
        ended = subprocess.run(
            [*command, *sweep.settings, *trial.overrides, *own],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
        )
    places.put(place)
    if ended.returncode == 0:
        return ""
    lines = (folder / f"{trial.name}.log").read_text(encoding="utf-8").splitlines()
    return lines[-1] if lines else f"ended with exit code {ended.returncode}"


def _summary(folder: Path, trial: Trial) -> Mapping[str, Any] | None:
    """Of a trial that has ended."""
    try:
        found: dict[str, Any] = json.loads((folder / trial.name / "summary.json").read_text(encoding="utf-8"))
        return found
    except (OSError, ValueError):
        return None


def _rank(sweep: Sweep, folder: Path) -> None:
    """Prints the trials, the best first; leaves them as a table and a page."""
    from pipetransformer.run.page import read_history, write_report

    ended = [(trial, summary) for trial in sweep.trials if (summary := _summary(folder, trial)) is not None]
    if not ended:
        return
    histories = {trial.name: read_history(folder / trial.name) for trial, _ in ended}
    metric = histories[ended[0][0].name].best_by
    ended.sort(key=lambda pair: -pair[1]["best_metrics"].get(metric, float("-inf")))
    titles = ("trial", *sweep.keys, f"best {metric}", f"final {metric}", "train s", "wall s")
    rows = [_row(trial, summary, [*sweep.keys], metric) for trial, summary in ended]
    make_console().print(make_table(titles, rows, left=("trial", *sweep.keys)))
    with writing(folder, key="--folder"), (folder / "results.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([titles, *rows])
    page = folder / "comparison.html"
    write_report([histories[trial.name] for trial, _ in ended[:12]], page)
    print(f"{folder / 'results.csv'}, {page}")


def _row(trial: Trial, summary: Mapping[str, Any], keys: Sequence[str], metric: str) -> list[str]:
    values = [str(trial.values.get(key, "")) for key in keys]
    figures = [f"{summary[which].get(metric, float('nan')):.4f}" for which in ("best_metrics", "metrics")]
    return [trial.name, *values, *figures, f"{summary['train_s']:.1f}", f"{summary['wall_s']:.1f}"]
