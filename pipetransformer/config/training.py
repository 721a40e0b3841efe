"""The section ``train``: how a model is trained."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge, Le
from pydantic import BeforeValidator, Field

from pipetransformer.config.quantities import Interval
from pipetransformer.config.types import (
    Count,
    CountOrZero,
    Decay,
    Every,
    NotNegative,
    Positive,
    Section,
    Share,
    Text,
    as_tuple,
)
from pipetransformer.config.words import Allowed

EPOCH = Interval(1, "epoch")


class TrainConfig(Section):
    epochs: Count = Field(description="Passes over the training data.")
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
    lr: Positive = Field(description="Peak learning rate; of the parts, see the next two keys.")
    head_lr_scale: Positive = Field(
        default=1.0, description="Learning rate of the head (all behind the last block), as a multiple of `lr`."
    )
    layer_decay: Decay = Field(
        default=1.0,
        description="Layer-wise decay: the last block's learning rate is `lr` times this, each block's before it and "
        "the stem's once more; the head's has none.",
    )
    weight_decay: NotNegative = Field(default=0.01, description="Weight decay; biases and norms have none.")
    optimizer: Literal["adamw", "sgd"] = Field(default="adamw", description="The optimizer.")
    momentum: Share = Field(default=0.9, description="Momentum of `sgd`.")
    betas: Annotated[tuple[Share, Share], BeforeValidator(as_tuple)] = Field(
        default=(0.9, 0.999), description="Decay rates of the moments of `adamw`."
    )
    eps: Positive = Field(default=1e-8, description="Term in the denominator of `adamw`.")
    label_smoothing: Share = Field(default=0.0, description="Share of the target that is spread over all classes.")
    lr_schedule: Literal["linear", "cosine", "constant"] = Field(
        default="linear",
        description="How the learning rate goes on after the warm-up, step by step; the first two end at 0.",
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
    precision: Literal["auto", "float32", "bfloat16", "float64"] = Field(
        default="auto",
        description="`bfloat16` is autocast, with weights in float32; `float64` is for exact comparisons. `auto` is "
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
