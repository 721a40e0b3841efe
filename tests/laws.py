"""Law 1 of the design, as a harness: an elastic run of the trainer against a plain loop.

The plain loop runs the *library's own* model on the batch plan's ids in one process: no chain, no stage, no reducer, no
cache, torch's own optimizer and clipping, its own learning rate. It shares with the trainer what both are given: the
model and data that ``build_job`` makes, and the batch plan. Both return every weight, and every gradient of the first
and last step.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import timm.data
import timm.optim
import torch
import torch.nn.functional as F

from pipetransformer.config import Config, load_config
from pipetransformer.data import Batch, Dataset, alone, epoch_batches
from pipetransformer.plan import ParallelPlan
from pipetransformer.process.world import World
from pipetransformer.run.job import build_job
from pipetransformer.trainer import Trainer

REPOSITORY = Path(__file__).resolve().parent.parent
NUM_BLOCKS = 6

# (step, frozen blocks, pipeline length); every plan holds until the next.
STATIC = {pp: ((0, 0, pp),) for pp in (1, 2, 4)}
SHRINK_AND_GROW = ((0, 0, 4), (4, 2, 2), (8, 4, 1), (12, 4, 2), (16, 1, 4))
TWO_RANKS = ((0, 0, 2), (5, 6, 1), (9, 3, 2), (14, 0, 2))

Weights = dict[str, np.ndarray]


@dataclass(frozen=True)
class Case:
    """One elastic run.

    Attributes:
        moves: (step, frozen, pp). ways: for each move (schedule, stages a rank), where they are not all ``schedule``
            with one. prefixes: for each move the place of the prefix, where it is not on all ranks.
            clip: max_grad_norm. recompute: pipe.recompute. units: pipe.units. stem: freeze.stem. head_lr_scale,
            layer_decay: those of train. shard: dp.shard. lora: settings of model.lora, as "r=4". dtype: model.dtype.
            class_weights, max_steps, ema, mixup, cutmix: those of train.
            more: further settings.
    """

    model: str
    world_size: int
    moves: tuple[tuple[int, int, int], ...]
    num_microbatches: int = 2
    schedule: str = "1f1b"
    optimizer: str = "adamw"
    clip: float | None = 0.5
    cached: bool = False
    precision: str = "float64"
    ways: tuple[tuple[str, int], ...] = ()
    recompute: str = "never"
    dropout: float = 0.0
    units: str = "block"
    stem: bool = False
    head_lr_scale: float = 1.0
    layer_decay: float = 1.0
    prefixes: tuple[str, ...] = ()
    shard: str = "none"
    lora: tuple[str, ...] = ()
    dtype: str = "float32"
    class_weights: str = "null"
    max_steps: int | None = None
    ema: float | None = None
    averaged: bool = False
    mixup: float = 0.0
    cutmix: float = 0.0
    more: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        path = "-".join(f"{pp}x{self.world_size // pp}" for _, _, pp in self.moves)
        cache = "cache" if self.cached else "nocache"
        clip = "clip" if self.clip else "noclip"
        return f"{self.model}-{path}-{self.schedule}-M{self.num_microbatches}-{self.optimizer}-{clip}-{cache}"

    def overrides(self, data: str) -> list[str]:
        return [
            *model_overrides(self.model, data),
            f"train.optimizer={self.optimizer}",
            f"train.lr={0.001 if self.optimizer == 'adamw' else 0.05}",
            f"train.max_grad_norm={'null' if self.clip is None else self.clip}",
            f"train.precision={self.precision}",
            f"model.dropout={self.dropout}",
            f"freeze.stem={str(self.stem).lower()}",
            f"train.head_lr_scale={self.head_lr_scale}",
            f"train.layer_decay={self.layer_decay}",
            f"model.dtype={self.dtype}",
            f"train.class_weights={self.class_weights}",
            f"train.ema={'null' if self.ema is None else self.ema}",
            f"freeze.averaged={str(self.averaged).lower()}",
            f"train.mixup={self.mixup}",
            f"train.cutmix={self.cutmix}",
            f"train.max_steps={'null' if self.max_steps is None else self.max_steps}",
            *(f"model.lora.{setting}" for setting in self.lora),
            *self.more,
        ]

    def plans(self) -> dict[int, ParallelPlan]:
        ways = self.ways or ((self.schedule, 1),) * len(self.moves)
        prefixes = self.prefixes or ("replicated",) * len(self.moves)
        return {
            step: make_plan(
                frozen,
                pp,
                world_size=self.world_size,
                num_microbatches=self.num_microbatches,
                schedule=schedule,
                cached=frozen if self.cached and frozen and prefix != "in_place" else None,
                stages_per_rank=stages_per_rank,
                units_per_block=2 if self.units == "half" else 1,
                stem_frozen=self.stem or bool(self.lora),
                prefix=prefix,
                shard=self.shard,
            )
            for (step, frozen, pp), (schedule, stages_per_rank), prefix in zip(self.moves, ways, prefixes, strict=True)
        }


def make_plan(
    frozen: int,
    pp: int,
    *,
    world_size: int,
    num_microbatches: int,
    schedule: str,
    cached: int | None = None,
    stages_per_rank: int = 1,
    units_per_block: int = 1,
    stem_frozen: bool = False,
    prefix: str = "replicated",
    shard: str = "none",
) -> ParallelPlan:
    """A plan with evenly cut stages; halves of blocks are cut apart (at even units) wherever there is room."""
    first = 1 + frozen * units_per_block if frozen else int(stem_frozen)
    first = 0 if prefix == "in_place" else first
    active, num_stages = NUM_BLOCKS * units_per_block + 2 - first, pp * stages_per_rank
    boundaries = [first + round(stage * active / num_stages) for stage in range(1, num_stages)]
    if units_per_block == 2 and active >= 2 * num_stages:
        boundaries = [cut - cut % 2 for cut in boundaries]
    return ParallelPlan(
        *(frozen, pp, world_size // pp, tuple(boundaries), num_microbatches, schedule, cached, NUM_BLOCKS),
        *(stages_per_rank, units_per_block, stem_frozen, prefix, shard),
    )


NO_SMOOTHING = ("train.label_smoothing=0",)
PICTURE_MODELS = {
    "vit": "vit_tiny_patch16_224",
    "deit": "deit_tiny_distilled_patch16_224",
    "beit": "beit_base_patch16_224",
    "eva": "eva02_tiny_patch14_224",
}


def model_overrides(model: str, data: str) -> list[str]:
    """20 steps (4 epochs of 5) on images, some more (2 epochs) on texts; a last batch of an epoch or bucket is uneven.

    ``model``: one of ``PICTURE_MODELS``, or a folder in ``data``; with "-qa" it reads the questions there.
    """
    epochs, warmup = (4, 0.2) if model in PICTURE_MODELS else (2, 0.4)  # with less, SGD diverges on GPT-2's scores
    common = [
        *("train.batch_size=32", f"train.epochs={epochs}", f"train.warmup_ratio={warmup}", "train.label_smoothing=0.1"),
        *("train.weight_decay=0.1", "train.eval_every=1000 steps", "checkpoint.every=null", "log.wandb=disabled"),
        *("log.every=1000", "model.dropout=0.0", "pipe.initial_length=auto"),
    ]
    if model in PICTURE_MODELS:
        kwargs = f"{{patch_size: 2, in_chans: 1, embed_dim: 16, depth: {NUM_BLOCKS}, num_heads: 2}}"
        name = f"model.name={PICTURE_MODELS[model]}"
        return [*common, name, f"model.kwargs={kwargs}", "data.max_train_samples=150", "data.max_eval_samples=40"]
    if model.endswith("-scores"):
        return [*common, f"model.name={data}/{model}", f"data.path={data}/stsb", "data.name=stsb", *NO_SMOOTHING]
    if model.endswith("-qa"):
        windows = ("data.max_length=48", "data.stride=8")
        return [*common, f"model.name={data}/{model}", f"data.path={data}/squad", *windows]
    return [*common, f"model.name={data}/{model}", f"data.path={data}/sst2"]


def configuration(model: str, overrides: Sequence[str]) -> Config:
    return load_config(configuration_file(model), overrides)


def configuration_file(model: str) -> Path:
    name = "digits" if model in PICTURE_MODELS else "squad" if model.endswith("-qa") else "sst2"
    return REPOSITORY / f"config/train_config_{name}_no_freeze.yaml"


def final_weights(trainer: Trainer) -> Weights | None:
    """Collective. All weights of a run that has ended, on rank 0; None on the others."""
    weights = {name: value.numpy() for unit in trainer.engine.weights() for name, value in unit.items()}
    return weights or None


def elastic_run(
    world: World,
    case: Case,
    data: str,
    folder: str,
    bug: AbstractContextManager[object] | None = None,
) -> tuple[Weights | None, dict[int, Weights]]:
    """The job under test on one rank: (all weights on rank 0, this rank's gradients by step)."""
    replay = Path(folder) / f"replay_{world.rank}.jsonl"
    write_replay(replay, case.plans())
    overrides = [*case.overrides(data), f"pipe.recompute={case.recompute}", f"pipe.units={case.units}"]
    overrides += [f"run.replay={replay}", f"run.dir={folder}", "run.id=elastic"]
    gradients: dict[int, Weights] = {}

    def probe(step: int, named: Mapping[str, torch.Tensor]) -> None:
        last = trainer.calendar.total_steps - 1
        if step in (0, last):
            gradients[0 if step == 0 else -1] = {name: g.detach().numpy().copy() for name, g in named.items()}

    config = configuration(case.model, [*overrides, "run.overwrite=true"])
    with bug or nullcontext():
        trainer = Trainer(config, world, probe=probe, timed=False)
        if case.precision == "float32":
            grow_biases(trainer.job.whole_model())
        trainer.run()
    return final_weights(trainer), gradients


def grow_biases(network: torch.nn.Module) -> None:
    """Gives biases and norms the size that they have in a trained model.

    A bias that starts at zero is, after 20 steps, nothing but a sum of gradients that cancel: in float32 its relative
    error is that of the cancellation (1e-6 and more for M = 4 against M = 1 in one process), not of the training.
    """
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.ndim <= 1:
                parameter += 0.1 * torch.randn(parameter.shape, generator=random)


def write_replay(path: Path, plans: Mapping[int, ParallelPlan]) -> None:
    lines = [json.dumps({"event": "plan", "step": step, "plan": plan.as_dict()}) for step, plan in plans.items()]
    path.write_text("".join(f"{line}\n" for line in lines))


@dataclass(frozen=True)
class Plain:
    """What a plain loop gives: weights, gradients of the first (0) and last step (-1), and the norm of every block's
    gradient before clipping, summed over the steps [blocks]."""

    weights: Weights
    gradients: dict[int, Weights]
    norms: list[float]


@lru_cache(maxsize=64)
def plain_loop(
    model: str, frozen_at: tuple[tuple[int, int], ...], overrides: tuple[str, ...], num_nodes: int = 1
) -> Plain:
    """The reference: a plain loop over the library's model.

    Args:
        frozen_at: (step, frozen blocks). num_nodes: what the batches are a function of, beside seed and epoch.
    """
    torch.set_num_threads(1)
    config = configuration(model, overrides)
    train = config.train
    job = build_job(config, World(0, 1, 0, 1, torch.device("cpu")), lead=alone)
    network, data = job.whole_model(), job.datasets["train"]
    if train.precision == "float32":
        grow_biases(network)
    dtype = torch.float64 if train.precision == "float64" else torch.float32
    groups = [
        {
            "params": [parameter],
            "weight_decay": train.weight_decay if parameter.ndim > 1 else 0.0,
            "scale": rate_of(name, head_lr_scale=train.head_lr_scale, layer_decay=train.layer_decay),
        }
        for name, parameter in network.named_parameters()
    ]
    if train.optimizer == "adamw":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, lr=train.lr, betas=train.betas, eps=train.eps)
    elif train.optimizer != "sgd":
        optimizer = timm.optim.create_optimizer_v2(groups, opt=train.optimizer, lr=train.lr, momentum=train.momentum)
    else:
        optimizer = torch.optim.SGD(groups, lr=train.lr, momentum=train.momentum)
    batches = [
        (epoch, batch)
        for epoch in range(train.epochs)
        for batch in epoch_batches(
            data.lengths, batch_size=train.batch_size, seed=train.seed, epoch=epoch, num_nodes=num_nodes
        )
    ]
    batches = batches[: train.max_steps]
    warmup = math.ceil(train.warmup_ratio * len(batches))
    weights = None
    if train.class_weights is not None:  # as scikit-learn balances them
        counts = np.bincount(data.labels.numpy())
        weights = torch.tensor(len(data) / (len(counts) * counts), dtype=dtype)
    mixing = timm.data.Mixup(train.mixup, train.cutmix, label_smoothing=train.label_smoothing, num_classes=10)
    averages = {name: parameter.detach().clone() for name, parameter in network.named_parameters()}
    recent = {name: average.clone() for name, average in averages.items()}
    frozen_from = dict(frozen_at)
    gradients: dict[int, Weights] = {}
    norms = [0.0] * NUM_BLOCKS
    network.train()
    for step, (epoch, batch) in enumerate(batches):
        if step in frozen_from:
            for name, parameter in network.named_parameters():
                is_fixed = config.model.lora is not None and is_base(name)
                frozen = is_frozen(name, frozen_from[step], stem=config.freeze.stem)
                if config.freeze.is_averaged and frozen and parameter.requires_grad:
                    parameter.data.copy_(recent[name])
                parameter.requires_grad_(not frozen and not is_fixed)
                parameter.grad = None
        inputs, labels = data.inputs(batch.ids, length=batch.length, epoch=epoch), data.labels[batch.ids]
        if train.mixup or train.cutmix:
            inputs, labels = mixed(mixing, data, batch, inputs, seed=train.seed, epoch=epoch)
        loss = plain_loss(network, inputs, labels, train.label_smoothing, dtype, weights)
        loss = loss * (len(batch.ids) / train.batch_size)  # a short batch counts by its share
        optimizer.zero_grad()
        loss.backward()
        if step in (0, len(batches) - 1):
            gradients[0 if step == 0 else -1] = {
                name: p.grad.numpy().copy() for name, p in network.named_parameters() if p.grad is not None
            }
        for block in range(NUM_BLOCKS):
            own = [p.grad for name, p in network.named_parameters() if block_of(name) == block and p.grad is not None]
            norms[block] += math.sqrt(sum(float(gradient.double().square().sum()) for gradient in own))
        if train.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_([p for p in network.parameters() if p.grad is not None], train.max_grad_norm)
        ramp = (step + 1) / warmup if step < warmup else 1.0
        decay = 1.0 if step < warmup else (step - warmup) / max(1, len(batches) - warmup)
        shape = 0.5 * (1 + np.cos(np.pi * decay)) if train.lr_schedule == "cosine" else 1.0 - decay
        for group in optimizer.param_groups:
            group["lr"] = group["scale"] * train.lr * (ramp if step < warmup else float(shape))
        optimizer.step()
        for name, parameter in network.named_parameters():
            if parameter.requires_grad and step % 4 == 3:
                recent[name] = recent[name] + (parameter.detach() - recent[name]) * 16 / ((step + 1) / 4 + 15)
            if parameter.requires_grad and train.ema is not None:
                decay = min(train.ema, (1 + step) / (10 + step))
                averages[name] = decay * averages[name] + (1 - decay) * parameter.detach()
    final = {name: value.numpy().copy() for name, value in network.state_dict().items()}
    if train.ema is not None:
        trained = [name for name, parameter in network.named_parameters() if parameter.requires_grad]
        final |= {name: averages[name].numpy() for name in trained}
    return Plain(final, gradients, norms)


