"""Parts of the benchmarks of graphs: settings, and a model cut by costs measured here and trained on the first ranks.

    bench = GraphBench(world, build=..., image_size=224, num_classes=10)
    step = bench.step(setting)    # collective; None on ranks that have no part in it

Rank 0 times the units of the traced model and the parts of the exact partitioner's cuts; every rank of the setting then
holds its stage. Rows of fewer ranks run on the first of them while the others wait.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from pipetransformer.errors import UserError
from pipetransformer.graphs.analysis.cut import measured_cut
from pipetransformer.graphs.graph import Graph, GraphCosts, GraphPipeline, profile_graph, trace
from pipetransformer.launch.arguments import Parser, count
from pipetransformer.pipe.measure.links import send_seconds
from pipetransformer.pipe.planner.costs import Link
from pipetransformer.process.collectives import led_by, slowest
from pipetransformer.process.device import now_ns
from pipetransformer.process.world import World

__all__ = [
    "GraphBench",
    "Setting",
    "Step",
    "add_scale",
    "cross_entropy_of",
    "group_of",
    "needs",
    "num_ranks",
    "pick_scale",
    "sharing_note",
    "time_rounds",
]

Step = Callable[[], None]
_PROFILE_REPEATS = 3


@dataclass(frozen=True, slots=True)
class Setting:
    """The training of one row of a table.

    Attributes:
        name: as in the original's table.
        num_devices: the first ranks of the job, one device and one stage each.
        checkpoint: of ``GraphPipeline``; None is the model itself on one device, without stages.
    """

    name: str
    num_devices: int
    batch_size: int
    num_microbatches: int = 1
    checkpoint: str | None = "except_last"

    @property
    def rows(self) -> int:
        """Of a micro-batch."""
        return self.batch_size // self.num_microbatches

    @property
    def recomputes(self) -> bool:
        """Whether most micro-batches run their forward twice, which the cut must count."""
        return self.checkpoint == "always" or (self.checkpoint == "except_last" and self.num_microbatches > 1)


class GraphBench:
    """The graphs, cuts and groups of one model on this job's ranks. Every method is collective.

    Args:
        build: the model on the CPU, called with the same seed on every rank. All settings train the same weights.
    """

    def __init__(
        self,
        world: World,
        *,
        build: Callable[[], nn.Module],
        image_size: int,
        num_classes: int,
    ) -> None:
        self.world = world
        self._build = build
        self._image_size = image_size
        self._num_classes = num_classes
        latency, per_byte = send_seconds(world)
        self._link = Link(round(1e9 * latency), 1e9 * per_byte)
        self._groups: dict[int, dist.ProcessGroup | None] = {}
        self._graphs: dict[int, Graph] = {}
        self._costs: dict[tuple[int, bool], GraphCosts] = {}
        self._cuts: dict[tuple[int, bool, int], tuple[int, ...]] = {}

    @cached_property
    def model(self) -> nn.Module:
        """All of it on this rank's device, from its first use on: rows share its weights."""
        torch.manual_seed(0)
        return self._build().to(self.world.device).train()

    def step(self, setting: Setting) -> Step | None:
        """One step of training, SGD included, on random images; None where this rank has no part in it."""
        pipeline = None if setting.checkpoint is None else self.pipeline(setting)
        if self.world.rank >= setting.num_devices:
            return None
        images, target = self.batch(setting.batch_size)
        loss = cross_entropy_of(setting.batch_size)
        groups = [{"params": list(self.model.parameters())}] if pipeline is None else group_of(pipeline)
        optimizer = torch.optim.SGD(groups, lr=0.1)

        def step() -> None:
            if pipeline is None:
                torch.autograd.backward(loss(self.model(images), target))
            else:
                pipeline.train((images,), target)
            optimizer.step()
            optimizer.zero_grad()

        return step

    def pipeline(self, setting: Setting) -> GraphPipeline | None:
        """This rank's share of the model; None where it has none."""
        group, boundaries = self.group(setting.num_devices), self.boundaries(setting)
        if self.world.rank >= setting.num_devices:
            return None
        assert setting.checkpoint is not None, setting
        return GraphPipeline(
            self._graph(setting.rows),
            boundaries=boundaries,
            num_microbatches=setting.num_microbatches,
            kind="gpipe",
            loss=cross_entropy_of(setting.batch_size),
            group=group,
            recompute=setting.checkpoint,
        )

    def reset(self, *, seed: int) -> None:
        """Draws the weights anew, the same on all ranks; pipelines keep theirs, which are these."""
        torch.manual_seed(seed)
        self.model.load_state_dict(self._build().state_dict())

    def group(self, num_ranks: int) -> dist.ProcessGroup | None:
        """Of the first ranks; made once."""
        if num_ranks not in self._groups:
            self._groups[num_ranks] = dist.new_group(range(num_ranks), timeout=self.world.timeout)
        return self._groups[num_ranks]

    def boundaries(self, setting: Setting) -> tuple[int, ...]:
        """The exact cut by parts as they run on rank 0 with this shape of micro-batch; measured once, the same on all
        ranks."""
        if setting.num_devices == 1:
            return ()
        return led_by(0, partial(self._cut, setting))

    def batch(self, batch_size: int) -> tuple[Tensor, Tensor]:
        """Random images and labels, the same on all ranks."""
        random = torch.Generator().manual_seed(0)
        images = torch.rand(batch_size, 3, self._image_size, self._image_size, generator=random)
        target = torch.randint(self._num_classes, (batch_size,), generator=random)
        return images.to(self.world.device), target.to(self.world.device)

    def _cut(self, setting: Setting) -> tuple[int, ...]:
        shape = (setting.rows, setting.recomputes)
        if (*shape, setting.num_devices) not in self._cuts:
            graph, (images, _) = self._graph(setting.rows), self.batch(setting.rows)
            if shape not in self._costs:
                self._costs[shape] = profile_graph(
                    graph, (images,), repeats=_PROFILE_REPEATS, recompute=setting.recomputes
                )
            self._cuts[(*shape, setting.num_devices)], _ = measured_cut(
                graph, (images,), self._costs[shape], num_stages=setting.num_devices, link=self._link,
                recompute=setting.recomputes,
            )  # fmt: skip
        return self._cuts[(*shape, setting.num_devices)]

    def _graph(self, rows: int) -> Graph:
        if rows not in self._graphs:
            images, _ = self.batch(rows)
            self._graphs[rows] = trace(self.model, (images,))
        return self._graphs[rows]


