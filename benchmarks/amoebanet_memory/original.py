"""The table at the original's sizes, on no machine: our stages and torchgpipe itself run on torch's meta device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from benchmarks.amoebanet_memory.jobs import Model
from benchmarks.support.fake_memory import (
    PlacedBytes,
    extend,
    fake_devices,
    fake_gradients,
    fake_rank,
    follow,
    short_runs,
)
from benchmarks.support.graphs import Setting, cross_entropy_of
from benchmarks.support.torchgpipe import build_gpipe
from pipetransformer.graphs.graph.pipeline import GraphPipeline
from pipetransformer.graphs.graph.stage import GraphStage
from pipetransformer.graphs.graph.trace import trace
from pipetransformer.pipe.planner.costs import JobCosts, Link
from pipetransformer.pipe.planner.memory import RankWork, UnitBytes, rank_bytes, widest_boundary
from pipetransformer.plan import ParallelPlan

__all__ = ["Original", "cells_of"]


class Original:
    """One row's model without data, and the bytes of its training above weights and gradients.

    A step finds gradients in place, as a second one does; optimizer state counts with the model.

    Attributes:
        graph: of micro-batches of the row's size; units are the stem, each cell, and at last the classifier's.
        boundaries: first units of stages 1, 2, ...

    Args:
        balance: layers of each stage: the stem, cells, the classifier.
    """

    def __init__(self, setting: Setting, model: Model, *, balance: Sequence[int], image_size: int) -> None:
        self._setting, self._image_size = setting, image_size
        with torch.device("meta"):
            self._model = model.build().train()
        self.graph = trace(self._model, (self._images(setting.rows),), depth=1)
        self._stages = [GraphStage(self.graph, unit, unit + 1) for unit in range(self.graph.num_units)]
        assert len(balance) == setting.num_devices, (balance, setting)
        self.boundaries = tuple(accumulate(balance[:-1]))
        self._runs: dict[int, tuple[list[int], list[int]]] = {}

    def of_ours(self) -> list[int]:
        """By rank."""
        return self._extended(self._ours)

    def of_torchgpipe(self) -> list[int]:
        """By device."""
        return self._extended(lambda m: self._torchgpipe(m)[0])

    def reserved_of_torchgpipe(self) -> list[int]:
        """By device, what torch's CUDA allocator takes to serve it, by its rules: rounding and fragments of a short run
        beyond what is alive there, and what is alive in the whole one."""
        _, _, longest = short_runs(self._setting.num_devices)
        alive, reserved = self._torchgpipe(min(longest, self._setting.num_microbatches))
        return [whole + taken - held for whole, taken, held in zip(self.of_torchgpipe(), reserved, alive)]

    def _extended(self, measure: Callable[[int], Sequence[int]]) -> list[int]:
        return extend(measure, self._setting.num_microbatches, num_devices=self._setting.num_devices)

    def _ours(self, num_microbatches: int) -> list[int]:
        if self._setting.checkpoint is None:
            return [self._alone()]
        ranks = range(self._setting.num_devices)
        return [self._of_rank(rank, num_microbatches, self._setting.checkpoint) for rank in ranks]

    def _alone(self) -> int:
        fake_gradients(self._model)
        images, target = self._batch(1)
        with PlacedBytes() as live:
            torch.autograd.backward(self._loss(self._model(images), target))
        return live.peak

    def _of_rank(self, rank: int, num_microbatches: int, checkpoint: str) -> int:
        with fake_rank(rank, num_ranks=self._setting.num_devices) as group:
            pipeline = GraphPipeline(
                self.graph,
                boundaries=self.boundaries,
                num_microbatches=num_microbatches,
                kind="gpipe",
                loss=self._loss,
                group=group,
                recompute=checkpoint,
            )
            for stage in pipeline.stages:
                fake_gradients(stage)
            images, target = self._batch(num_microbatches)
            with PlacedBytes() as live:
                pipeline.train((images,), target)
        return live.peak

    def _torchgpipe(self, num_microbatches: int) -> tuple[list[int], list[int]]:
        """By device: alive in tensors, and reserved. Each number of micro-batches runs once."""
        if num_microbatches in self._runs:
            return self._runs[num_microbatches]
        live, places = PlacedBytes(), range(self._setting.num_devices)
        with torch.device("meta"), fake_devices(live):
            layers = cells_of(self._model)
            gpipe = build_gpipe(
                layers,
                balance=[b - a for a, b in pairwise((0, *self.boundaries, len(layers)))],
                devices=[torch.device("meta", place) for place in places],
                num_microbatches=num_microbatches,
                checkpoint=self._setting.checkpoint or "never",
            )
            follow(list(gpipe.partitions), live)  # type: ignore[arg-type]
            fake_gradients(gpipe)
            images, target = self._batch(num_microbatches)
            with live:
                torch.autograd.backward(self._loss(gpipe(images), target))
        held = [live.peaks[place] for place in places], [live.allocators[place].reserved for place in places]
        self._runs[num_microbatches] = held
        return held

    def _batch(self, num_microbatches: int) -> tuple[Tensor, Tensor]:
        rows = self._setting.rows * num_microbatches
        return self._images(rows), torch.empty(rows, dtype=torch.long, device="meta")

    def _images(self, rows: int) -> Tensor:
        return torch.empty(rows, 3, self._image_size, self._image_size, device="meta")

    def _loss(self, output: Tensor, target: Tensor) -> Tensor:
        return cross_entropy_of(self._setting.batch_size)(output, target)

    # ---- prediction --------------------------------------------------------------------------------------------------

    def predicted(self) -> list[int]:
        """By rank, what the planner's formula says of these cells: as of a chain's, entering tensors counted once."""
        setting = self._setting
        costs = _costs(len(self._stages), recompute=setting.checkpoint or "never")
        plan = ParallelPlan(
            frozen=0, pp=setting.num_devices, dp=1, boundaries=self.boundaries, schedule="gpipe", cached=None,
            num_microbatches=setting.num_microbatches, num_blocks=len(self._stages) - 2,
        )  # fmt: skip
        sizes = [self._sizes(unit) for unit in range(len(self._stages))]
        stages = []
        for units in self.graph.stages(self.boundaries):
            stages.append([self._unit_bytes(unit, units.start, *sizes[unit]) for unit in units])
        widest = widest_boundary([stage[0] for stage in stages])
        works = [RankWork(order, plan, costs) for order in plan.orders()]
        return [rank_bytes(work, {rank: stages[rank]}, before=0, widest=widest) for rank, work in enumerate(works)]

    def _unit_bytes(self, unit: int, first: int, made: int, working: int) -> UnitBytes:
        crossing = self.graph.crossing(unit)
        entering = sum(t.num_bytes for t in crossing if unit == first or t.producer == unit - 1)
        if unit == 0:
            entering = self._images(self._setting.rows).nbytes
        sent = sum(t.num_bytes for t in self.graph.crossing(unit + 1) if t.producer == unit)
        whole = entering + made - sent  # what it sends enters the next unit
        return UnitBytes(
            lasting=0,
            gradients=0,
            entering=entering,
            kept=entering if self._setting.recomputes else whole,
            whole=whole,
            working=working,
            between=0,
        )

    def _sizes(self, unit: int) -> tuple[int, int]:
        """Bytes that a unit makes for its backward, and the most beside them during that."""
        stage, arguments = self._stages[unit], self._arguments(unit)
        with PlacedBytes() as live:
            output = stage(*arguments)
            made = live.alive
            outputs = [t for t in (output if isinstance(output, tuple) else (output,)) if t.requires_grad]
            live.peak = live.alive
            torch.autograd.backward(outputs, [torch.empty_like(t) for t in outputs])
        for parameter in stage.parameters():
            parameter.grad = None
        weights = sum(parameter.nbytes for parameter in stage.parameters())
        return made, max(0, live.peak - made - weights)

    def _arguments(self, unit: int) -> list[Tensor]:
        if unit == 0:
            return [self._images(self._setting.rows)]
        return [torch.empty(t.shape, device="meta", requires_grad=True) for t in self.graph.crossing(unit)]


def _costs(num_units: int, *, recompute: str) -> JobCosts:
    nothing = Link(0, 0.0)
    return JobCosts({}, (0,) * num_units, 1.0, 0.0, send=nothing, reduction=nothing, num_ranks=1, recompute=recompute)


# ---- torchgpipe's model ----------------------------------------------------------------------------------------------


def cells_of(model: nn.Module) -> nn.Sequential:
    """The same modules as a sequence of stem, cells and classifier; cells pass on two tensors, as torchgpipe's do."""
    return nn.Sequential(_Stem(model), *(_Cell(cell) for cell in model.cells), _Classifier(model))  # type: ignore[union-attr]


class _Stem(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.stem = model.stem

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.stem(images)
        return hidden, hidden


class _Cell(nn.Module):
    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        current, previous = pair
        return self.cell(current, previous), current


class _Classifier(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.classifier = model.classifier

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        result: Tensor = self.classifier(pair[0].relu().mean((2, 3)))
        return result