def mixed(
    mixing: timm.data.Mixup, data: Dataset, batch: Batch, inputs: dict[str, torch.Tensor], *, seed: int, epoch: int
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The whole batch and its partners behind it, in the order in which timm mixes them."""
    partners = np.random.default_rng([seed, epoch, batch.index]).permutation(batch.ids)
    others = data.inputs(partners, length=batch.length, epoch=epoch)["pixel_values"]
    both = torch.cat((inputs["pixel_values"], others.flip(0)))
    np.random.seed(np.random.SeedSequence([seed, epoch, batch.index]).generate_state(1)[0])
    found, targets = mixing(both, torch.cat((data.labels[batch.ids], data.labels[partners].flip(0))))
    return {"pixel_values": found[: len(partners)]}, targets[: len(partners)]


def plain_run(
    model: str, frozen_at: tuple[tuple[int, int], ...], overrides: tuple[str, ...], num_nodes: int = 1
) -> tuple[Weights, dict[int, Weights]]:
    """Weights and gradients of ``plain_loop``."""
    plain = plain_loop(model, frozen_at, overrides, num_nodes)
    return plain.weights, plain.gradients


def plain_loss(
    network: torch.nn.Module,
    inputs: dict[str, torch.Tensor],
    labels: torch.Tensor,
    smoothing: float,
    dtype: torch.dtype,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """As one writes it for a model of one of the libraries. Class weights: the sum over the samples, over their
    number."""
    outputs = plain_outputs(network, inputs, dtype)
    if labels.is_floating_point() and labels.ndim == 2 and "pixel_values" in inputs:  # mixed, and smoothed
        return F.cross_entropy(outputs[0], labels.to(dtype))
    if labels.is_floating_point() and labels.ndim == 2:  # several each
        return F.binary_cross_entropy_with_logits(outputs[0], labels.to(dtype))
    if labels.is_floating_point():
        return F.mse_loss(outputs[0][:, 0], labels.to(dtype))
    if weights is not None:
        summed = F.cross_entropy(outputs[0], labels, weight=weights, label_smoothing=smoothing, reduction="sum")
        return summed / len(labels)
    if len(outputs) == 1:
        return F.cross_entropy(outputs[0], labels, label_smoothing=smoothing)
    return sum(F.cross_entropy(logits, side, label_smoothing=smoothing) for logits, side in zip(outputs, labels.T)) / 2


def plain_outputs(
    network: torch.nn.Module, inputs: dict[str, torch.Tensor], dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    """The logits of classes, or those of first and last tokens."""
    if "pixel_values" in inputs:
        return (network(inputs["pixel_values"].to(dtype)),)
    if network.config.model_type not in ("bert", "roberta", "electra"):  # their tokenizers make no token types
        inputs = {name: value for name, value in inputs.items() if name != "token_type_ids"}
    told = network(**inputs)
    return (told.logits,) if "logits" in told else (told.start_logits, told.end_logits)


def is_frozen(name: str, frozen: int, *, stem: bool = False) -> bool:
    """Whether a parameter belongs to the stem or one of the first ``frozen`` blocks, by its name alone.

    Where none of the blocks is frozen, the stem may be.
    """
    if frozen == 0 and not stem:
        return False
    block = block_of(name)
    return is_of_stem(name) if block is None else block < frozen


def is_base(name: str) -> bool:
    """Whether a parameter of a model with adapters never trains, by its name alone."""
    return "lora_" not in name and (block_of(name) is not None or is_of_stem(name))


def rate_of(name: str, *, head_lr_scale: float, layer_decay: float) -> float:
    """The learning rate of a parameter as a multiple of ``train.lr``."""
    block = block_of(name)
    if block is not None:
        return layer_decay ** (NUM_BLOCKS - block)
    return layer_decay ** (NUM_BLOCKS + 1) if is_of_stem(name) else head_lr_scale


def is_of_stem(name: str) -> bool:
    """Whether a parameter that belongs to no block belongs to the stem, by its name alone."""
    of_stem = (
        "cls_token",
        "dist_token",
        "pos_embed",
        "patch_embed",
        "embeddings",
        "embeddings_project",
        "embed_tokens",
        "embed_positions",
        "project_in",
    )
    return any(part in (*of_stem, "wte", "wpe") for part in name.split("."))


def block_of(name: str) -> int | None:
    """The number of the block that a parameter belongs to; None for stem and head."""
    parts = name.split(".")
    marker = next((marker for marker in ("blocks", "layer", "layers", "h") if marker in parts), None)
    return None if marker is None else int(parts[parts.index(marker) + 1])


def deviation(ours: Weights, theirs: Weights) -> float:
    """Largest difference of any weight, relative to the largest value of its tensor.

    Also of a bias whose true gradient is zero, as it adds the same to all that a softmax sees: models are made so that
    no bias starts at zero (``tiny``), where such a one would be rounding noise and nothing else.
    """
    assert ours.keys() == theirs.keys()
    worst = 0.0
    for name, expected in theirs.items():
        assert np.isfinite(ours[name]).all() and np.isfinite(expected).all(), f"{name} is not finite"
        scale = float(np.abs(expected).max()) or 1.0
        worst = max(worst, float(np.abs(ours[name] - expected).max()) / scale)
    return worst


def gradient_deviation(ours: Sequence[dict[int, Weights]], theirs: dict[int, Weights]) -> float:
    """Largest difference of any gradient of the first and last step, relative to the largest gradient of that step.

    Every rank's gradients are compared: replicas must agree, stages must cover all parameters.
    """
    worst = 0.0
    for step, expected in theirs.items():
        assert all(np.isfinite(gradient).all() for gradient in expected.values()), f"step {step} is not finite"
        largest = max(float(np.abs(g).max()) for g in expected.values())
        covered: set[str] = set()
        for rank in ours:
            for name, gradient in rank[step].items():
                assert np.isfinite(gradient).all(), f"the gradient of {name} is not finite"
                worst = max(worst, float(np.abs(gradient - expected[name]).max()) / largest)
                covered.add(name)
        assert covered == expected.keys(), covered ^ expected.keys()
    return worst


def reference(case: Case, data: str, *, num_nodes: int = 1) -> tuple[Weights, dict[int, Weights]]:
    frozen_at = tuple((step, frozen) for step, frozen, _ in case.moves)
    return plain_run(case.model, frozen_at, tuple(case.overrides(data)), num_nodes)


def reference_norms(case: Case, data: str) -> list[float]:
    frozen_at = tuple((step, frozen) for step, frozen, _ in case.moves)
    return plain_loop(case.model, frozen_at, tuple(case.overrides(data))).norms