def cross_entropy_of(batch_size: int) -> Callable[[Tensor, Tensor], Tensor]:
    """A micro-batch's share of the mean over ``batch_size`` rows."""
    return lambda output, target: F.cross_entropy(output, target, reduction="sum") / batch_size


def group_of(pipeline: GraphPipeline) -> list[dict[str, list[nn.Parameter]]]:
    """This rank's parameters, for an optimizer: in a group, because a stage may have none (a pooling alone, say)."""
    return [{"params": [parameter for stage in pipeline.stages for parameter in stage.parameters()]}]


def time_rounds(steps: Sequence[Step | None], *, repeats: int, device: torch.device) -> list[list[float]]:
    """Collective. By row, the seconds of its slowest rank in each of ``repeats`` rounds; a round takes row after row,
    and the first one is not counted."""
    seconds: list[list[float]] = [[] for _ in steps]
    for repeat in range(repeats + 1):
        for row, step in enumerate(steps):
            slowest(0.0)  # all have come: nobody still works on the row before
            start = now_ns(device)
            if step is not None:
                step()
            taken = slowest((now_ns(device) - start) / 1e9)
            if repeat:
                seconds[row].append(taken)
    return seconds


# ---- command lines ---------------------------------------------------------------------------------------------------


def add_scale(parser: Parser, *, most_ranks: int = 8, scales: Sequence[str] = ("small", "full")) -> None:
    """The arguments ``--scale`` and ``--ranks``."""
    parser.add_argument(
        "--scale", choices=scales, help="sizes for small machines, or the original's (default: by CUDA)"
    )
    parser.add_argument(
        "--ranks",
        type=count,
        help=f"processes to start (default {most_ranks}; on CUDA one a GPU, as many as there are)",
    )


def pick_scale(chosen: str | None) -> str:
    return chosen or ("full" if torch.cuda.is_available() else "small")


def num_ranks(chosen: int | None, *, most: int = 8) -> int:
    """Raises UserError where ``--ranks`` asks for more than rows have, or than there are GPUs."""
    if chosen is not None and chosen > most:
        raise UserError(f"--ranks: {chosen} is more than the {most} that the longest row has; give at most {most}")
    if not torch.cuda.is_available():
        return chosen or most
    there = torch.cuda.device_count()
    if chosen is not None and chosen > there:
        raise UserError(f"--ranks: {chosen} ranks need as many GPUs and {there} are there; give at most {there}")
    return min(chosen or there, most)


def needs(setting: Setting, *, world_size: int) -> str | None:
    """The reason why a row cannot run here."""
    if setting.num_devices <= world_size:
        return None
    return f"needs {setting.num_devices} {'GPUs' if torch.cuda.is_available() else 'ranks'}"


def sharing_note(most_ranks: int) -> str | None:
    """A note for rows with more ranks than the machine has cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if torch.cuda.is_available() or most_ranks <= cores:
        return None
    return (
        f"This machine has {cores} core{'s' * (cores > 1)}: rows of more ranks than that share them, so that their "
        "devices do not work at the same time, and their speed-up says what pipelining costs here, not what it gains."
    )
