"""One run: a row of the table with one seed, on ranks of its own, from its checkpoint on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor

from benchmarks.resnet101_accuracy.checkpoints import Checkpoints, Progress
from benchmarks.resnet101_accuracy.methods import Method, method_of
from benchmarks.resnet101_accuracy.network import Network, Recipe
from benchmarks.resnet101_accuracy.pictures import Pictures, PictureSet, batches, load_pictures
from benchmarks.support.graphs import GraphBench, Setting
from pipetransformer.process.collectives import slowest
from pipetransformer.process.world import World

__all__ = ["Job", "Outcome", "Run", "Training", "train"]


@dataclass(frozen=True, slots=True)
class Run:
    """All that its error depends on, beside the code and the machine."""

    setting: Setting
    seed: int
    network: Network
    recipe: Recipe
    pictures: PictureSet


@dataclass(frozen=True, slots=True)
class Job:
    """A run and its folders: of the pictures, and of its checkpoints."""

    run: Run
    data: str
    checkpoints: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """Attributes: error: top-1, in per cent. losses: mean of each epoch, of replica 0's rows or of the whole batch."""

    error: float
    seconds: float
    losses: tuple[float, ...]


def train(world: World, job: Job) -> Outcome:
    """Runs on every rank of the row."""
    return Training(world, job).finish()


class Training:
    """Runs of all rows start from the same weights and see the same samples in the same order, seed by seed."""

    def __init__(self, world: World, job: Job) -> None:
        run, there = job.run, job.run.pictures
        self.run = run
        self._world = world
        self._splits = load_pictures(Path(job.data), there)
        self.bench = GraphBench(
            world,
            build=lambda: run.network.build(num_classes=there.num_classes),
            image_size=there.image_size,
            num_classes=there.num_classes,
        )
        self._method: Method = method_of(self.bench, run.setting)
        self.bench.reset(seed=run.seed)
        recipe = run.recipe
        self._optimizer = torch.optim.SGD(
            self._method.parameter_groups(),
            lr=recipe.base_rate,
            momentum=recipe.momentum,
            weight_decay=recipe.weight_decay,
            nesterov=True,
        )
        self._checkpoints = Checkpoints(Path(job.checkpoints), world, model=self.bench.model)

    def finish(self) -> Outcome:
        """Collective. All epochs that are missing, then the evaluation."""
        progress = self._checkpoints.restore(optimizer=self._optimizer)
        for epoch in range(len(progress.losses), self.run.recipe.epochs):
            start = perf_counter()
            loss = self._epoch(epoch)
            seconds = perf_counter() - start
            progress = Progress(progress.seconds + seconds, (*progress.losses, loss))
            self._checkpoints.save(progress, method=self._method, optimizer=self._optimizer)
            if self._world.rank == 0:
                told = f"{self.run.setting.name} seed {self.run.seed}"
                print(
                    f"{told}: epoch {epoch + 1}/{self.run.recipe.epochs}, loss {loss:.3f}, {seconds:.0f} s", flush=True
                )
        right = slowest(self._num_right() if self._method.evaluates else 0)  # only ranks that count have any
        return Outcome(100 * (1 - right / len(self._splits["eval"].labels)), progress.seconds, progress.losses)

    def _epoch(self, epoch: int) -> float:
        """All whole batches; the mean loss."""
        setting, train_split = self.run.setting, self._splits["train"]
        number = 1000 * self.run.seed + epoch
        order = torch.randperm(len(train_split.labels), generator=torch.Generator().manual_seed(number))
        steps = order.split(setting.batch_size)[: len(order) // setting.batch_size]
        mine = [ids[self._method.mine] for ids in steps]
        losses: list[Tensor] = []
        for step, (inputs, target) in enumerate(self._batches(train_split, mine, epoch=number)):
            progress = (epoch + step / len(steps)) / self.run.recipe.epochs
            for group in self._optimizer.param_groups:
                group["lr"] = self.run.recipe.rate(progress, batch_size=setting.batch_size)
            loss = self._method.step(inputs, target)
            if loss is not None:
                losses.append(loss)
            self._optimizer.step()
            self._optimizer.zero_grad()
        return slowest(float(torch.stack(losses).mean()) if losses else 0.0)

    def _num_right(self) -> int:
        """Of the last batch, those samples that fill it are not counted."""
        split, rows, right = self._splits["eval"], self._method.evaluation_rows, 0
        ids = list(torch.arange(len(split.labels)).split(rows))
        num_last = len(ids[-1])
        ids[-1] = torch.cat((ids[-1], ids[-1].new_zeros(rows - num_last)))
        for number, (inputs, target) in enumerate(self._batches(split, ids, epoch=0), start=1):
            logits = self._method.evaluate(inputs)
            if logits is not None:
                right += int((logits.argmax(1) == target)[: num_last if number == len(ids) else rows].sum())
        return right

    def _batches(self, split: Pictures, order: list[Tensor], *, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Pictures as zeros without memory where this rank does not see them."""
        device, size = self._world.device, self.run.pictures.image_size
        if self._method.sees_pictures:
            workers = _num_workers(self._world) if self.run.pictures.kind == "class folders" else 0
            yield from batches(split, order, epoch=epoch, num_workers=workers, device=device)
            return
        nothing = torch.zeros((), device=device)
        for ids in order:
            yield nothing.expand(len(ids), 3, size, size), split.labels[ids].to(device)


def _num_workers(world: World) -> int:
    """Processes that decode a rank's pictures."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores // world.local_size
