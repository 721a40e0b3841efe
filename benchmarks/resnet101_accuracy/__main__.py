"""torchgpipe's table of ResNet-101's accuracy: data parallel and pipelines at small and large batches.

    pipetransformer bench resnet101-accuracy --data FOLDER [--seeds 3] [--epochs N]

FOLDER says what is trained. Class folders as ImageNet's (train/CLASS/*.jpg, val/CLASS/*.jpg): ResNet-101 with the rows,
devices, micro-batches and recipe of torchgpipe's examples/resnet101_accuracy_benchmark at 1c0a887: 90 epochs of SGD
with Nesterov momentum, random crops of 224 pixels, a learning rate that grows with the batch, its warm-up and three
falls. CIFAR-100: a small ResNet with batches an eighth as large, for machines without GPUs. What must not differ is the
row of a batch, not its error; the small table adds data parallel at the largest batch, which the original does not
train.

Each run is kept in resnet101-accuracy-runs.json beside the table when it ends, and a started one in the cache folder
($PIPETRANSFORMER_CACHE) after each epoch: given again, the command does what is missing.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from benchmarks.ddp_vs_pipe.fresh_ranks import FreshRanks
from benchmarks.resnet101_accuracy.kept import KeptRuns, key_of
from benchmarks.resnet101_accuracy.pictures import find_pictures, is_class_folders
from benchmarks.resnet101_accuracy.report import tell
from benchmarks.resnet101_accuracy.sizes import IMAGENET_PIXELS, Size, original, small
from benchmarks.resnet101_accuracy.training import Job, Run, train
from benchmarks.support.command_line import add_output, bench_parser
from benchmarks.support.graphs import needs, num_ranks
from pipetransformer.config import DataConfig
from pipetransformer.data.info import describe
from pipetransformer.data.prepared import cache_folder
from pipetransformer.errors import UserError
from pipetransformer.launch.arguments import count
from pipetransformer.launch.entry import run_guarded

NAME = "resnet101-accuracy"
_TIMEOUT_SECONDS = 30 * 24 * 3600.0  # of a run: 90 epochs of ImageNet


def main() -> None:
    parser = bench_parser(NAME, description=__doc__)
    parser.add_argument(
        "--data", type=Path, metavar="FOLDER", help="class folders (train/CLASS, val/CLASS), or CIFAR-100's files"
    )
    parser.add_argument("--ranks", type=count, help="most devices of a row (default 8; on CUDA as many as there are)")
    parser.add_argument("--seeds", type=count, default=3, help="runs of each row (default 3)")
    parser.add_argument("--epochs", type=count, help="of each run (default: the recipe's)")
    add_output(parser)
    arguments = parser.parse_args()
    size = size_for(arguments.data)
    if arguments.epochs is not None:
        size = size.with_epochs(arguments.epochs)
    most = num_ranks(arguments.ranks)
    kept = KeptRuns(arguments.output)
    runs = [r for r in size.runs(num_seeds=arguments.seeds) if needs(r.setting, world_size=most) is None]
    complete(runs, kept, data=arguments.data.resolve(), checkpoints=cache_folder().resolve() / NAME)
    errors: dict[str, list[float]] = {}
    for run in runs:
        error = kept.error(run)
        assert error is not None, run
        errors.setdefault(run.setting.name, []).append(error)
    tell(errors, size, world_size=most, folder=arguments.output)


def size_for(folder: Path | None) -> Size:
    """The table that is trained on the pictures of a folder. Raises UserError."""
    wanted = "give one with class folders (train/CLASS, val/CLASS) or with CIFAR-100 (parquet files or the archive)"
    if folder is None:
        raise UserError(f"--data: no folder is given; {wanted}")
    if not folder.is_dir():
        raise UserError(f"--data: {folder} is no folder; {wanted}")
    if not is_class_folders(folder):
        try:
            describe(DataConfig(name="cifar100", path=str(folder.resolve())))
        except UserError as error:
            raise UserError(f"--data: {folder} holds no pictures that are known; {wanted}") from error
        return small()
    size = original(find_pictures(folder, image_size=IMAGENET_PIXELS))
    largest = max(setting.batch_size for setting in size.settings)
    if size.pictures.num_train < largest:
        raise UserError(f"--data: {folder} has {size.pictures.num_train} pictures to train; give a batch's {largest}")
    return size


def complete(runs: list[Run], kept: KeptRuns, *, data: Path, checkpoints: Path) -> None:
    """Trains the runs that are missing, each on ranks of its own, and keeps each as soon as it has ended."""
    missing = [run for run in runs if kept.error(run) is None]
    print(f"{len(runs) - len(missing)} of {len(runs)} runs are kept", flush=True)
    with FreshRanks.ready(timeout_seconds=_TIMEOUT_SECONDS) as ranks:
        for run in missing:
            started = checkpoints / key_of(run)
            job = Job(run, str(data), str(started))
            outcome, *_ = ranks.run(train, job, num_ranks=run.setting.num_devices)
            kept.keep(run, outcome)
            shutil.rmtree(started, ignore_errors=True)
            told = f"top-1 error {outcome.error:.2f} %, {outcome.seconds:.0f} s"
            print(f"{run.setting.name} seed {run.seed}: {told}", flush=True)


if __name__ == "__main__":
    sys.exit(run_guarded(main))
