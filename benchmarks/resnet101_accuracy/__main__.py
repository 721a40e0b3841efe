"""torchgpipe's table of ResNet-101's accuracy: data parallel and pipelines at small and large batches, on CIFAR-100.

    pipetransformer bench resnet101-accuracy --data FOLDER [--scale small|full] [--seeds 3] [--epochs N]

Rows, devices, micro-batches and recipe are those of torchgpipe's examples/resnet101_accuracy_benchmark at 1c0a887: SGD
with Nesterov momentum, a learning rate that grows with the batch, its warm-up and three decays, in proportion to the
length of the run. The original trains 90 epochs of ImageNet. What must not differ is the row of a batch, not its error;
small scale adds data parallel at the largest batch, which the original does not train.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from time import perf_counter

import torch
from matplotlib.figure import Figure
from scipy.stats import t as student
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.support.command_line import add_output, bench_parser
from benchmarks.support.graphs import (
    GraphBench,
    Setting,
    add_scale,
    cross_entropy_of,
    group_of,
    needs,
    num_ranks,
    pick_scale,
)
from benchmarks.support.ranks import as_ranks
from benchmarks.support.table import Row, write_table
from pipetransformer.config import DataConfig
from pipetransformer.data import Dataset
from pipetransformer.data.images import ImagePreprocessing, load_image_data
from pipetransformer.data.info import describe
from pipetransformer.errors import UserError
from pipetransformer.graphs.zoo import zoo_model
from pipetransformer.launch.arguments import count
from pipetransformer.launch.entry import run_guarded
from pipetransformer.process.collectives import led_by, slowest
from pipetransformer.process.world import World

NAME = "resnet101-accuracy"
# Pixels as CIFAR-100's own statistics have them.
_PICTURES = ImagePreprocessing(32, 3, (0.507, 0.487, 0.441), (0.267, 0.256, 0.276), "bicubic")
_NUM_CLASSES = 100
_EVALUATION_ROWS = 500
_CONFIDENCE = 0.95

# Top-1 error in per cent on ImageNet, as published: mean, deviation.
PUBLISHED = {
    "dataparallel-256": (22.02, 0.11),
    "dataparallel-1k": (22.04, 0.24),
    "pipeline-256": (21.99, 0.13),
    "pipeline-1k": (22.24, 0.19),
    "pipeline-4k": (22.13, 0.09),
}
# Rows that must agree. The original trains 4k in pipelines alone, and so does full scale, which claims nothing of it.
PAIRS = {
    "pipeline-256": "dataparallel-256",
    "pipeline-1k": "dataparallel-1k",
    "pipeline-4k": "dataparallel-4k",
}


@dataclass(frozen=True, slots=True)
class Size:
    """The sizes that ``--scale`` picks.

    Attributes:
        settings: data-parallel rows have no checkpointing, and a replica for every device.
        base_batch: whose learning rate is 0.1.
        divisor: what the original's batches are divided by.
    """

    model: str
    build: Callable[[], nn.Module]
    settings: tuple[Setting, ...]
    base_batch: int
    divisor: int
    epochs: int
    train_samples: int | None
    eval_samples: int | None


def _resnet(**overrides: object) -> nn.Module:
    """For pictures of 32 pixels: a first convolution of 3 x 3 and no pooling behind it."""
    stride = overrides.pop("stride")
    model = zoo_model("resnet101").build(num_classes=_NUM_CLASSES, **overrides)
    assert isinstance(model.conv1, nn.Conv2d) and isinstance(stride, int)
    model.conv1 = nn.Conv2d(3, model.conv1.out_channels, 3, stride=stride, padding=1, bias=False)
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    model.maxpool = nn.Identity()
    return model


SIZES = {
    "full": Size(
        model="ResNet-101",
        build=partial(_resnet, stride=1),
        settings=(
            Setting("dataparallel-256", 2, 256, checkpoint=None),
            Setting("dataparallel-1k", 8, 1024, checkpoint=None),
            Setting("pipeline-256", 2, 256, 4),
            Setting("pipeline-1k", 8, 1024, 64),
            Setting("pipeline-4k", 8, 4096, 64),
        ),
        base_batch=256,
        divisor=1,
        epochs=90,
        train_samples=None,
        eval_samples=None,
    ),
    # Batches and micro-batches divided by 8, so that a replica and a micro-batch have 16 rows, 8 or 64; pipelines of 2
    # stages, because their number does not enter the mathematics.
    "small": Size(
        model="a ResNet of 4 blocks with 16 to 128 channels",
        build=partial(_resnet, stride=2, layers=(1, 1, 1, 1), channels=(16, 32, 64, 128)),
        settings=(
            Setting("dataparallel-256", 2, 32, checkpoint=None),
            Setting("dataparallel-1k", 8, 128, checkpoint=None),
            Setting("dataparallel-4k", 8, 512, checkpoint=None),
            Setting("pipeline-256", 2, 32, 4),
            Setting("pipeline-1k", 2, 128, 8),
            Setting("pipeline-4k", 2, 512, 8),
        ),
        base_batch=32,
        divisor=8,
        epochs=3,
        train_samples=12_800,
        eval_samples=5_000,
    ),
}


def main() -> None:
    parser = bench_parser(NAME, description=__doc__)
    add_scale(parser)
    parser.add_argument(
        "--data", type=Path, metavar="FOLDER", help="where CIFAR-100 lies: parquet files or the archive"
    )
    parser.add_argument("--seeds", type=count, default=3, help="runs of each row (default 3)")
    parser.add_argument("--epochs", type=count, help="of each run (default: the scale's)")
    add_output(parser)
    arguments = parser.parse_args()
    folder: Path | None = arguments.data
    if folder is None:
        raise UserError("--data: nothing is given; give the folder that holds CIFAR-100 (parquet files or the archive)")
    if not folder.is_dir():
        raise UserError(f"--data: {folder} is no folder; give one that holds CIFAR-100")
    size = SIZES[pick_scale(arguments.scale)]
    if arguments.epochs is not None:
        size = replace(size, epochs=arguments.epochs)
    data = DataConfig(
        name="cifar100",
        path=str(folder.resolve()),
        max_train_samples=size.train_samples,
        max_eval_samples=size.eval_samples,
    )
    describe(data)  # a mistake is told before ranks start
    as_ranks(
        __file__,
        partial(measure, data=data, size=size, num_seeds=arguments.seeds, folder=arguments.output),
        num_ranks=num_ranks(arguments.ranks),
    )


def measure(world: World, *, data: DataConfig, size: Size, num_seeds: int, folder: Path) -> None:
    """All rows, on one rank; rank 0 tells."""
    splits = load_image_data(data, info=describe(data), preprocessing=_PICTURES, seed=0, lead=partial(led_by, 0))
    errors = Trials(world, size, splits).run(num_seeds=num_seeds)
    if world.rank == 0:
        tell(errors, size, world_size=world.size, num_seeds=num_seeds, splits=splits, to=folder)


class Trials:
    """Runs of all rows from the same weights and in the same order of samples, seed by seed."""

    def __init__(self, world: World, size: Size, splits: Mapping[str, Dataset]) -> None:
        self._world = world
        self._size = size
        self._train, self._eval = splits["train"], splits["eval"]
        self._bench = GraphBench(world, build=size.build, image_size=_PICTURES.size, num_classes=_NUM_CLASSES)

    def run(self, *, num_seeds: int) -> dict[str, list[float]]:
        """By row, top-1 errors in per cent of all seeds; rows that need more ranks are left out."""
        errors: dict[str, list[float]] = {}
        able = [s for s in self._size.settings if needs(s, world_size=self._world.size) is None]
        for seed in range(num_seeds):
            for setting in able:
                start = perf_counter()
                run = self._data_parallel if setting.checkpoint is None else self._pipelined
                right = slowest(run(setting, seed=seed))  # only ranks that evaluate have any
                errors.setdefault(setting.name, []).append(100 * (1 - right / len(self._eval)))
                if self._world.rank == 0:
                    told = f"top-1 error {errors[setting.name][-1]:.2f} %, {perf_counter() - start:.0f} s"
                    print(f"{setting.name} seed {seed}: {told}", flush=True)
        return errors

    def _data_parallel(self, setting: Setting, *, seed: int) -> int:
        """Samples that replica 0 gets right; 0 on the other ranks."""
        group, rank = self._bench.group(setting.num_devices), self._world.rank
        if rank >= setting.num_devices:
            return 0
        self._bench.reset(seed=seed)
        # As nn.DataParallel: a replica normalises by its own rows, and replica 0's running statistics are the model's.
        model = DistributedDataParallel(self._bench.model.train(), process_group=group)
        rows = setting.batch_size // setting.num_devices
        loss = cross_entropy_of(rows)  # Note: DDP takes the mean of the replicas' gradients.
        optimizer = _optimizer([{"params": list(model.parameters())}])
        for inputs, target in self._batches(setting, optimizer, seed=seed, mine=slice(rank * rows, (rank + 1) * rows)):
            torch.autograd.backward(loss(model(inputs), target))
            optimizer.step()
            optimizer.zero_grad()
        if rank > 0:
            return 0
        self._bench.model.eval()
        with torch.no_grad():
            return self._num_right(self._bench.model, rows=_EVALUATION_ROWS)

    def _pipelined(self, setting: Setting, *, seed: int) -> int:
        """Samples that are right as the last stage says; 0 on the other ranks."""
        pipeline = self._bench.pipeline(setting)
        if pipeline is None:
            return 0
        self._bench.reset(seed=seed)
        optimizer = _optimizer(group_of(pipeline))
        for inputs, target in self._batches(setting, optimizer, seed=seed, mine=slice(None)):
            pipeline.train((inputs,), target)
            optimizer.step()
            optimizer.zero_grad()
        return self._num_right(lambda inputs: pipeline.evaluate((inputs,)), rows=setting.batch_size)

    def _batches(
        self, setting: Setting, optimizer: torch.optim.Optimizer, *, seed: int, mine: slice
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Whole batches of every epoch; sets the learning rate before each."""
        num_steps = len(self._train) // setting.batch_size
        for epoch in range(self._size.epochs):
            random = torch.Generator().manual_seed(1000 * seed + epoch)
            order = torch.randperm(len(self._train), generator=random)
            for step in range(num_steps):
                progress = (epoch + step / num_steps) / self._size.epochs
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate(progress, multiplier=setting.batch_size / self._size.base_batch)
                ids = order[step * setting.batch_size : (step + 1) * setting.batch_size][mine]
                yield self._load(self._train, ids, epoch=1000 * seed + epoch)

    def _num_right(self, forward: Callable[[Tensor], Tensor | None], *, rows: int) -> int:
        """``forward`` takes ``rows`` at a time; of the last batch, those that fill it are not counted."""
        right = 0
        for ids in torch.split(torch.arange(len(self._eval)), rows):
            filled = torch.cat((ids, ids.new_zeros(rows - len(ids))))
            inputs, target = self._load(self._eval, filled, epoch=0)
            output = forward(inputs)
            if output is not None:
                right += int((output.argmax(1) == target)[: len(ids)].sum())
        return right

    def _load(self, data: Dataset, ids: Tensor, *, epoch: int) -> tuple[Tensor, Tensor]:
        pictures = data.inputs(ids.numpy(), length=_PICTURES.size, epoch=epoch)["pixel_values"]
        return pictures.to(self._world.device), data.labels[ids].to(self._world.device)


