"""Many runs over one store of activations: a sweep of learning rates and seeds, blocks frozen from the first step on.

    pipetransformer bench many-runs --sst2 FOLDER --model FOLDER [--blocks N ...] [--trials N] [--minutes M]

Trials run side by side, one on each core, and nothing is kept from one row to the next: the first trial of a row of
ours fills the store on disk, the others find it. Hugging Face's Trainer has the same blocks frozen, and keeps freed
memory, as ours does by itself. A row counts the training seconds of all of its trials: the store of what is trained on
is included, evaluations and theirs are not.

Bound: a trial of E epochs, with n of L blocks frozen and stored, costs E (1 - n / L) epochs of training without
freezing (the row of 0 blocks), one of the Trainer E (1 - 2 n / 3 L): a frozen block still computes its forward, a
third.

Each row is kept in many-runs-rows.json when it ends, and the command given again does what is missing; --minutes ends
it before the next row.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from time import monotonic, perf_counter

import torch
from matplotlib.figure import Figure

from benchmarks.elastic.__main__ import blocks_of
from benchmarks.elastic.processes import launch
from benchmarks.peers.contest import MALLOC
from benchmarks.support.command_line import add_minutes, add_output, bench_parser, deadline, keep_whole
from benchmarks.support.git import ROOT
from benchmarks.support.kept import KeptRows, key_of
from benchmarks.support.measure import CONFIGS, environment
from benchmarks.support.sst2 import hold_out
from benchmarks.support.table import Row, write_table
from pipetransformer.errors import UserError
from pipetransformer.launch.arguments import Parser, count
from pipetransformer.launch.entry import run_guarded
from pipetransformer.process.device import has_bfloat16

OURS, PEER = "ours", "Trainer (transformers)"
RATES = ("5e-5", "1e-4", "2e-4")
EPOCHS, NUM_PHRASES, NUM_HELD_OUT = 3, 2000, 1500
CONFIG = CONFIGS / "train_config_sst2_no_freeze.yaml"
SETTINGS = (
    *(f"train.epochs={EPOCHS}", "train.batch_size=32", "train.eval_every=1000 epochs", "train.warmup_ratio=0.1"),
    *("train.head_lr_scale=10", "data.max_length=128", "freeze.guard=false", "freeze.policy=static"),
    *("log.wandb=disabled", "checkpoint.every=null", "log.every=1000", "pipe.measure=false"),
)
_ALL = ("config/train_config_sst2_no_freeze.yaml", "benchmarks/support/sst2.py", "benchmarks/many_runs/*.py")
CODE = {
    OURS: (*_ALL, "pipetransformer/**/*.py", "main_tc.py"),
    PEER: (
        *(*_ALL, "pipetransformer/config/**/*.py", "pipetransformer/data/**/*.py"),
        "benchmarks/peers/hf_trainer.py",
    ),
}


@dataclass(frozen=True, slots=True)
class Trial:
    """One run's figures.

    Attributes:
        train_s: seconds of its training.
        accuracy: at its end.
        found: whether it found a full store.
    """

    train_s: float
    accuracy: float
    found: bool = False


@dataclass(frozen=True, slots=True)
class Sweep:
    """A row: all trials by one library with as many blocks frozen.

    Attributes:
        wall_s: seconds from the first trial's start to the last one's end, imports and evaluations included.
    """

    trials: tuple[Trial, ...]
    wall_s: float

    @classmethod
    def of(cls, row: Mapping[str, object]) -> Sweep:
        """The sweep of a row that is kept."""
        return cls(tuple(Trial(**each) for each in row["trials"]), row["wall_s"])  # type: ignore[attr-defined, arg-type]

    @property
    def train_s(self) -> float:
        """Mean seconds of a trial."""
        return mean(trial.train_s for trial in self.trials)


@dataclass(frozen=True, slots=True)
class Plan:
    """What all rows share.

    Attributes:
        data: folder of the phrases.
        num_trials: trials of a row.
        precision: of all.
    """

    data: Path
    model: Path
    num_trials: int
    precision: str

    @property
    def trials(self) -> list[tuple[str, str]]:
        """The settings of each trial: learning rates in turn, seed by seed."""
        return [
            (f"train.lr={RATES[number % len(RATES)]}", f"train.seed={number // len(RATES)}")
            for number in range(self.num_trials)
        ]

    def key(self, who: str, blocks: int) -> str:
        versions = [environment()[key] for key in ("cpu", "torch", "transformers")]
        own = [*SETTINGS, who, blocks, self.num_trials, self.model.name, self.precision, NUM_PHRASES, NUM_HELD_OUT]
        return key_of([*own, *versions], code=CODE[who])

    def measure(self, who: str, blocks: int) -> Sweep:
        """Runs the trials, one on each core."""
        common = (*SETTINGS, f"freeze.max_frozen={blocks}", f"train.precision={self.precision}")
        place = (f"data.path={self.data}", f"model.name={self.model.resolve()}")
        with tempfile.TemporaryDirectory() as folder:
            run = ours if who == OURS else trainer

            def one(number: int) -> Trial:
                given = (*common, *self.trials[number], *place)
                return run(given, name=f"{who}, {blocks} blocks, trial {number}", folder=Path(folder), number=number)

            began = perf_counter()
            with ThreadPoolExecutor(os.cpu_count() or 1) as threads:
                trials = tuple(threads.map(one, range(self.num_trials)))
            return Sweep(trials, perf_counter() - began)


def ours(settings: Sequence[str], *, name: str, folder: Path, number: int) -> Trial:
    """One rank; stores of the row lie in ``folder``."""
    run = folder / "runs" / str(number)
    script = [str(ROOT / "main_tc.py"), str(CONFIG), *settings, f"run.dir={folder / 'runs'}", f"run.id={number}"]
    launch(script, ranks=1, name=name, variables={"PIPETRANSFORMER_CACHE": str(folder / "cache")})
    summary = json.loads((run / "summary.json").read_text())
    told = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    found = any(event["found"] for event in told if event["event"] == "advance")
    return Trial(summary["train_s"], summary["metrics"]["accuracy"], found)


def trainer(settings: Sequence[str], *, name: str, folder: Path, number: int) -> Trial:
    result = folder / f"{number}.json"
    script = ["-m", "benchmarks.peers.hf_trainer", "0", str(CONFIG), str(result), *settings]
    launch(script, ranks=1, name=name, variables={**MALLOC, "PIPETRANSFORMER_CACHE": str(folder / "cache")})
    told = json.loads(result.read_text())
    return Trial(sum(told["steps"]), told["accuracy"])


def make_parser() -> Parser:
    parser = bench_parser("many-runs", description=__doc__)
    parser.add_argument("--sst2", type=Path, required=True, metavar="FOLDER", help="SST-2's train.tsv and dev.tsv")
    parser.add_argument("--model", type=Path, required=True, metavar="FOLDER", help="a saved encoder")
    parser.add_argument("--blocks", type=count, nargs="+", default=[6, 9, 10, 11], help="frozen (default 6 9 10 11)")
    parser.add_argument("--trials", type=count, default=12, help="of a row (default 12)")
    add_minutes(parser, what="row")
    add_output(parser)
    return parser


def main() -> None:
    parser = make_parser()
    arguments = parser.parse_args()
    keep_whole(parser, arguments, "blocks", "trials")
    num_blocks = blocks_of(arguments.model)
    if max(arguments.blocks) > num_blocks:
        raise UserError(f"--blocks: {max(arguments.blocks)} is not allowed; the model has {num_blocks} blocks")
    stop = deadline(arguments)
    precision = "bfloat16" if has_bfloat16(torch.device("cpu")) else "float32"
    kept, found = KeptRows(arguments.output / "many-runs-rows.json"), dict[tuple[str, int], Sweep]()
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "SST-2"
        hold_out(arguments.sst2, data, num_train=NUM_PHRASES, num_held_out=NUM_HELD_OUT, part="judged")
        plan = Plan(data, arguments.model, arguments.trials, precision)
        for blocks in (0, *arguments.blocks):
            for who in (OURS, PEER):
                sweep = once(plan, who, blocks, kept=kept, stop=stop)
                if sweep is not None:
                    found[who, blocks] = sweep
    if not found:
        raise UserError("--minutes: no row has ended; give more")
    rows = table(found, num_blocks=num_blocks)
    missing = [f"{who}, {n} blocks" for n in (0, *arguments.blocks) for who in (OURS, PEER) if (who, n) not in found]
    notes = [
        f"{arguments.trials} trials of {EPOCHS} epochs over {NUM_PHRASES:,} phrases of SST-2, learning rates "
        f"{', '.join(RATES)}, {arguments.model.name}; as many at a time as there are cores, one thread each, "
        f"{precision}. Seconds are of a trial's training, the mean of all; wall s of the whole row.",
        f"Missing: {'; '.join(missing)}." if missing else "No row is missing.",
    ]
    title = "Many runs over one store"
    write_table("many-runs", rows, title=title, notes=notes, draw=partial(draw, rows=rows), folder=arguments.output)


def once(plan: Plan, who: str, blocks: int, *, kept: KeptRows, stop: float) -> Sweep | None:
    """The row that is kept, or a new one; None where it is missing and the time is over."""
    key, name = plan.key(who, blocks), f"{who}, {blocks} blocks"
    row = kept.row(key)
    if row is not None:
        return Sweep.of(row)
    if monotonic() >= stop:
        return None
    sweep = plan.measure(who, blocks)
    kept.keep(name, key, asdict(sweep))
    print(f"{name}: {sweep.train_s:.1f} s a trial, {sweep.wall_s:.0f} s in all", flush=True)
    return sweep


def table(found: Mapping[tuple[str, int], Sweep], *, num_blocks: int) -> list[Row]:
    rows: list[Row] = []
    for (who, blocks), sweep in found.items():
        plain, peer = found.get((who, 0)), found.get((PEER, blocks))
        share = blocks / num_blocks if who == OURS else 2 * blocks / num_blocks / 3
        bound = None if plain is None else plain.train_s * (1 - share)
        rows.append(
            {
                "blocks": blocks,
                "by": who,
                "trials": len(sweep.trials),
                "seconds": sweep.train_s,
                "bound, s": bound,
                "bound over seconds": None if bound is None else bound / sweep.train_s,
                "x Trainer": None if peer is None else peer.train_s / sweep.train_s,
                "wall s": sweep.wall_s,
                "stores found": sum(trial.found for trial in sweep.trials),
                "accuracy": mean(trial.accuracy for trial in sweep.trials),
                "best accuracy": max(trial.accuracy for trial in sweep.trials),
            }
        )
    return rows


def draw(figure: Figure, *, rows: Sequence[Row]) -> None:
    axes = figure.subplots()
    for who, marker in ((OURS, "o"), (PEER, "s")):
        own = [row for row in rows if row["by"] == who]
        axes.plot([row["blocks"] for row in own], [row["seconds"] for row in own], marker=marker, label=who)
        bounds = [(row["blocks"], row["bound, s"]) for row in own if row["bound, s"] is not None]
        axes.plot(*zip(*bounds), linestyle=":", color="grey", label=f"bound of {who}") if bounds else None
    axes.set_xlabel("frozen blocks")
    axes.set_ylabel("training seconds of a trial")
    axes.set_ylim(bottom=0)
    axes.legend()


if __name__ == "__main__":
    sys.exit(run_guarded(main))
