"""The two methods that the table compares, as one rank sees them: a replica of the model, or a stage of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.support.graphs import GraphBench, Setting, cross_entropy_of, group_of

__all__ = ["DataParallel", "Method", "Pipelined", "method_of"]

_EVALUATION_ROWS = 250


class Method(Protocol):
    """One rank's part in it.

    Attributes:
        mine: rows of each batch that this rank is given.
        sees_pictures: whether it reads their pixels; else they are given as zeros.
        evaluation_rows: rows of a batch of ``evaluate``.
        counts: whether this rank alone tells the loss and evaluates in the end.
    """

    mine: slice
    sees_pictures: bool
    evaluation_rows: int
    counts: bool

    def parameter_groups(self) -> list[dict[str, list[nn.Parameter]]]: ...

    def parts(self) -> Iterator[nn.Module]:
        """Modules that hold the tensors that this rank keeps for all, under the names that they have in the model."""

    def step(self, inputs: Tensor, target: Tensor) -> Tensor | None:
        """Forward and backward; the mean loss of the rows where this rank ``counts``."""

    def evaluate(self, inputs: Tensor) -> Tensor | None:
        """Logits where this rank ``counts``. Called by the ranks for which ``evaluates``."""

    @property
    def evaluates(self) -> bool: ...


class DataParallel:
    """As nn.DataParallel: a replica normalises by its own rows, and replica 0's running statistics are the model's."""

    def __init__(self, bench: GraphBench, setting: Setting) -> None:
        rank, rows = bench.world.rank, setting.batch_size // setting.num_devices
        self.mine = slice(rank * rows, (rank + 1) * rows)
        self.sees_pictures = True
        self.evaluation_rows = _EVALUATION_ROWS
        self.counts = self.evaluates = rank == 0
        self._whole = bench.model
        self._replica = DistributedDataParallel(bench.model, process_group=bench.group(setting.num_devices))
        self._loss = cross_entropy_of(rows)  # Note: DDP takes the mean of the replicas' gradients.

    def parameter_groups(self) -> list[dict[str, list[nn.Parameter]]]:
        return [{"params": list(self._whole.parameters())}]

    def parts(self) -> Iterator[nn.Module]:
        if self.counts:
            yield self._whole

    def step(self, inputs: Tensor, target: Tensor) -> Tensor | None:
        self._replica.train()
        loss = self._loss(self._replica(inputs), target)
        torch.autograd.backward(loss)
        return loss.detach() if self.counts else None

    @torch.no_grad()
    def evaluate(self, inputs: Tensor) -> Tensor:
        self._whole.eval()
        logits: Tensor = self._whole(inputs)
        return logits


class Pipelined:
    """GPipe; the last stage knows the loss and the logits."""

    def __init__(self, bench: GraphBench, setting: Setting) -> None:
        pipeline = bench.pipeline(setting)
        assert pipeline is not None, setting
        self.mine = slice(None)
        self.sees_pictures = bench.world.rank == 0
        self.evaluation_rows = setting.batch_size
        self.counts = pipeline.is_last
        self.evaluates = True
        self._pipeline = pipeline

    def parameter_groups(self) -> list[dict[str, list[nn.Parameter]]]:
        return group_of(self._pipeline)

    def parts(self) -> Iterator[nn.Module]:
        yield from self._pipeline.stages

    def step(self, inputs: Tensor, target: Tensor) -> Tensor | None:
        losses = self._pipeline.train((inputs,), target)
        return None if losses is None else losses.sum()

    def evaluate(self, inputs: Tensor) -> Tensor | None:
        return self._pipeline.evaluate((inputs,))


def method_of(bench: GraphBench, setting: Setting) -> Method:
    """Collective."""
    return DataParallel(bench, setting) if setting.checkpoint is None else Pipelined(bench, setting)
