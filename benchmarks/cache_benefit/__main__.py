"""The cache beside no cache: pairs of whole runs that differ by it alone, side by side, and which is slower.

    pipetransformer bench cache-benefit --sst2 FOLDER --model FOLDER [--pairs N] [--minutes M]

Both runs of a pair begin at once, on one rank, one thread and one core each, so that a slow moment of the machine meets
both; they change cores from pair to pair. The one that ends first leaves the machine to the other for the rest of it.
Every run begins without anything that an earlier one has stored, and leaves its stores for later runs, as the
configuration does where nothing is said. A ratio is of one pair: seconds with the cache over those without it, of
training alone (steps, advance passes over the training samples, guard and transitions), and of the whole process.
``upper end`` is that of the 90 % interval of the mean ratio of training: "never slower by more than a fiftieth" is seen
where it lies below 1.02.

Cases: the default policy; two blocks of the model frozen, where there is little to save; half of them, for one epoch
alone, where an advance pass would take what it saves; half of a ViT's on augmented pictures, which are cached in views.

Each pair is kept in cache-benefit-pairs.json when it ends, and the command given again does what is missing;
--minutes ends it before the next pair.
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
from statistics import mean, median
from time import monotonic, perf_counter

import torch
from matplotlib.figure import Figure

from benchmarks.elastic.__main__ import blocks_of
from benchmarks.elastic.judged import half_interval
from benchmarks.elastic.processes import launch
from benchmarks.support.command_line import add_minutes, add_output, bench_parser, deadline, keep_whole
from benchmarks.support.git import ROOT
from benchmarks.support.kept import KeptRows, key_of
from benchmarks.support.measure import CONFIGS, environment, spread
from benchmarks.support.table import Row, write_table
from pipetransformer.errors import UserError
from pipetransformer.launch.arguments import Parser, count
from pipetransformer.launch.entry import run_guarded
from pipetransformer.process.device import has_bfloat16

CODE = ("pipetransformer/**/*.py", "config/*.yaml", "main_*.py", "benchmarks/cache_benefit/*.py")
_COMMON = ("train.eval_every=1000 epochs", "log.wandb=disabled", "log.every=1000", "checkpoint.every=null")
_TEXTS = ("train.batch_size=32", "train.lr=5e-5", "train.head_lr_scale=10", "data.max_eval_samples=200")
_UNGUARDED = ("freeze.policy=static", "freeze.guard=false")
_PICTURES = (
    *("model.kwargs={patch_size: 2, in_chans: 1, embed_dim: 96, depth: 12, num_heads: 4}", "data.augment=basic"),
    "train.epochs=24",
)


@dataclass(frozen=True, slots=True)
class Case:
    """Two runs that differ by the cache alone.

    Attributes:
        name: its name.
        settings: of both runs; HALF stands for half of the model's blocks.
        of_texts: whether they train on SST-2; else on digits, a ViT from random weights.
    """

    name: str
    settings: tuple[str, ...]
    of_texts: bool = True

    @property
    def config(self) -> Path:
        return CONFIGS / f"train_config_{'sst2' if self.of_texts else 'digits'}_all_in_one.yaml"

    @property
    def entry(self) -> Path:
        return ROOT / ("main_tc.py" if self.of_texts else "main_cv.py")


CASES = (
    Case("default policy", (*_TEXTS, "data.max_train_samples=2000", "train.epochs=3")),
    Case(
        "two blocks",
        (*_TEXTS, *_UNGUARDED, "freeze.max_frozen=2", "data.max_train_samples=800", "train.epochs=3"),
    ),
    Case(
        "half, one epoch",
        (*_TEXTS, *_UNGUARDED, "freeze.max_frozen=HALF", "data.max_train_samples=2000", "train.epochs=1"),
    ),
    Case("half, views of pictures", (*_PICTURES, *_UNGUARDED, "freeze.max_frozen=6"), of_texts=False),
)


@dataclass(frozen=True, slots=True)
class Timed:
    """One run's figures.

    Attributes:
        train_s: seconds of its training.
        wall_s: seconds of its processes, from their launch to their end.
        boundary: blocks before the cache's boundary, of its last plan; None: no cache.
    """

    train_s: float
    wall_s: float
    boundary: int | None


@dataclass(frozen=True, slots=True)
class Pair:
    """Both runs of a pair."""

    cached: Timed
    plain: Timed

    @classmethod
    def of(cls, row: Mapping[str, object]) -> Pair:
        """The pair of a row that is kept."""
        return cls(*(Timed(**row[name]) for name in ("cached", "plain")))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Plan:
    """The parts that all pairs share.

    Attributes:
        data: folder of SST-2.
        model: folder of the encoder.
        num_blocks: of the encoder.
        precision: of all runs.
    """

    data: Path
    model: Path
    num_blocks: int
    precision: str

    def settings(self, case: Case, *, seed: int) -> tuple[str, ...]:
        """All of a run's but the cache and the places of files."""
        own = tuple(each.replace("HALF", str(self.num_blocks // 2)) for each in case.settings)
        return (*_COMMON, *own, f"train.precision={self.precision}", f"train.seed={seed}")

    def key(self, case: Case, *, seed: int) -> str:
        versions = [environment()[key] for key in ("cpu", "torch", "transformers", "timm")]
        return key_of([case.name, self.model.name, *self.settings(case, seed=seed), *versions], code=CODE)

    def measure(self, case: Case, *, seed: int) -> Pair:
        """Runs both at once."""
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) < 2:
            raise UserError("cache-benefit: one core is not enough; each run of a pair takes one of its own")

        def one(is_cached: bool) -> Timed:
            os.sched_setaffinity(0, {cores[(seed + is_cached) % 2]})  # this thread's, and the processes that it starts
            return self._run(case, seed, is_cached)

        with ThreadPoolExecutor(2) as threads:
            return Pair(*threads.map(one, (True, False)))

    def _run(self, case: Case, seed: int, is_cached: bool) -> Timed:
        places = (f"data.path={self.data}", f"model.name={self.model.resolve()}") if case.of_texts else ()
        own = (*self.settings(case, seed=seed), *places, f"cache.enabled={str(is_cached).lower()}")
        name = f"{case.name}, seed {seed}, cache {'on' if is_cached else 'off'}"
        with tempfile.TemporaryDirectory() as folder:
            script = [str(case.entry), str(case.config), *own, f"run.dir={folder}", "run.id=one"]
            began = perf_counter()
            launch(script, ranks=1, name=name, variables={"PIPETRANSFORMER_CACHE": f"{folder}/cache"})
            wall_s = perf_counter() - began
            summary = json.loads((Path(folder) / "one" / "summary.json").read_text())
            lines = (Path(folder) / "one" / "events.jsonl").read_text().splitlines()
        plans = [event["plan"] for event in map(json.loads, lines) if event["event"] == "plan"]
        return Timed(summary["train_s"], wall_s, plans[-1]["cached"])


def make_parser() -> Parser:
    parser = bench_parser("cache-benefit", description=__doc__)
    parser.add_argument("--sst2", type=Path, required=True, metavar="FOLDER", help="SST-2's train.tsv and dev.tsv")
    parser.add_argument("--model", type=Path, required=True, metavar="FOLDER", help="a saved encoder")
    parser.add_argument("--pairs", type=count, default=8, help="of each case (default 8)")
    add_minutes(parser, what="pair")
    add_output(parser)
    return parser


def main() -> None:
    parser = make_parser()
    arguments = parser.parse_args()
    keep_whole(parser, arguments, "pairs")
    num_blocks, stop = blocks_of(arguments.model), deadline(arguments)
    precision = "bfloat16" if has_bfloat16(torch.device("cpu")) else "float32"
    kept, found = KeptRows(arguments.output / "cache-benefit-pairs.json"), {case.name: list[Pair]() for case in CASES}
    plan = Plan(arguments.sst2, arguments.model, num_blocks, precision)
    for seed in range(arguments.pairs):
        for case in CASES:
            pair = once(plan, case, seed, kept=kept, stop=stop)
            found[case.name] += [pair] if pair is not None else []
    rows = table(found)
    if not rows:
        raise UserError("--minutes: no pair has ended; give more")
    missing = [
        f"{name} ({arguments.pairs - len(pairs)})" for name, pairs in found.items() if len(pairs) < arguments.pairs
    ]
    notes = [
        f"SST-2 with {arguments.model.name} ({num_blocks} blocks), and digits with a ViT of 12, {precision}; "
        "one rank, thread and core a run. Ratios: seconds with the cache over those without it, pair by pair.",
        f"Missing pairs: {'; '.join(missing)}." if missing else "No pair is missing.",
    ]
    title = "The cache beside no cache"
    write_table(
        "cache-benefit", rows, title=title, notes=notes, draw=partial(draw, found=found), folder=arguments.output
    )


def once(plan: Plan, case: Case, seed: int, *, kept: KeptRows, stop: float) -> Pair | None:
    """The pair that is kept, or a new one; None where it is missing and the time is over."""
    key, name = plan.key(case, seed=seed), f"{case.name}, seed {seed}"
    row = kept.row(key)
    if row is not None:
        return Pair.of(row)
    if monotonic() >= stop:
        return None
    pair = plan.measure(case, seed=seed)
    kept.keep(name, key, asdict(pair))
    print(f"{name}: {pair.cached.train_s:.1f} s, without the cache {pair.plain.train_s:.1f} s", flush=True)
    return pair


def table(found: Mapping[str, Sequence[Pair]]) -> list[Row]:
    """A row for each case that has pairs."""
    rows: list[Row] = []
    for name, pairs in found.items():
        if not pairs:
            continue
        ratios = [pair.cached.train_s / pair.plain.train_s for pair in pairs]
        whole = [pair.cached.wall_s / pair.plain.wall_s for pair in pairs]
        half = half_interval(ratios, level=0.9)
        rows.append(
            {
                "case": name,
                "pairs": len(pairs),
                "cached blocks": ", ".join(sorted({str(pair.cached.boundary) for pair in pairs})),
                "train s": median(pair.cached.train_s for pair in pairs),
                "without": median(pair.plain.train_s for pair in pairs),
                "ratio": spread(ratios),
                "mean": mean(ratios),
                "±": half,
                "upper end": None if half is None else mean(ratios) + half,
                "whole process": spread(whole),
            }
        )
    return rows


def draw(figure: Figure, *, found: Mapping[str, Sequence[Pair]]) -> None:
    axes = figure.subplots()
    names = [name for name, pairs in found.items() if pairs]
    for place, name in enumerate(names):
        ratios = [pair.cached.train_s / pair.plain.train_s for pair in found[name]]
        axes.plot(ratios, [place] * len(ratios), "o", alpha=0.5)
        axes.errorbar(mean(ratios), place, xerr=half_interval(ratios, level=0.9) or 0, fmt="k|", capsize=6)
    axes.axvline(1, color="grey", linewidth=1)
    axes.axvline(1.02, color="grey", linestyle=":", label="a fiftieth slower")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("training seconds with the cache over those without it")
    axes.legend()


if __name__ == "__main__":
    sys.exit(run_guarded(main))
