"""The job of a run: model and data, the same on every rank."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch
from torch import nn

from pipetransformer.cache import digests_of_units, settle_views
from pipetransformer.config import Config
from pipetransformer.data import (
    SET_ASIDE,
    Batch,
    DataInfo,
    Dataset,
    ImageDataset,
    Lead,
    describe,
    epoch_batches,
    load_image_data,
    load_squad,
    load_text_data,
    set_aside,
)
from pipetransformer.engine import Loss
from pipetransformer.errors import UserError
from pipetransformer.freeze import GuardSize, guard_size
from pipetransformer.models import BuiltModel, Chain, TimmModel, TransformersModel, Values, build_model
from pipetransformer.process.collectives import values_of_ranks
from pipetransformer.process.world import World
from pipetransformer.run.precision import Precision, settle


@dataclass(frozen=True, slots=True)
class Job:
    """A model and its data.

    Attributes:
        built: the model, with its library's way of saving it.
        values: its weights before training.
        chain: the model as a chain of units.
        datasets: datasets by split: ``train``, ``eval``, further evaluation sets by their own names, and ``set_aside``
            where the guard on accuracy is on.
        config: the configuration, its precision settled.
        precision: the precision, with its reason.
        world: the ranks that train it.
        guard: the work of the guard on accuracy; None for none.
        label_names: names of the classes; none for scores and spans.
        loss: of each sample, in the place of the usual one.
    """

    built: BuiltModel
    values: Values
    chain: Chain
    datasets: dict[str, Dataset]
    config: Config
    precision: Precision
    world: World
    guard: GuardSize | None
    label_names: tuple[str, ...]
    loss: Loss | None = None

    @property
    def best_by(self) -> str:
        """The name of the metric that decides which evaluation is the best."""
        known = next(data for split, data in self.datasets.items() if split != "train").metric_names
        wanted = self.config.train.best_by
        if wanted is not None and wanted not in known:
            raise UserError(
                f"train.best_by: {wanted} is not measured on {self.config.data.name}; give {' or '.join(known)}"
            )
        return wanted or known[0]

    @property
    def evaluated_share(self) -> float:
        """Number of samples of an evaluation, for each one of an epoch."""
        sizes = {split: len(data) for split, data in self.datasets.items() if split != SET_ASIDE}
        return sum(size for split, size in sizes.items() if split != "train") / sizes["train"]

    def whole_model(self) -> nn.Module:
        """The model, all of its weights on this rank: those of before training, where it did not hold them."""
        self.chain.fill(range(self.chain.num_units))
        self.chain.settle_types(0)
        self.chain.freeze(0)
        return self.chain.model

    def train_batches(self, epoch: int) -> Sequence[Batch]:
        """The global batches of an epoch, in order: a pure function of seed, epoch and the number of nodes that the run
        began on."""
        return epoch_batches(
            self.datasets["train"].lengths,
            batch_size=self.config.train.batch_size,
            seed=self.config.train.seed,
            epoch=epoch,
            num_nodes=self.world.began_on,
            is_tied=self.world.sample_nodes == self.world.began_on,
        )

    def train_digest(self, epoch: int) -> str:
        """A digest of the samples of an epoch's batches, in their order."""
        digest = hashlib.sha256()
        for batch in self.train_batches(epoch):
            digest.update(batch.ids.tobytes())
        return digest.hexdigest()[:16]


class JobMaker(Protocol):
    """Builds a job, as ``build_job`` does."""

    def __call__(self, config: Config, world: World, *, lead: Lead) -> Job: ...


