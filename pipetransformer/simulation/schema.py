"""A run on a cluster that is not there, as a YAML file for ``pipetransformer simulate`` describes it."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from pipetransformer.config.types import Count, CountOrZero, NotNegative, NumBytes, Positive, Section, Share
from pipetransformer.config.words import Allowed, explain, reference, text_keys
from pipetransformer.config.yaml_text import parse_override, read_yaml, set_key
from pipetransformer.errors import UserError
from pipetransformer.freeze.schedule import scheduled
from pipetransformer.pipe.planner.constraints import divisors
from pipetransformer.pipe.planner.costs import Link
from pipetransformer.plan.schedules import SCHEDULES

Frozen = Annotated[list[int], Allowed("a list of whole numbers, n by epoch, none below the one before")]


class _Model(Section):
    blocks: Count = Field(description="Transformer blocks (L).")
    width: Count = Field(description="Width of the hidden states (d).")
    tokens: Count = Field(description="Tokens of a sample (t).")
    heads: Count = Field(description="Heads of attention.")
    stem_parameters: CountOrZero = Field(description="Parameters before the first block.")
    head_parameters: CountOrZero = Field(description="Parameters after the last block.")
    stem_operations: CountOrZero = Field(default=0, description="Operations of a sample's embedding; 0 for a table.")


class _Train(Section):
    samples: Count = Field(description="Training samples of an epoch.")
    epochs: Count = Field(description="Passes over the training set.")
    batch_size: Count = Field(description="Global batch.")
    optimizer_state: CountOrZero = Field(default=2, description="Numbers that the optimizer keeps a weight: AdamW 2.")


class _Freeze(Section):
    alpha: Share = Field(default=0.0, description="Of the policy schedule: n(T) = ceil(L (1 - (1 - alpha)^T)).")
    frozen: Frozen | None = Field(default=None, description="n by epoch instead; null takes the policy.")


class _Pipe(Section):
    initial_length: Count | None = Field(default=None, description="pp until the first freeze; null plans freely.")
    schedules: Annotated[list[str], Allowed(f"a list of {', '.join(SCHEDULES)}")] = Field(
        default_factory=lambda: ["1f1b", "interleaved", "zero_bubble"], description="Schedules that plans may take."
    )
    microbatches: Count | None = Field(default=None, description="M; null for the planner's choice.")
    elastic: bool = Field(default=True, description="AutoPipe: freezing moves the cut.")
    replicas: bool = Field(default=True, description="AutoDP: the pipeline shortens, and freed ranks become replicas.")
    cache: bool = Field(default=True, description="AutoCache: frozen activations are read.")


class _Link(Section):
    bytes_per_second: NumBytes = Field(description="Bandwidth.")
    latency_us: NotNegative = Field(default=10.0, description="Microseconds before the first byte.")

    def link(self) -> Link:
        return Link(round(self.latency_us * 1000), 1e9 / self.bytes_per_second)


class Cluster(Section):
    """Machines with devices and links, as a file describes them."""

    nodes: Count = Field(description="Machines.")
    devices_per_node: Count = Field(description="Ranks of a node, which holds whole pipelines.")
    operations_per_second: Positive = Field(description="That training attains on a device.")
    memory: NumBytes | None = Field(default=None, description="Of a device, that plans may fill; null sets no limit.")
    memory_bytes_per_second: NumBytes = Field(description="Bandwidth of a device's memory.")
    bytes_per_number: Count = Field(default=4, description="Of weights and activations.")
    inside: _Link = Field(description="Link between the ranks of a node.")
    between: _Link | None = Field(default=None, description="Link of a node to others; null for one node.")
    host: _Link = Field(description="Link of a device to its host, where the cache is.")
    host_memory: NumBytes | None = Field(default=None, description="Of a node, for the cache; null sets no limit.")
    overlap: Share = Field(default=0.9, description="How much of the last backward can hide the sum of gradients.")
    transition_seconds: NotNegative = Field(default=0.5, description="What any transition takes beside its transfers.")


class SimulationConfig(Section):
    """A model, a training, a freeze schedule and a cluster."""

    model: _Model = Field(description="the transformer")
    train: _Train = Field(description="the training")
    freeze: _Freeze = Field(default_factory=_Freeze, description="when blocks freeze")
    pipe: _Pipe = Field(default_factory=_Pipe, description="what may be elastic")
    cluster: Cluster = Field(description="what it runs on")

    @property
    def world_size(self) -> int:
        return self.cluster.nodes * self.cluster.devices_per_node

    @property
    def steps_per_epoch(self) -> int:
        return ceil(self.train.samples / self.train.batch_size)

    def without_freezing(self) -> SimulationConfig:
        """The same run with nothing frozen, free to take the best layout: the baseline of an elastic one."""
        pipe = self.pipe.model_copy(update={"initial_length": None})
        return self.model_copy(update={"freeze": _Freeze(), "pipe": pipe})

    def frozen(self) -> tuple[int, ...]:
        """The number of frozen blocks (n) by epoch."""
        if self.freeze.frozen is not None:
            return tuple(self.freeze.frozen)
        blocks, alpha = self.model.blocks, self.freeze.alpha
        return tuple(scheduled(epoch, num_blocks=blocks, alpha=alpha) for epoch in range(self.train.epochs))


class _OfCluster(Section):
    cluster: Cluster = Field(description="what it runs on")


def load_cluster(path: str | Path) -> Cluster:
    """The section ``cluster`` of a YAML file. Raises UserError."""
    values: dict[str, Any] = {key: value for key, value in read_yaml(path).items() if key == "cluster"}
    try:
        return _OfCluster.model_validate(values).cluster
    except ValidationError as error:
        raise UserError(explain(error, schema=_OfCluster, values=values)) from None


def load_simulation(path: str | Path, overrides: Sequence[str] = ()) -> SimulationConfig:
    """Read a YAML file, then overrides such as ``cluster.nodes=128``. Raises UserError."""
    values: dict[str, Any] = read_yaml(path)
    for override in overrides:
        set_key(values, *parse_override(override, text_keys=text_keys(SimulationConfig)))
    try:
        config = SimulationConfig.model_validate(values)
    except ValidationError as error:
        raise UserError(explain(error, schema=SimulationConfig, values=values)) from None
    frozen, blocks, world = config.frozen(), config.model.blocks, config.world_size
    if (
        len(frozen) != config.train.epochs
        or list(frozen) != sorted(frozen)
        or not 0 <= frozen[0] <= frozen[-1] <= blocks
    ):
        raise UserError(
            f"freeze.frozen: {list(frozen)} is not allowed; give train.epochs = {config.train.epochs} numbers from 0 "
            f"to {blocks}, none below the one before"
        )
    if not config.pipe.schedules:
        raise UserError(f"pipe.schedules: it is empty; give some of {', '.join(SCHEDULES)}")
    for name in config.pipe.schedules:
        if name not in SCHEDULES:
            raise UserError(f"pipe.schedules: {name} is not known; give some of {', '.join(SCHEDULES)}")
    if config.train.batch_size < world:
        raise UserError(
            f"train.batch_size: {config.train.batch_size} is smaller than the {world} ranks; give at least {world}"
        )
    length = config.pipe.initial_length
    if length is not None and config.cluster.devices_per_node % length:
        allowed = ", ".join(map(str, divisors(config.cluster.devices_per_node)))
        raise UserError(
            f"pipe.initial_length: {length} does not divide cluster.devices_per_node "
            f"{config.cluster.devices_per_node}; give one of {allowed}"
        )
    if config.cluster.nodes > 1 and config.cluster.between is None:
        raise UserError("cluster.between: missing; give the link of a node to others")
    return config


def simulation_page() -> str:
    """The text of docs/simulation.md."""
    head = (
        "# A run on a cluster that is not there",
        "",
        "What `pipetransformer simulate FILE [key=value ...]` reads: a YAML file of sections. Links have",
        "`bytes_per_second` (a size) and `latency_us` (10 if not given). Assumptions: [simulator.md](simulator.md).",
    )
    return reference(SimulationConfig, head=head, command="python -m pipetransformer.simulation > docs/simulation.md")
