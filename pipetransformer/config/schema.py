"""The configuration: every key, its type, its default and its meaning; those of ``train``, ``freeze``, ``pipe`` and
``model.lora`` in ``training.py``, ``freezing.py``, ``pipelines.py`` and ``lora.py``.

``load_config`` reads a YAML file and dotted overrides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, JsonValue, ValidationError, ValidationInfo, model_validator

from pipetransformer.config.data import DataConfig, check_data
from pipetransformer.config.datasets import DATASETS, Task
from pipetransformer.config.freezing import FreezeConfig
from pipetransformer.config.learning_rate import OF_EPOCHS
from pipetransformer.config.lora import LoraConfig
from pipetransformer.config.pipelines import PipeConfig, check_pipe
from pipetransformer.config.policies import chosen_policy
from pipetransformer.config.quantities import Interval
from pipetransformer.config.renamed import new_keys, with_new_names
from pipetransformer.config.secrets import key_of_secret
from pipetransformer.config.shipped import found_config
from pipetransformer.config.training import EPOCH, TrainConfig
from pipetransformer.config.types import (
    Count,
    CountOrZero,
    Every,
    FolderName,
    NumBytes,
    Seconds,
    Section,
    Share,
    Text,
    as_tuple,
)
from pipetransformer.config.words import Allowed, explain, text_keys
from pipetransformer.config.yaml_text import dump_yaml, parse_override, read_yaml, set_key
from pipetransformer.errors import UserError

__all__ = ["Config", "Interval", "load_config"]


_OF_THE_PAST = "of the past"
_OF_A_NODE = {"model": {"name"}, "data": {"path", "num_workers"}, "cache": {"host_budget"}}


class ModelConfig(Section):
    name: Text = Field(
        description="A timm name, a Hugging Face hub id, or a local folder. For the demo texts, which bring a "
        "tokenizer: also a type of transformers, such as `bert`, with `pretrained: false`."
    )
    pretrained: bool = Field(
        default=True, description="Start from the published weights; false draws them from `train.seed`."
    )
    dropout: Share | None = Field(
        default=None, description="Dropout rate everywhere in the model; null keeps the model's own."
    )
    kwargs: Annotated[dict[str, JsonValue], Allowed("a mapping of names to plain values")] = Field(
        default_factory=dict, description="Further arguments of the model's own constructor or configuration."
    )
    head_row_only: bool = Field(
        default=True,
        description="Compute the last block for the one row that the head reads (a classifier's first or last token): "
        "the same outputs and gradients in less time. All rows are computed with false, and for the schedules "
        "`zero_bubble`, which cannot do with one, and `auto`, which may take it.",
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="Type in which the weights of stem and blocks are read. `bfloat16`: those that are frozen from the "
        "first step on stay in it, in half the memory, and a step computes with them as if they were float32; those "
        "that train become float32.",
    )
    blocks: Text | None = Field(
        default=None,
        description="Of a model that fits no family: the path of its list of blocks, such as `blocks`, or "
        "`encoder.layers`; the model is traced, and must be a chain of a stem, these and a head. null: by its family.",
    )
    save: Literal["both", "best", "final"] = Field(
        default="both", description="The weights that a run leaves as a model: the best, those of its end, or both."
    )
    lora: LoraConfig | None = Field(
        default=None,
        description="LoRA: stem and blocks keep their weights, and small matrices beside their linear layers train in "
        "their place, and the head. Any key below switches it on; null trains the weights.",
    )

    def least_frozen(self, num_blocks: int) -> int:
        """The number of leading blocks of ``num_blocks`` in which nothing can train."""
        return 0 if self.lora is None or self.lora.blocks is None else max(num_blocks - self.lora.blocks, 0)


class DpConfig(Section):
    enabled: bool = Field(
        default=True,
        description="AutoDP: ranks that a shorter pipeline frees become replicas; false keeps pp and dp.",
    )
    shard: Literal["none", "optimizer", "full"] = Field(
        default="none",
        description="What replicas share out: `none`, each has all; `optimizer`, each keeps the optimizer's state of "
        "some units, updates these, and gives the new weights to the others; `full`: weights and gradients too, which "
        "the others borrow unit by unit in each micro-batch: less memory for more traffic.",
    )


class CacheConfig(Section):
    enabled: bool = Field(
        default=True, description="AutoCache: read the frozen prefix's activations instead of computing them."
    )
    dtype: Literal["compute", "float32", "bfloat16", "float16", "int8"] = Field(
        default="compute",
        description="Type of stored activations; `compute` stores what the step computes. `int8` has a scale for each "
        "position. A run says by how much it rounds.",
    )
    views: Count | Literal["auto"] | None = Field(
        default="auto",
        description="Of augmented training inputs, so many views of each sample are taken in turn, so that they can be "
        "cached; null draws new ones at each epoch, and caches none. `auto`: where blocks may freeze, one for four "
        "epochs, at least 2, if the budget holds them, else null; a resumed or replayed run keeps its own.",
    )
    device_budget: NumBytes | None = Field(
        default=None,
        description="Memory of each rank's device for a part of the training store, beside the host's; plans leave it "
        "free. null: none, as reads from the host are hidden behind the steps.",
    )
    host_budget: NumBytes | Literal["auto"] = Field(
        default="auto",
        description="Shared memory a node for the store; `auto`: half of what is available when it is reserved.",
    )
    disk_budget: NumBytes | Literal["auto"] | None = Field(
        default="auto",
        description="Disk a node for stores that later runs find or memory cannot hold; `auto`: a tenth of the free.",
    )


class CheckpointConfig(Section):
    every: Every | None = Field(
        default=EPOCH, description="How often to save, besides the end of each epoch; null saves no checkpoint at all."
    )
    keep: CountOrZero = Field(
        default=1,
        description="How many of the latest checkpoints to keep; 0: one while the run goes on, and none when it has "
        "ended well.",
    )
    asynchronous: bool = Field(
        default=True,
        description="Write beside training, from a copy in host memory of what a rank saves; false: training waits, as "
        "it does on a CPU under `pipe.memory_limit`.",
    )


class LogConfig(Section):
    wandb: Literal["offline", "online", "disabled"] = Field(default="offline", description="Mode of Weights & Biases.")
    project: Text = Field(default="pipetransformer", description="Project in Weights & Biases.")
    name: Text | None = Field(default=None, description="Name of the run in Weights & Biases; null takes `run.id`.")
    group: Text | None = Field(default=None, description="Group of the run in Weights & Biases, as of a sweep.")
    tags: Annotated[tuple[Text, ...], BeforeValidator(as_tuple), Allowed("a list of words")] = Field(
        default=(), description="Tags of the run in Weights & Biases."
    )
    job_type: Text | None = Field(default=None, description="Type of the run in Weights & Biases, such as `train`.")
    system: bool = Field(default=False, description="Let Weights & Biases log the machine's own figures too.")
    tensorboard: bool = Field(default=False, description="Write the same figures for TensorBoard, which must be there.")
    every: Count = Field(default=10, description="Steps between two records of loss and phase times.")
    report: bool = Field(default=True, description="Write `report.html` at the end; `pipetransformer report` does too.")


class RunConfig(Section):
    id: FolderName | None = Field(
        default=None, description="Names the run and its folder; null makes one from the time."
    )
    dir: Text = Field(default="runs", description="Folder that holds the runs' folders.")
    resume: bool | Literal["auto"] = Field(
        default=False,
        description="Continue the run of this id from its last checkpoint; `auto`: if it has one, else start it anew.",
    )
    overwrite: bool = Field(default=False, description="Delete what an earlier run of this id left.")
    private: bool = Field(default=False, description="No other user may read what the run writes (umask 077).")
    replay: Text | None = Field(
        default=None, description="An `events.jsonl` whose decisions are taken instead of new ones; null decides live."
    )
    timeout: Seconds = Field(
        default=300.0, description="Seconds that ranks may wait for each other before the job ends."
    )
    on_sigterm: Literal["save", "end"] = Field(
        default="save",
        description="After a SIGTERM during training, as schedulers send it before they kill: `save` a checkpoint "
        "within `grace` and end, or `end` at once.",
    )
    grace: Seconds = Field(default=25.0, description="Seconds from a SIGTERM to the end at the latest, saved or not.")
    verify_every: Every | None = Field(
        default=Interval(1, "epoch"),
        description="How often the weights of replicas are compared, bit by bit; null: never.",
    )


class Config(Section):
    """A whole configuration. Never changes; ``with_overrides`` gives a changed copy."""

    task: Task = Field(description="What is learnt.")
    model: ModelConfig = Field(description="what is trained")
    data: DataConfig = Field(description="what it is trained on")
    train: TrainConfig = Field(description="how it is trained")
    freeze: FreezeConfig = Field(default_factory=FreezeConfig, description="AutoFreeze, which blocks stop learning")
    pipe: PipeConfig = Field(default_factory=PipeConfig, description="AutoPipe, how the model is cut into stages")
    dp: DpConfig = Field(default_factory=DpConfig, description="AutoDP, how many replicas of the pipeline")
    cache: CacheConfig = Field(default_factory=CacheConfig, description="AutoCache, activations read, not computed")
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig, description="what is saved on the way")
    log: LogConfig = Field(default_factory=LogConfig, description="what is told on the way")
    run: RunConfig = Field(default_factory=RunConfig, description="where the run's files go, and how it starts")

    def with_overrides(self, overrides: Mapping[str, object]) -> Config:
        """A copy with dotted keys set, checked like a file: ``with_overrides({"run.id": "1000"})``."""
        values = self.model_dump()
        for key, value in new_keys(overrides).items():
            set_key(values, key, value)
        return _validated(values)

    @property
    def freezes_stem(self) -> bool:
        """Whether the stem is frozen from the first step on."""
        return self.freeze.stem or self.model.lora is not None

    @property
    def averages(self) -> tuple[str, ...]:
        """The moving averages of the weights that are kept: ``ema``, to be evaluated and saved; ``recent``, for blocks
        to freeze with."""
        return (*(("ema",) if self.train.ema is not None else ()), *(("recent",) if self.freeze.is_averaged else ()))

    def fixed_microbatches(self, pp: int) -> int | None:
        """Micro-batches of a pipeline of ``pp`` ranks, where a key gives their number; None where AutoPipe chooses."""
        given = self.train.gradient_accumulation_steps if pp == 1 else None
        own = self.pipe.microbatches
        return given if given is not None else own if isinstance(own, int) else None

    @property
    def may_freeze(self) -> bool:
        """Whether blocks may be frozen at some time."""
        lora = self.model.lora
        return self.freeze.policy != "none" or self.run.replay is not None or (lora is not None and bool(lora.blocks))

    @property
    def of_all_nodes(self) -> dict[str, object]:
        """Settings that are the same on all nodes, by key: all but names and places, which may differ."""
        values = self.model_dump(mode="json", exclude=_OF_A_NODE)
        return {
            f"{section}.{key}": value
            for section in ("model", "data", "train", "freeze", "pipe", "dp", "cache", "checkpoint")
            for key, value in values[section].items()
        }

    def to_yaml(self) -> str:
        """Every key, defaults included; ``load_config`` reads an equal configuration from it."""
        return dump_yaml(self.model_dump())

    @model_validator(mode="after")
    def _check_across_keys(self, info: ValidationInfo) -> Config:
        """Raises UserError, which pydantic lets pass."""
        images, dataset = self.task == "image_classification", DATASETS[self.data.name]
        if dataset.task != self.task:
            allowed = [name for name, entry in DATASETS.items() if entry.task == self.task]
            raise UserError(
                f"data.name: {self.data.name} is not for task {self.task}; give one of {', '.join(allowed)}"
            )
        if info.context != _OF_THE_PAST:
            chosen_policy(self.freeze)
        check_data(self.data, self.train, images=images)
        check_pipe(self.pipe)
        if self.train.max_steps is not None and self.train.lr_schedule in OF_EPOCHS:
            schedule = self.train.lr_schedule
            raise UserError(f"train.lr_schedule: {schedule} counts epochs; leave train.max_steps out, or give another")
        if self.train.ema is not None and self.dp.shard != "none":
            raise UserError("train.ema: cannot go with dp.shard, which shares out what is averaged; give dp.shard=none")
        if self.run.resume and self.run.overwrite:
            raise UserError("run.resume: cannot go with run.overwrite; set one of them to false")
        return self


def load_config(
    path: str | Path | Mapping[str, Any], overrides: Sequence[str] = (), *, is_past: bool = False
) -> Config:
    """Read a YAML file, then overrides such as ``train.lr=1e-3``, in order. Raises UserError.

    Args:
        path: of the file, or the short name of one that is shipped, such as ``digits``; or the sections themselves.
        is_past: of a run that was: a policy of the user's own may be gone or have other options now.
    """
    values = dict(path) if isinstance(path, Mapping) else read_yaml(found_config(path))
    for override in overrides:
        set_key(values, *parse_override(override, text_keys=text_keys(Config)))
    if not is_past and (key := key_of_secret(values)):
        raise UserError(
            f"{key}: it holds a secret, which a run would write into its folder; leave it in the environment, where "
            "libraries find it (HF_TOKEN, WANDB_API_KEY)"
        )
    return _validated(values, context=_OF_THE_PAST if is_past else None)


def _validated(values: dict[str, Any], *, context: str | None = None) -> Config:
    values, given = with_new_names(values)
    try:
        return Config.model_validate(values, context=context)
    except ValidationError as error:
        line = explain(error, schema=Config, values=values)
    key, colon, rest = line.partition(":")
    raise UserError(f"{given.get(key, key)}{colon}{rest}")