def build_job(config: Config, world: World, *, lead: Lead) -> Job:
    """Builds model and data, the same on every rank.

    Args:
        lead: lets one rank of each node do a piece of work for all ranks of the node.

    Raises:
        UserError: if the model or the data cannot be built, or do not fit each other; or if nodes have different files.
    """
    if config.task == "own":
        raise UserError("task: own is for a module that is given from Python, by pipetransformer.train; give another")
    on_gpu = world.device.type == "cuda"
    if config.train.precision == "bfloat16" and on_gpu and not torch.cuda.is_bf16_supported():
        raise UserError("train.precision: this GPU has no bfloat16; give float32")
    if config.train.precision == "float16" and not on_gpu:
        raise UserError("train.precision: float16 is for GPUs; give bfloat16, or auto")
    info = lead(lambda: describe(config.data))
    built, values = build_model(config, info)
    _check_base(config, values)
    datasets = _load_data(config, built, info=info, lead=lead)
    return assemble_job(config, world, built, values, datasets, label_names=info.label_names)


def assemble_job(
    config: Config,
    world: World,
    built: BuiltModel,
    values: Values,
    datasets: dict[str, Dataset],
    *,
    label_names: tuple[str, ...] = (),
    loss: Loss | None = None,
) -> Job:
    """A job of a model and datasets that are there.

    Raises:
        UserError: if they do not fit each other; or if nodes have different ones.
    """
    chain = Chain(
        built.model,
        name=config.model.name,
        precision=config.train.precision,
        device=world.device,
        units_per_block=config.pipe.units_per_block,
        # Note: a backward that is split in two needs each weight in one product; the one row's are in two.
        head_row_only=config.model.head_row_only and config.pipe.schedule not in ("zero_bubble", "auto"),
        values=values,
        fixed=built.fixed,
        rest=torch.bfloat16 if config.model.dtype == "bfloat16" else None,
    )
    torch.set_float32_matmul_precision("highest")
    train_data = datasets["train"]
    probe = train_data.inputs(np.arange(1), length=int(train_data.lengths[0]), epoch=0)
    try:
        chain.learn_shapes({key: value.to(world.device) for key, value in probe.items()})
    except UserError:
        raise
    except Exception as error:  # models raise any kind of error for inputs that do not fit
        said = " ".join(str(error).split())[:200]
        shapes = ", ".join(f"{key} {list(value.shape[1:])}" for key, value in probe.items())
        raise UserError(
            f"model.name: {config.model.name} cannot compute on {config.data.name} ({shapes}: {said}); "
            "give model.kwargs that fit the data, or another data.image_size"
        ) from error
    if config.may_freeze:
        _check_boundaries(chain, length=int(train_data.lengths[0]))
    given = {key: value.to(world.device) for key, value in probe.items()}
    if world.size > 1 and len(set(values_of_ranks(chain.leaves_one_row(chain.num_blocks)))) > 1:
        chain.learn_shapes(given, head_row_only=False)  # ranks of other devices have not proven the same
    torch.set_float32_matmul_precision(config.train.float32_matmul)
    precision = settle(chain, train_data, config, world=world)
    if chain.autocasts:
        torch.set_float32_matmul_precision("highest")
        chain.learn_shapes(given, head_row_only=chain.leaves_one_row(chain.num_blocks))
    if world.num_nodes > 1:
        _check_agreement(chain, datasets, world=world)
    torch.set_float32_matmul_precision(config.train.float32_matmul)  # Note: the proofs above want the whole one.
    if config.train.compile:
        chain.compile()
    views = _settle_views(datasets, config, chain=chain, world=world)
    guard = _set_aside(datasets, config)
    settled = _settled(config, precision=precision, views=views, guard=guard)
    return Job(built, values, chain, dict(datasets), settled, precision, world, guard, label_names, loss)


def _check_boundaries(chain: Chain, *, length: int) -> None:
    """Raises UserError for activations that neither the probe nor the cache of frozen blocks can take."""
    behind = (max(1, chain.numbering.behind(blocks)) for blocks in range(chain.num_blocks + 1))
    leaving = [chain.boundary(unit - 1, rows=1, length=length) for unit in behind]
    width = leaving[0].shape[-1]
    for blocks, found in enumerate(leaving):
        if found.dim() != 3 or found.shape[-1] != width:
            shape, place = ", ".join(map(str, found.shape[1:])), f"behind block {blocks}" if blocks else "into block 1"
            raise UserError(
                f"model.blocks: [rows, {shape}] goes {place} of {chain.name}; those that freeze need [rows, positions, "
                f"width] as transformers have it, of one width; give freeze.policy=none, or other blocks"
            )


