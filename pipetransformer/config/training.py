"""The section ``train``: how a model is trained."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge, Le
from pydantic import BeforeValidator, Field, JsonValue

from pipetransformer.config.quantities import Interval
from pipetransformer.config.types import (
    Count,
    CountOrZero,
    Every,
    NotNegative,
    OpenShare,
    Part,
    Positive,
    Section,
    Share,
    Text,
    as_tuple,
)
from pipetransformer.config.words import Allowed

EPOCH = Interval(1, "epoch")


class TrainConfig(Section):
    epochs: CountOrZero = Field(description="Passes over the training data; 0 evaluates the model as it is.")
    max_steps: Count | None = Field(
        default=None, description="End after so many steps, where that is before the last epoch; null: never before."
    )
    early_stopping: Count | None = Field(
        default=None, description="End after so many evaluations in a row without a better one; null: never before."
    )
    best_by: Text | None = Field(
        default=None,
        description="The metric that the best weights are kept by, such as `accuracy`, `macro_f1`, `pearson`; null: "
        "the first one of the data.",
    )
    class_weights: Annotated[
        Literal["balanced"] | tuple[Positive, ...] | None,
        BeforeValidator(as_tuple),
        Allowed("balanced, a list of numbers above 0, or null"),
    ] = Field(
        default=None,
        description="The weight of each class in the loss: `balanced` is inverse to how often it is in the training "
        "data, 1 for the mean sample; a list has one for each class.",
    )
    batch_size: Count = Field(
        description="Global batch: samples (of SQuAD: windows) a step over all ranks, whatever the layout. A shorter "
        "batch counts by its share of it."
    )
    gradient_accumulation_steps: Count | None = Field(
        default=None,
        description="Where there is no pipeline (pp 1): the parts of its share of a batch that a rank computes one "
        "after the other, for less memory; the step is the same. null: as `pipe.microbatches` says.",
    )
    lr: Positive = Field(description="Peak learning rate; of the parts, see the next two keys.")
    head_lr_scale: Positive = Field(
        default=1.0, description="Learning rate of the head (all behind the last block), as a multiple of `lr`."
    )
    layer_decay: Part = Field(
        default=1.0,
        description="Layer-wise decay: the last block's learning rate is `lr` times this, each block's before it and "
        "the stem's once more; the head's has none.",
    )
    weight_decay: NotNegative = Field(default=0.01, description="Weight decay; biases and norms have none.")
    optimizer: Literal[
        "adamw",
        "sgd",
        "adadelta",
        "adafactorbv",
        "adagrad",
        "adam",
        "adamax",
        "adopt",
        "lars",
        "lion",
        "muon",
        "nadamw",
        "nesterov",
        "radam",
        "rmsprop",
    ] = Field(
        default="adamw",
        description="The optimizer: the first two are torch's own, fused; the others are made by timm, under its names "
        "for them. Those that keep numbers beside each parameter's own tensors could not move with it, and are left "
        "out.",
    )
    optimizer_options: Annotated[dict[str, JsonValue], Allowed("a mapping of names to plain values")] = Field(
        default_factory=dict, description="Further arguments of the optimizer, such as `{betas: [0.9, 0.95]}`."
    )
    momentum: Share = Field(default=0.9, description="Momentum of `sgd`, and of others that have it.")
    betas: Annotated[tuple[Share, Share], BeforeValidator(as_tuple)] = Field(
        default=(0.9, 0.999), description="Decay rates of the moments of `adamw`."
    )
    eps: Positive = Field(default=1e-8, description="Term in the denominator of `adamw`.")
    mixup: NotNegative = Field(
        default=0.0,
        description="Of training images: each is blended with another one of its batch, by a share that is drawn from "
        "Beta(a, a) for the batch; a is this number, 0 for no blending. Mixed images are not cached.",
    )
    cutmix: NotNegative = Field(
        default=0.0,
        description="Likewise, by a rectangle of the other image; with both keys, one of the two is drawn for a batch.",
    )
    label_smoothing: Share = Field(default=0.0, description="Share of the target that is spread over all classes.")
    lr_schedule: Literal[
        "linear",
        "cosine",
        "constant",
        "polynomial",
        "cosine_with_restarts",
        "cosine_with_min_lr",
        "inverse_sqrt",
        "warmup_stable_decay",
        "step",
        "multistep",
        "tanh",
    ] = Field(
        default="linear",
        description="How the learning rate goes on after the warm-up, step by step; the first two end at 0. From "
        "`polynomial` to `warmup_stable_decay` as transformers makes them, the last three as timm does.",
    )
    lr_options: Annotated[dict[str, JsonValue], Allowed("a mapping of names to plain values")] = Field(
        default_factory=dict,
        description="Arguments of a schedule of transformers or timm, under their names: `{num_cycles: 3}`, "
        "`{decay_epochs: 2, decay_rate: 0.5}`.",
    )
    warmup_ratio: Share = Field(default=0.0, description="Share of all steps in which the learning rate rises from 0.")
    max_grad_norm: Positive | None = Field(
        default=None,
        description="Clip the gradient to this norm, taken over the whole active model; null does not clip.",
    )
    not_finite: Literal["stop", "skip"] = Field(
        default="stop",
        description="At a loss or a gradient that is no finite number: `stop` the job, or `skip` the update, on all "
        "ranks; twenty skipped in a row stop it all the same.",
    )
    ema: OpenShare | None = Field(
        default=None,
        description="Evaluate and save a moving average of the weights: after each step so much of it, such as 0.999, "
        "less in the first steps, and the rest of the new weights. What is frozen is its own average; null: the "
        "weights themselves.",
    )
    compile: bool = Field(
        default=False,
        description="Compile the blocks by torch.compile: faster steps after a minute or more of compilation, which "
        "long runs earn back. Results differ in the last bits.",
    )
    precision: Literal["auto", "float32", "bfloat16", "float16", "float64"] = Field(
        default="auto",
        description="`bfloat16` is autocast, with weights in float32; `float16` too, on GPUs alone, with a loss that "
        "is scaled so that small gradients are kept; `float64` is for exact comparisons. `auto` is "
        "`bfloat16` where the devices have instructions for it and a timing at the start confirms it, else `float32`; "
        "a resumed or replayed run keeps its own.",
    )
    wide_attention: CountOrZero | Literal["auto"] = Field(
        default="auto",
        description="Under `bfloat16` on a CPU, attention over at most so many positions trains in float32, forward "
        "and backward, but where it drops out; `auto` times both at the start. A resumed or replayed run keeps its "
        "own.",
    )
    float32_matmul: Literal["highest", "high", "medium"] = Field(
        default="highest",
        description="Precision of matrix products of float32 numbers, as torch names it: `high` is TF32 on a GPU that "
        "has it, `medium` bfloat16 inside the product, also on a CPU that has it.",
    )
    seed: Annotated[int, Ge(0), Le(2**32 - 1)] = Field(
        default=0, description="Seed of new weights, order of samples, augmentation and dropout."
    )
    eval_every: Every = Field(default=EPOCH, description="How often to evaluate; the end of training always does.")

    @property
    def mixes(self) -> bool:
        """Whether images are mixed with each other."""
        return self.mixup > 0 or self.cutmix > 0
