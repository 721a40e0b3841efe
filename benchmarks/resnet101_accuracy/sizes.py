"""The rows of the table: the original's on class folders, and small ones on CIFAR-100."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from benchmarks.resnet101_accuracy.network import Network, Recipe
from benchmarks.resnet101_accuracy.pictures import PictureSet
from benchmarks.resnet101_accuracy.training import Run
from benchmarks.support.graphs import Setting

__all__ = ["PAIRS", "PUBLISHED", "Experiment", "Size", "original", "small"]

# Top-1 error in per cent on ImageNet, as published: mean, deviation.
PUBLISHED = {
    "dataparallel-256": (22.02, 0.11),
    "dataparallel-1k": (22.04, 0.24),
    "pipeline-256": (21.99, 0.13),
    "pipeline-1k": (22.24, 0.19),
    "pipeline-4k": (22.13, 0.09),
}
# Rows that must agree. The original trains 4k in pipelines alone, so that its table here claims nothing of that.
PAIRS = {
    "pipeline-256": "dataparallel-256",
    "pipeline-1k": "dataparallel-1k",
    "pipeline-1k, 8 stages": "dataparallel-1k",
    "pipeline-4k": "dataparallel-4k",
    "dataparallel-256, 4 replicas": "pipeline-256",
}
IMAGENET_PIXELS, CIFAR_PIXELS = 224, 32


@dataclass(frozen=True, slots=True)
class Experiment:
    """A row. ``most_seeds``: where fewer are trained than of the others."""

    setting: Setting
    most_seeds: int | None = None


@dataclass(frozen=True, slots=True)
class Size:
    """A table.

    Attributes:
        told: the network, in the table's notes.
        waves: rows in the order of training: all seeds of one wave before the next.
        rows: their order in the table.
        divisor: the number that the original's batches are divided by. Data-parallel rows have no checkpointing, and
            a replica for every device.
    """

    told: str
    network: Network
    recipe: Recipe
    pictures: PictureSet
    waves: tuple[tuple[Experiment, ...], ...]
    rows: tuple[str, ...]
    divisor: int = 1

    @property
    def settings(self) -> list[Setting]:
        """As the table has them."""
        by_name = {row.setting.name: row.setting for wave in self.waves for row in wave}
        return [by_name[name] for name in self.rows]

    def runs(self, *, num_seeds: int) -> Iterator[Run]:
        """In the order of training: what the claim needs first."""
        for wave in self.waves:
            for seed in range(num_seeds):
                for row in wave:
                    if row.most_seeds is None or seed < row.most_seeds:
                        yield Run(row.setting, seed, self.network, self.recipe, self.pictures)

    def with_epochs(self, epochs: int) -> Size:
        return replace(self, recipe=replace(self.recipe, epochs=epochs))


def original(pictures: PictureSet) -> Size:
    """As torchgpipe trained ImageNet: examples/resnet101_accuracy_benchmark/main.py at 1c0a887."""
    settings = (
        Setting("dataparallel-256", 2, 256, checkpoint=None),
        Setting("dataparallel-1k", 8, 1024, checkpoint=None),
        Setting("pipeline-256", 2, 256, 4),
        Setting("pipeline-1k", 8, 1024, 64),
        Setting("pipeline-4k", 8, 4096, 64),
    )
    rows = tuple(setting.name for setting in settings)
    return Size("ResNet-101", Network(), Recipe(), pictures, (tuple(map(Experiment, settings)),), rows)


def small() -> Size:
    """Batches and micro-batches divided by 8, so that a replica and a micro-batch have 16 rows, 8 or 64; pipelines of 2
    stages, because their number does not enter the mathematics, and one of 8 to show it. Errors of batch 128 vary more
    from seed to seed than those of batch 32, so that four seeds find what three find there. Four
    replicas of batch 32 have 8 rows each, as that batch's micro-batches have."""
    data_256 = Setting("dataparallel-256", 2, 32, checkpoint=None)
    data_256_of_4 = Setting("dataparallel-256, 4 replicas", 4, 32, checkpoint=None)
    data_1k = Setting("dataparallel-1k", 8, 128, checkpoint=None)
    data_4k = Setting("dataparallel-4k", 8, 512, checkpoint=None)
    pipe_256, pipe_4k = Setting("pipeline-256", 2, 32, 4), Setting("pipeline-4k", 2, 512, 8)
    pipe_1k, pipe_1k_of_8 = Setting("pipeline-1k", 2, 128, 8), Setting("pipeline-1k, 8 stages", 8, 128, 8)
    return Size(
        told="a ResNet of 4 blocks with 16 to 128 channels",
        network=Network((1, 1, 1, 1), (16, 32, 64, 128), stride=2, channels_last=True),
        recipe=Recipe(epochs=6, base_rate=0.05, base_batch=32, weight_decay=5e-4, schedule="line"),
        pictures=PictureSet("CIFAR-100", 100, 50_000, 10_000, CIFAR_PIXELS),
        waves=(
            (*(Experiment(row, most_seeds=3) for row in (data_256, pipe_256)), *map(Experiment, (data_1k, pipe_1k))),
            (Experiment(pipe_1k_of_8, most_seeds=1),),
            (Experiment(data_4k, most_seeds=1), Experiment(pipe_4k, most_seeds=1)),
            (Experiment(data_256_of_4, most_seeds=2),),
        ),
        rows=tuple(
            s.name for s in (data_256, data_256_of_4, data_1k, data_4k, pipe_256, pipe_1k, pipe_1k_of_8, pipe_4k)
        ),
        divisor=8,
    )