def _settled(config: Config, *, precision: Precision, views: object, guard: GuardSize | None) -> Config:
    """The configuration with what is decided in place of ``auto``."""
    freeze, samples = config.freeze, dict[str, object]()
    if guard is not None:
        samples = {"freeze.guard_samples": guard.num_samples}
    elif freeze.is_guarded and freeze.guard_samples == "auto":  # a longer run that goes on from it has none either
        samples = {"freeze.guard_samples": "none"}
    names = {"train.precision": precision.name, "train.wide_attention": precision.wide_attention, "cache.views": views}
    return config.with_overrides({**names, **samples})


def _check_base(config: Config, values: Values) -> None:
    """Raises UserError for adapters beside weights that would be rounded: they belong to those in the files, which are
    not saved with them."""
    wider = [dtype for dtype in values.read_types() if dtype.is_floating_point and dtype.itemsize > 2]
    if config.model.lora is not None and config.model.dtype == "bfloat16" and wider:
        raise UserError(
            f"model.dtype: the weights of {config.model.name} are {str(wider[0]).removeprefix('torch.')}, and adapters "
            "would belong to rounded ones; give float32"
        )


def _load_data(
    config: Config, built: TimmModel | TransformersModel, *, info: DataInfo, lead: Lead
) -> dict[str, Dataset]:
    """The datasets by split."""
    if isinstance(built, TimmModel):
        return load_image_data(
            config.data, info=info, preprocessing=built.preprocessing, seed=config.train.seed, lead=lead
        )
    if config.task == "question_answering":
        return load_squad(config.data, tokenizer=built.tokenizer, lead=lead)
    return load_text_data(config.data, info=info, tokenizer=built.tokenizer, lead=lead)


def _settle_views(
    datasets: dict[str, Dataset], config: Config, *, chain: Chain, world: World
) -> int | Literal["auto"] | None:
    """Collective. Gives the training data its views, and ``cache.views`` as it is settled."""
    train = datasets["train"]
    if not isinstance(train, ImageDataset) or train.views == 1:
        return config.cache.views
    views = settle_views(datasets, config, chain=chain, nodes=world.num_nodes)
    if views is not None:
        datasets["train"] = train.with_views(views)
    return views


def _set_aside(datasets: dict[str, Dataset], config: Config) -> GuardSize | None:
    """Takes the guard's samples out of the training data. Returns its work; None for no guard."""
    if not config.freeze.is_guarded:
        return None
    train, wanted = config.train, config.freeze.guard_samples
    if wanted == "none":
        return None
    size = guard_size(
        len(datasets["train"]),
        batch_size=train.batch_size,
        epochs=train.epochs,
        max_steps=train.max_steps,
        wanted=wanted if isinstance(wanted, int) else None,
    )
    parts = None if size is None else set_aside(datasets["train"], most=size.num_samples)
    if parts is None:
        return None
    datasets["train"], datasets[SET_ASIDE] = parts
    return size


def _check_agreement(chain: Chain, datasets: Mapping[str, Dataset], *, world: World) -> None:
    """Collective. Refuses data or weights that differ between nodes, which may read different files.

    Raises:
        UserError: on every rank.
    """
    weights = digests_of_units(chain, world=world)[world.rank // world.local_size]
    mine = {f"{split} data": data.fingerprint for split, data in datasets.items()} | {"weights": "".join(weights)}
    everyone = values_of_ranks(mine)
    for rank, theirs in enumerate(everyone):
        for what, digest in theirs.items():
            if digest != everyone[0][what]:
                key = "model.name" if what == "weights" else "data.path"
                raise UserError(
                    f"{key}: node {rank // world.local_size} has other {what} than node 0; give all the same files"
                )
