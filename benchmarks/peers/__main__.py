"""One epoch of ours, nothing frozen, beside the libraries that a user would have taken: Hugging Face's Trainer, timm.

    pipetransformer bench peers --sst2 FOLDER --text-models FOLDER ... [--cifar100 FOLDER --timm-train FILE]
                                [--ranks 1 2] [--rounds 7] [--precision bfloat16]
    pipetransformer bench peers --quality --sst2 FOLDER --text-models FOLDER ... [--seeds 3]

The same model, samples, batch, recipe, precision and threads; each round starts every contestant anew, one after the
other, trains two epochs and counts the second one, whole. A ratio is of one round. Rows of ours switch one saving
each. A peer may have a process that prepares its batches: the faster way of a first round is its own for all others.
Of timm's two ways of attention (TIMM_FUSED_ATTN) its script has the faster one.
``--quality``: whole runs over some seeds, judged on the task's dev set and 4,500 full sentences that are held out.

Each round is kept in peers-runs.json beside the table when it ends: given again, the command does what is missing,
where the code of the package, of this benchmark and of the libraries is the same.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import torch
from matplotlib.figure import Figure

from benchmarks.peers.contest import HF, KEEPS, OURS, RUNS, TIMM, Contest, Found, Task, once, run, settings_of
from benchmarks.peers.timm_train import write_class_folders
from benchmarks.support.command_line import add_output, bench_parser
from benchmarks.support.kept import KeptRows
from benchmarks.support.measure import CONFIGS
from benchmarks.support.sst2 import hold_out
from benchmarks.support.table import Row, write_table
from pipetransformer.config import load_config
from pipetransformer.errors import UserError
from pipetransformer.launch.arguments import count
from pipetransformer.launch.entry import run_guarded
from pipetransformer.process.device import has_bfloat16

NUM_TRAIN, NUM_HELD_OUT = 8000, 4500
COMMON = (
    *("train.eval_every=1000 epochs", "checkpoint.every=null", "log.wandb=disabled"),
    *("log.every=1000", "freeze.policy=none", "cache.enabled=false", "pipe.measure=true"),
)
PICTURES = (
    *("model.name=vit_tiny_patch16_224", "model.pretrained=false", "data.image_size=32", "data.max_train_samples=768"),
    *("model.kwargs={patch_size: 4, embed_dim: 192, depth: 12, num_heads: 3}", "data.max_eval_samples=256"),
    *("train.batch_size=64", "train.optimizer=adamw", "train.lr=1e-3", "train.label_smoothing=0"),
    "train.epochs=2",
)


def main() -> None:
    parser = bench_parser("peers", description=__doc__)
    parser.add_argument("--sst2", type=Path, metavar="FOLDER", help="the task's train.tsv and dev.tsv")
    parser.add_argument("--text-models", type=Path, nargs="+", default=[], metavar="FOLDER", help="saved encoders")
    parser.add_argument("--cifar100", type=Path, metavar="FOLDER", help="its files; with --timm-train")
    parser.add_argument("--timm-train", type=Path, metavar="FILE", help="timm's train.py, which its wheel leaves out")
    parser.add_argument("--ranks", type=count, nargs="+", default=[1, 2], help="processes of one thread (default 1 2)")
    parser.add_argument("--rounds", type=count, default=7, help="timed rounds (default 7)")
    usual = "bfloat16" if has_bfloat16(torch.device("cpu")) else "float32"
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default=usual, help=f"of all (here {usual})")
    parser.add_argument("--samples", type=count, default=480, help="of an epoch of texts (default 480)")
    parser.add_argument("--quality", action="store_true", help="accuracy instead of speed")
    parser.add_argument("--seeds", type=count, default=3, help="runs of --quality (default 3)")
    add_output(parser)
    arguments = parser.parse_args()
    if not (arguments.text_models and arguments.sst2 or arguments.cifar100):
        raise UserError("--sst2: give the folders of data and models: --sst2 and --text-models, or --cifar100")
    if arguments.timm_train is not None and not arguments.timm_train.is_file():
        raise UserError(f"--timm-train: {arguments.timm_train} is no file; give timm's train.py")
    if arguments.quality:
        tell_quality(arguments)
    else:
        with tempfile.TemporaryDirectory() as folder:
            tell_speed(arguments, scratch=Path(folder))


def texts(folder: Path, model: Path, *overrides: str) -> Task:
    own = (f"data.path={folder.resolve()}", f"model.name={model.resolve()}", "train.epochs=2", *overrides)
    return Task(f"SST-2, {model.name}", CONFIGS / "train_config_sst2_no_freeze.yaml", (*COMMON, *own), HF)


def tell_speed(arguments: Any, *, scratch: Path) -> None:
    timm, cifar100 = arguments.timm_train, arguments.cifar100
    tasks = [texts(arguments.sst2, m, f"data.max_train_samples={arguments.samples}") for m in arguments.text_models]
    notes = [f"{arguments.rounds} rounds, one thread a rank, {arguments.precision}; the second of two epochs."]
    if cifar100 is not None:
        own = (*COMMON, *PICTURES, f"data.path={cifar100.resolve()}")
        config = CONFIGS / "train_config_cifar100_no_freeze.yaml"
        if timm is None:
            notes.append("CIFAR-100: without --timm-train FILE there is no row of timm's script.")
        else:
            write_class_folders(load_config(config, own), scratch / "pictures")
        tasks.append(Task("CIFAR-100, ViT of 12 blocks", config, own, TIMM, scratch / "pictures"))
    rows: list[Row] = []
    kept = KeptRows(arguments.output / RUNS)
    for task, ranks in product(tasks, arguments.ranks):
        contest = Contest(task, ranks, arguments.precision, timm, kept)
        workers = 0
        if task.peer in contest.contestants():
            workers, note = contest.workers()
            notes.append(note)
        found: dict[str, list[Found]] = {name: [] for name in contest.contestants()}
        for number in range(arguments.rounds):
            for name, one in contest.round(number, workers=workers).items():
                found[name].append(one)
            told = ", ".join(f"{name} {runs[-1].samples_per_s:.0f}/s" for name, runs in found.items())
            print(f"{contest.name}, round {number + 1} of {arguments.rounds}: {told}", flush=True)
        rows += rows_of(task, found, ranks=ranks)
    title = "One epoch, nothing frozen, beside the user's other library"
    draw = partial(draw_ratios, rows=rows)
    write_table("peers", rows, title=title, notes=notes, draw=draw, folder=arguments.output)


def rows_of(task: Task, found: Mapping[str, Sequence[Found]], *, ranks: int) -> list[Row]:
    rows: list[Row] = []
    for name, runs in found.items():
        ratios, over_keeps = (rates_over(runs, found.get(other, [])) for other in (task.peer, task.peer + KEEPS))
        peaks = [run.peak_bytes for run in runs if run.peak_bytes is not None]
        is_told = bool(ratios) and name != task.peer
        over_keeps = over_keeps if name != task.peer + KEEPS else []
        rows.append(
            {
                "task": task.name,
                "ranks": ranks,
                "what": name,
                "samples/s": median(run.samples_per_s for run in runs),
                "step ms": 1e3 * median(run.step_s for run in runs),
                "over the peer's": median(ratios) if is_told else None,
                "least": min(ratios) if is_told else None,
                "most": max(ratios) if is_told else None,
                "over it with freed memory kept": median(over_keeps) if over_keeps else None,
                "MB of a rank": median(peaks) / 1e6 if peaks else None,
            }
        )
    return rows


def rates_over(runs: Sequence[Found], others: Sequence[Found]) -> list[float]:
    """Round by round."""
    return [mine.samples_per_s / theirs.samples_per_s for mine, theirs in zip(runs, others)]


def draw_ratios(figure: Figure, *, rows: Sequence[Row]) -> None:
    told = [row for row in rows if row["over the peer's"] is not None]
    figure.set_size_inches(11, 1.5 + 0.3 * len(told))
    axes = figure.subplots()
    for at, row in enumerate(told):
        middle, low, high = (float(str(row[key])) for key in ("over the peer's", "least", "most"))
        axes.barh(at, middle, xerr=[[middle - low], [high - middle]], color=f"C{int(str(row['ranks']))}", capsize=3)
    ranks = {1: "1 rank"}
    names = [f"{row['task']}, {ranks.get(int(str(row['ranks'])), str(row['ranks']) + ' ranks')}" for row in told]
    axes.set_yticks(range(len(told)), [f"{name}: {row['what']}" for name, row in zip(names, told)])
    axes.axvline(1.0, color="black", linewidth=1)
    axes.invert_yaxis()
    axes.set_xlabel("samples a second over the peer's")


def draw_scores(figure: Figure, *, rows: Sequence[Row]) -> None:
    axes = figure.subplots()
    for at, row in enumerate(rows):
        axes.barh(at, float(str(row["accuracy"])), xerr=float(str(row["±"] or 0)), capsize=3)
    axes.set_yticks(range(len(rows)), [f"{row['task']}\n{row['what']}" for row in rows])
    axes.set_xlim(left=0.5)
    axes.invert_yaxis()
    axes.set_xlabel("accuracy")


def tell_quality(arguments: Any) -> None:
    rows: list[Row] = []
    kept = KeptRows(arguments.output / RUNS)
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "SST-2"
        hold_out(arguments.sst2, data, num_train=NUM_TRAIN, num_held_out=NUM_HELD_OUT)
        for model in arguments.text_models:
            task = texts(
                data, model, f"train.precision={arguments.precision}", "data.max_train_samples=null", "train.epochs=1"
            )
            for name in (OURS, HF):
                scores = []
                for seed in range(arguments.seeds):

                    def measure(name: str = name, seed: int = seed, task: Task = task) -> dict[str, object]:
                        chosen = (*task.overrides, f"train.seed={seed}")
                        return asdict(run(name, task, chosen, ranks=2, timm=None, workers=0))

                    title = f"{task.name}, {name}, seed {seed}"
                    accuracy = once(kept, f"{title}, accuracy", measure, settings=settings_of(task))["accuracy"]
                    assert isinstance(accuracy, float)
                    scores.append(accuracy)
                    print(f"{title}: accuracy {accuracy:.4f}", flush=True)
                deviation = stdev(scores) if len(scores) > 1 else None
                each = {f"seed {seed}": score for seed, score in enumerate(scores)}
                rows.append({"task": task.name, "what": name, "accuracy": mean(scores), "±": deviation, **each})
    notes = [
        f"{NUM_TRAIN:,} phrases, one epoch, {arguments.precision}; judged on the dev set and {NUM_HELD_OUT:,} full "
        "sentences of which no phrase is trained on."
    ]
    title = "Accuracy of the plain run beside the other library's"
    draw = partial(draw_scores, rows=rows)
    write_table("peers-quality", rows, title=title, notes=notes, draw=draw, folder=arguments.output)


if __name__ == "__main__":
    sys.exit(run_guarded(main))