def learning_rate(progress: float, *, multiplier: float) -> float:
    """The original's, which is written for 90 epochs, at a share of the run.

    From 0.1 it grows to ``multiplier`` times that over 4 epochs, and falls to a tenth at 30, 60 and 80.
    """
    epoch = 90 * progress
    warm = 1 + min(1.0, epoch / 4) * (max(1.0, multiplier) - 1)
    return 0.1 * warm * 0.1 ** sum(epoch >= fall for fall in (30, 60, 80))


def _optimizer(groups: list[dict[str, list[nn.Parameter]]]) -> torch.optim.SGD:
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=1e-4, nesterov=True)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Difference of two means, and the most that noise makes of it in 19 of 20 cases (Welch's test)."""

    difference: float
    noise: float

    @property
    def is_noise(self) -> bool:
        return abs(self.difference) <= self.noise


def compare(mine: Sequence[float], others: Sequence[float]) -> Comparison | None:
    """None where there are too few runs to know their deviation."""
    if min(len(mine), len(others)) < 2:
        return None
    parts = [stdev(values) ** 2 / len(values) for values in (mine, others)]
    error = sum(parts) ** 0.5
    difference = mean(mine) - mean(others)
    if error == 0:
        return Comparison(difference, 0.0)
    # Welch and Satterthwaite's degrees of freedom.
    freedom = sum(parts) ** 2 / sum(part**2 / (len(values) - 1) for part, values in zip(parts, (mine, others)))
    return Comparison(difference, float(student.ppf((1 + _CONFIDENCE) / 2, freedom)) * error)


def rows_of(errors: Mapping[str, list[float]], settings: Sequence[Setting], *, world_size: int) -> list[Row]:
    rows: list[Row] = []
    for setting in settings:
        runs = errors.get(setting.name, [])
        published = PUBLISHED.get(setting.name)
        other = PAIRS.get(setting.name)
        compared = compare(runs, errors.get(other, [])) if other else None
        rows.append(
            {
                "experiment": setting.name,
                "devices": setting.num_devices,
                "batch": setting.batch_size,
                "micro-batches": setting.num_microbatches if setting.checkpoint else None,
                "top-1 error %": mean(runs) if runs else None,
                "±": stdev(runs) if len(runs) > 1 else None,
                "beside": other if other in errors else None,
                "difference": compared.difference if compared else None,
                "noise": compared.noise if compared else None,
                "within noise": ("yes" if compared.is_noise else "no") if compared else None,
                "published error % (ImageNet)": "{:.2f} ± {:.2f}".format(*published) if published else None,
                "note": needs(setting, world_size=world_size),
            }
        )
    return rows


def tell(
    errors: Mapping[str, list[float]],
    size: Size,
    *,
    world_size: int,
    num_seeds: int,
    splits: Mapping[str, Dataset],
    to: Path,
) -> None:
    rows = rows_of(errors, size.settings, world_size=world_size)
    compared = [row for row in rows if row["within noise"] is not None]
    outside = [str(row["experiment"]) for row in compared if row["within noise"] == "no"]
    verdict = f"Not within noise: {', '.join(outside)}." if outside else "All compared rows are within noise."
    divided = [
        f"Batches are the original's, which name the rows, divided by {size.divisor}; numbers of devices and "
        "micro-batches are the table's own."
    ]
    notes = [
        f"{size.model} on {len(splits['train']):,} pictures of CIFAR-100 for {size.epochs} epochs, evaluated on "
        f"{len(splits['eval']):,}; chance is {100 - 100 / _NUM_CLASSES:.0f} % error. {num_seeds} seeds.",
        *(divided if size.divisor > 1 else []),
        "Data parallel: DistributedDataParallel, each replica normalises by its own rows and the first one's running "
        "statistics are kept. Pipelines: GPipe with recomputation of all micro-batches but the last; each micro-batch "
        "normalises by its own rows, and running statistics see the whole batch once.",
        f"Learning rate 0.1 for batch {size.base_batch}, in proportion for larger ones, warmed up over 4/90 of the "
        "run, divided by 10 at 30/90, 60/90 and 80/90; momentum 0.9 (Nesterov), weight decay 0.0001.",
        "A row is within noise of the one beside it if their means differ by no more than Welch's t-test leaves to "
        f"chance at {_CONFIDENCE:.0%}: `noise`, which is also the smallest difference that these runs could show.",
        "The published errors are of ResNet-101 on ImageNet: not of this task.",
        verdict if compared else "Too few runs to compare.",
    ]
    write_table(NAME, rows, title="ResNet-101 accuracy", notes=notes, draw=lambda f: draw(f, rows, errors), folder=to)


def draw(figure: Figure, rows: Sequence[Row], errors: Mapping[str, list[float]]) -> None:
    """Every run as a point, means with their deviation."""
    axes = figure.subplots()
    names = [str(row["experiment"]) for row in rows]
    for at, (name, row) in enumerate(zip(names, rows)):
        runs = errors.get(name, [])
        axes.plot([at] * len(runs), runs, "o", color="grey", alpha=0.6)
        if runs:
            axes.errorbar(at + 0.15, mean(runs), yerr=row["±"], fmt="s", capsize=4, color="tab:blue")
        else:
            axes.annotate(str(row["note"]), (at, 0.5), xycoords=("data", "axes fraction"), ha="center")
    axes.set_xticks(range(len(names)), names)
    axes.set_ylabel("top-1 error, per cent")


if __name__ == "__main__":
    sys.exit(run_guarded(main))
