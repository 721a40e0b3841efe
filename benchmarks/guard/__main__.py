"""How many samples must the guard set aside? How often it undoes a freeze by few of them, and what the freeze costs.

    pipetransformer bench guard --sst2 FOLDER --model FOLDER [--model FOLDER ...] [--seeds N] [--minutes M]

Runs of 7,000 phrases, three epochs, with a thousand others set aside; so many blocks freeze at a step, for good. The
guard's own decision is then taken again with each of a thousand draws of so many of the samples. Of a run without
freezing it is taken as if something had frozen at each pass that it could judge: the share that is undone there is that
of freezes that cost nothing. Phrases and sentences are those that no judged table uses.

Each run is kept in guard-runs.json when it ends: the command given again does what is missing. --minutes ends it before
the next one.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from time import monotonic
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from benchmarks.elastic.__main__ import blocks_of
from benchmarks.elastic.processes import launch
from benchmarks.elastic.tasks import texts
from benchmarks.guard.recorded import EVERY, NUM_SAMPLES
from benchmarks.support.command_line import add_minutes, add_output, bench_parser, deadline
from benchmarks.support.kept import KeptRows, key_of
from benchmarks.support.sst2 import hold_out
from benchmarks.support.table import Row as TableRow
from benchmarks.support.table import write_table
from pipetransformer.errors import UserError
from pipetransformer.freeze.guard import Guard
from pipetransformer.launch.arguments import Parser, count
from pipetransformer.launch.entry import run_guarded
from pipetransformer.process.device import has_bfloat16

NUM_PHRASES = 7000
SIZES, DRAWS = (16, 32, 64, 128, 256, 512), 1000
EARLY, LATE = 200, 500  # steps of 657; a twentieth of the learning rates' sum is to come at the second
FREEZES: Mapping[int, Sequence[tuple[int, int]]] = {  # (step, frozen blocks), by number of blocks; no freeze first
    6: ((EARLY, 0), (EARLY, 1), (EARLY, 3), (EARLY, 5), (LATE, 2), (LATE, 5)),
    12: ((EARLY, 0), (EARLY, 11)),
}
CODE = (
    *("pipetransformer/**/*.py", "main_tc.py", "config/*.yaml"),
    *("benchmarks/support/sst2.py", "benchmarks/guard/recorded.py"),
)
Run = Mapping[str, Any]


def make_parser() -> Parser:
    parser = bench_parser("guard", description=__doc__)
    parser.add_argument("--sst2", type=Path, required=True, metavar="FOLDER", help="SST-2's train.tsv and dev.tsv")
    parser.add_argument("--model", type=Path, action="append", required=True, metavar="FOLDER", help="a saved encoder")
    parser.add_argument("--seeds", type=count, default=1, help="runs of each freeze (default 1)")
    add_minutes(parser, what="run")
    add_output(parser)
    return parser


def main() -> None:
    arguments = make_parser().parse_args()
    stop = deadline(arguments)
    kept, rows, missing = KeptRows(arguments.output / "guard-runs.json"), list[TableRow](), list[str]()
    with tempfile.TemporaryDirectory() as folder:
        for model in arguments.model:
            for step, frozen in freezes_of(model):
                found = list[Run]()
                for seed in range(arguments.seeds):
                    name = f"{model.name}, {frozen} at {step}, seed {seed}"
                    run = recorded(
                        *(arguments.sst2, model, step, frozen, seed),
                        name=name,
                        kept=kept,
                        scratch=Path(folder),
                        stop=stop,
                    )
                    if run is None:
                        missing.append(name)
                    else:
                        found.append(run)
                if found:
                    rows.append(row_of(model.name, found, step=step, frozen=frozen))
    if not rows:
        raise UserError("--minutes: no run has ended; give more")
    notes = [
        f"Undone: share of {DRAWS:,} draws of so many of {NUM_SAMPLES:,} samples by which the freeze is undone, in per "
        "cent. Excess: loss of all of them above the one predicted, at the verdict. ",
        f"Missing: {'; '.join(missing)}." if missing else "No run is missing.",
    ]
    title = "How many samples the guard needs"
    write_table("guard", rows, title=title, notes=notes, draw=partial(draw, rows=rows), folder=arguments.output)


def freezes_of(model: Path) -> Sequence[tuple[int, int]]:
    """Raises UserError where none are set for as many blocks."""
    num_blocks = blocks_of(model)
    if num_blocks not in FREEZES:
        raise UserError(f"--model: {model} has {num_blocks} blocks; give an encoder of 6 or 12")
    return FREEZES[num_blocks]


def recorded(
    sst2: Path, model: Path, step: int, frozen: int, seed: int, *, name: str, kept: KeptRows, scratch: Path, stop: float
) -> Run | None:
    """What is kept of a run, which is made where it is missing; None where there is no time for it."""
    num_blocks, place = blocks_of(model), scratch / str(seed)
    task = texts(place, model, num_blocks=num_blocks, num_phrases=NUM_PHRASES + NUM_SAMPLES)
    precision = "bfloat16" if has_bfloat16(torch.device("cpu")) else "float32"
    of_run = (f"train.seed={seed}", "train.eval_every=3 epochs", f"train.precision={precision}")
    settings = (*task.overrides, *how_of(step, frozen), *of_run)
    own = [each for each in settings if not each.startswith(("data.path=", "model.name="))]
    key = key_of([model.name, *own], code=CODE)
    if kept.row(key) is None and monotonic() < stop:
        if not place.exists():
            hold_out(sst2, place, num_train=NUM_PHRASES + NUM_SAMPLES, num_held_out=0, part="tuned", seed=seed)
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder) / "passes.json"
            script = ["-m", "benchmarks.guard.recorded", str(result), str(task.config), *settings]
            launch([*script, f"run.dir={folder}", "run.id=guard"], ranks=1, name=name)
            summary = json.loads((Path(folder) / "guard" / "summary.json").read_text())
            accuracy = summary["metrics"]["accuracy"]
            passes = [{**each, "losses": [round(loss, 5) for loss in each["losses"]]} for each in load(result)]
            kept.keep(name, key, {"accuracy": accuracy, "passes": passes})
        print(f"{name}: {accuracy:.4f}", flush=True)
    return kept.row(key)


def how_of(step: int, frozen: int) -> tuple[str, ...]:
    """The settings by which so many blocks freeze at ``step``; 0: none ever."""
    warmup = f"{step} steps" if frozen else "1000 epochs"
    return ("freeze.policy=static", f"freeze.max_frozen={max(frozen, 1)}", f"freeze.warmup={warmup}")


def load(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())  # type: ignore[no-any-return]


def row_of(model: str, found: Sequence[Run], *, step: int, frozen: int) -> TableRow:
    shares = [mean(undone(run["passes"], step=step if frozen else None, num_samples=n) for run in found) for n in SIZES]
    steps = [step] if frozen else judgeable(found[0]["passes"])
    return {
        "model": model,
        "frozen": f"{frozen} at {step}" if frozen else "nothing",
        "seeds": len(found),
        "accuracy": mean(run["accuracy"] for run in found),
        "excess": mean(excess(run["passes"], step=at) for run in found for at in steps),
        **{f"undone by {n}": round(100 * share, 1) for n, share in zip(SIZES, shares)},
    }


def judgeable(passes: Sequence[Run]) -> list[int]:
    """The steps of the passes at which a freeze could be judged."""
    guard = Guard(EVERY)
    return [each["step"] for each in passes if guard.can_judge(each["step"], total_steps=passes[-1]["step"] + 1)]


def undone(passes: Sequence[Run], *, step: int | None, num_samples: int) -> float:
    """The share of the draws by which a freeze at ``step`` is undone; None: by turns at each that could be judged."""
    random, steps = np.random.default_rng(0), judgeable(passes) if step is None else [step]
    losses = {each["step"]: np.asarray(each["losses"]) for each in passes}
    count = 0
    for draw in range(DRAWS):
        ids = random.choice(NUM_SAMPLES, num_samples, replace=False)
        count += verdict(passes, losses, ids, step=steps[draw % len(steps)])[0]
    return count / DRAWS


def excess(passes: Sequence[Run], *, step: int) -> float:
    """The loss of all samples above the one predicted, at the verdict on a freeze at ``step``."""
    losses = {each["step"]: np.asarray(each["losses"]) for each in passes}
    return verdict(passes, losses, np.arange(NUM_SAMPLES), step=step)[1]


def verdict(
    passes: Sequence[Run], losses: Mapping[int, np.ndarray], ids: np.ndarray, *, step: int
) -> tuple[bool, float]:
    """Whether the guard undoes a freeze at ``step`` by some of the samples, and their loss above the predicted one."""
    guard = Guard(EVERY)
    for each in passes:
        told = guard.observe(each["step"], losses[each["step"]][ids].tolist(), moved=each["moved"])
        if told.judged:
            assert told.predicted is not None
            return told.undone, told.loss - told.predicted
        if each["step"] == step:
            guard.froze(step, before=0)
    raise AssertionError(f"no pass judges a freeze at step {step}")


def draw(figure: Figure, *, rows: Sequence[TableRow]) -> None:
    axes = figure.subplots()
    for row in rows:
        axes.plot(SIZES, [row[f"undone by {n}"] for n in SIZES], marker="o", label=f"{row['model']}, {row['frozen']}")
    axes.set_xscale("log", base=2)
    axes.set_xticks(SIZES, [str(n) for n in SIZES])
    axes.set_xlabel("samples set aside")
    axes.set_ylabel("freezes undone, %")
    axes.legend()


if __name__ == "__main__":
    sys.exit(run_guarded(main))
