"""The zoo's plain GPT as a pipeline of ours and of torchgpipe's: the same blocks a partition, the same loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter
from typing import Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.support.torchgpipe import build_gpipe, threads
from pipetransformer.graphs.graph import Graph
from pipetransformer.graphs.graph.pipeline import GraphPipeline
from pipetransformer.graphs.zoo.plain_gpt import PlainGPT
from pipetransformer.process.device import synchronize

__all__ = ["Batch", "Ours", "Pipe", "Torchgpipe", "block_cuts", "layers_of"]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Token ids [batch, sequence], and the ids that follow them."""

    inputs: Tensor
    targets: Tensor

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Of some rows [rows, sequence, vocabulary]; the rows' losses add up to the mean over the batch."""
        total = F.cross_entropy(logits.flatten(0, 1), targets.flatten().to(logits.device), reduction="sum")
        return total / self.targets.numel()


class Pipe(Protocol):
    """A pipeline, or this process's part of it.

    Attributes:
        partitions: that this process holds. devices: one for each of them.
        forward_seconds: of the last step, where this process can tell; else 0. The loss is part of the forward.
    """

    partitions: Sequence[nn.Module]
    devices: Sequence[torch.device]
    forward_seconds: float

    def step(self) -> None: ...


class Ours:
    """This rank's stage; all ranks of ``group`` step together.

    Args:
        kind: "gpipe" or "1f1b"; a pipeline of one stage runs each backward right after its forward, whatever it says.
        cuts: first blocks of stages 1, 2, ...
    """

    def __init__(
        self, graph: Graph, batch: Batch, *, cuts: Sequence[int], num_microbatches: int, checkpoint: str, kind: str,
        group: dist.ProcessGroup | None,
    ) -> None:  # fmt: skip
        names = [unit.name for unit in graph.units]
        self._pipeline = GraphPipeline(
            graph,
            boundaries=[names.index(f"blocks.{cut}") for cut in cuts],
            num_microbatches=num_microbatches,
            kind=kind,
            loss=self._loss,
            group=group,
            recompute=checkpoint,
        )
        self._batch = batch
        self._num_microbatches = num_microbatches
        self._is_alone = not cuts
        self.partitions = self._pipeline.stages
        self.devices = [batch.inputs.device]
        self.forward_seconds = 0.0
        self._watch = _Watch(batch.inputs.device)
        self._starts: list[_Mark] = []
        self._stops: list[_Mark] = []
        self.partitions[0].register_forward_pre_hook(lambda *_: self._starts.append(self._watch.mark()))

    def step(self) -> None:
        """The forward phase ends with the last micro-batch's loss, before which no rank has started a backward; a
        stage alone takes turns, so its forwards are added up."""
        self._starts, self._stops = [], []
        start = self._watch.mark()
        self._pipeline.train([self._batch.inputs], self._batch.targets)
        synchronize(self.devices[0])
        starts = self._starts if self._is_alone else [start]
        stops = self._stops if self._is_alone else self._stops[-1:]
        self.forward_seconds = sum(self._watch.seconds(a, b) for a, b in zip(starts, stops))

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        loss = self._batch.loss(logits, targets)
        self._stops.append(self._watch.mark())
        return loss


class Torchgpipe:
    """The whole pipeline, in this process.

    Note: torchgpipe orders the backwards of micro-batches by edges of autograd between their inputs, which integers
    cannot have: given token ids as they are, it recomputes all micro-batches of the first partition at once, and
    checkpointing saves nothing there. It gets them as floating point, exact below 2 ** 24.

    Args:
        layers: as of ``layers_of``; moved to ``devices``.
    """

    def __init__(
        self, layers: nn.Sequential, batch: Batch, *, cuts: Sequence[int], num_microbatches: int, checkpoint: str,
        devices: Sequence[torch.device],
    ) -> None:  # fmt: skip
        edges = (0, *(1 + cut for cut in cuts), len(layers))  # layer 0 is the embedding
        self._gpipe = build_gpipe(
            layers,
            balance=[stop - start for start, stop in pairwise(edges)],
            devices=devices,
            num_microbatches=num_microbatches,
            checkpoint=checkpoint,
        )
        self._batch = batch
        self._inputs = batch.inputs.float()
        self.partitions = list(self._gpipe.partitions)  # type: ignore[arg-type]
        self.devices = list(devices)
        self.forward_seconds = 0.0
        self.num_threads = 1
        self._watch = _Watch(devices[-1])

    def pick_threads(self, most: int) -> None:
        """Inside operators: one, or ``most``, whichever makes a second step faster."""
        seconds = {}
        for self.num_threads in (1, most):
            self.step()
            start = perf_counter()
            self.step()
            seconds[self.num_threads] = perf_counter() - start
        self.num_threads = min(seconds, key=seconds.__getitem__)

    def step(self) -> None:
        with threads(self.num_threads):
            start = self._watch.mark()
            loss = self._batch.loss(self._gpipe(self._inputs), self._batch.targets)
            stop = self._watch.mark()
            torch.autograd.backward(loss)
        for device in self.devices:
            synchronize(device)
        self.forward_seconds = self._watch.seconds(start, stop)


_Mark = float | torch.cuda.Event


class _Watch:
    """Marks in the work of one device, which they do not hold up."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> _Mark:
        if self._device.type != "cuda":
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    @staticmethod
    def seconds(start: _Mark, stop: _Mark) -> float:
        """The device must have finished."""
        if isinstance(start, torch.cuda.Event):
            return float(start.elapsed_time(stop)) / 1e3
        assert isinstance(stop, float)
        return stop - start


def block_cuts(num_blocks: int, *, num_stages: int) -> list[int]:
    """First blocks of stages 1, 2, ...: as many blocks a stage as go."""
    return [num_blocks * stage // num_stages for stage in range(1, num_stages)]


def layers_of(model: PlainGPT) -> nn.Sequential:
    """The same modules as a sequence: embedding (of token ids as floating point), blocks, head."""
    return nn.Sequential(_Embedding(model), *model.blocks, _Head(model))


class _Embedding(nn.Module):
    def __init__(self, model: PlainGPT) -> None:
        super().__init__()
        self.tokens, self.positions, self.dropout = model.tokens, model.positions, model.dropout

    def forward(self, numbers: Tensor) -> Tensor:
        input_ids = numbers.long()
        result: Tensor = self.dropout(self.tokens(input_ids) + self.positions.weight[: input_ids.shape[1]])
        return result


class _Head(nn.Module):
    def __init__(self, model: PlainGPT) -> None:
        super().__init__()
        self.norm, self.head = model.norm, model.head

    def forward(self, hidden: Tensor) -> Tensor:
        result: Tensor = self.head(self.norm(hidden))
        return result
