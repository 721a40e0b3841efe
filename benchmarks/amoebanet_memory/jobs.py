"""One row's measurement, on its own ranks: where its model is cut, and what each rank holds in a step."""

from __future__ import annotations

import gc
from dataclasses import dataclass

import torch

from benchmarks.support.graphs import GraphBench, Setting, cross_entropy_of, group_of
from pipetransformer.graphs.graph import GraphPipeline, trace
from pipetransformer.graphs.zoo import zoo_model
from pipetransformer.process.device import peak_memory_bytes, reset_peak_memory, synchronize
from pipetransformer.process.world import World

__all__ = ["BYTES_PER_PARAMETER", "Held", "Job", "Model", "find_boundaries", "measure"]

_BUILD = zoo_model("amoebanet_4x512_c10").build
_NUM_CLASSES, _GROUPS = 10, 3
BYTES_PER_PARAMETER = 12  # weight, gradient, RMSprop's mean square, in float32


@dataclass(frozen=True, slots=True)
class Model:
    """AmoebaNet-D (L, F): normal cells a group, filters."""

    cells: int
    filters: int

    def __str__(self) -> str:
        return f"({self.cells}, {self.filters})"

    def build(self) -> torch.nn.Module:
        return _BUILD(num_layers=_GROUPS * self.cells, num_filters=self.filters, num_classes=_NUM_CLASSES)

    @property
    def num_parameters(self) -> int:
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in self.build().parameters())


@dataclass(frozen=True, slots=True)
class Job:
    """The measurement of one row. ``boundaries``: of its stages, once they are known."""

    setting: Setting
    model: Model
    image_size: int
    boundaries: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Held:
    """The memory of one rank: parameters, and the most that its second step added to what lay there between steps."""

    num_parameters: int
    activation_bytes: int

    @property
    def num_bytes(self) -> int:
        return BYTES_PER_PARAMETER * self.num_parameters + self.activation_bytes


def find_boundaries(world: World, job: Job) -> tuple[int, ...]:
    """Runs on every rank of a row. The whole model is on rank 0's device."""
    return _bench_of(world, job).boundaries(job.setting)


def _bench_of(world: World, job: Job) -> GraphBench:
    return GraphBench(world, build=job.model.build, image_size=job.image_size, num_classes=_NUM_CLASSES)


def measure(world: World, job: Job) -> Held:
    """Runs on every rank of a row. Only the rank's own stage is on its device."""
    setting, bench = job.setting, _bench_of(world, job)  # whose model is not built, since nothing asks for it
    group = bench.group(setting.num_devices)
    images, target = bench.batch(setting.batch_size)
    torch.manual_seed(0)
    model = job.model.build().train()
    loss = cross_entropy_of(setting.batch_size)
    pipeline: GraphPipeline | None = None
    if setting.checkpoint is None:
        groups = [{"params": list(model.to(world.device).parameters())}]
    else:
        graph = trace(model, (images[: setting.rows].cpu(),))
        pipeline = GraphPipeline(
            graph,
            boundaries=job.boundaries,
            num_microbatches=setting.num_microbatches,
            kind="gpipe",
            loss=loss,
            group=group,
            recompute=setting.checkpoint,
        )
        for stage in pipeline.stages:
            stage.to(world.device)
        groups = group_of(pipeline)
    # One parameter at a time, as torch did then: for all at once it takes as much again as they have.
    optimizer = torch.optim.RMSprop(groups, foreach=False)

    def step() -> None:
        if pipeline is None:
            torch.autograd.backward(loss(model(images), target))
        else:
            pipeline.train((images,), target)
        optimizer.step()

    step()
    gc.collect()
    synchronize(world.device)
    reset_peak_memory(world.device)
    between_steps = peak_memory_bytes(world.device)
    step()
    synchronize(world.device)
    return Held(
        sum(parameter.numel() for held in groups for parameter in held["params"]),
        peak_memory_bytes(world.device) - between_steps,
    )
