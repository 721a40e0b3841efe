"""The section ``data``, and the check of those of its keys that must fit each other."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from pipetransformer.config.datasets import DATASETS, Kind
from pipetransformer.config.training import TrainConfig
from pipetransformer.config.types import (
    Count,
    CountOrZero,
    NotNegative,
    OpenShare,
    Part,
    Section,
    Share,
    Text,
    as_tuple,
)
from pipetransformer.config.words import Allowed
from pipetransformer.errors import UserError

_WITH_SPLITS = frozenset(DATASETS) - {"table", "image_folder"}  # all that are shipped but for a user's own data
_OF_TIMM = ("crop_scale", "rand_augment", "color_jitter", "erasing")


class DataConfig(Section):
    name: Annotated[str, AfterValidator(DATASETS.known), DATASETS] = Field(
        description="The dataset: pictures, a task of GLUE, `table` (texts of your own), SQuAD 1.1, or a demo, which "
        "needs no files."
    )
    text_columns: Annotated[
        tuple[Text] | tuple[Text, Text], BeforeValidator(as_tuple), Allowed("a list of one or two column names")
    ] = Field(default=("text",), description="Columns of a `table` that hold the text, or the two texts of a pair.")
    label_column: Text = Field(default="label", description="Column of a `table` that holds the label.")
    label_kind: Literal["classes", "scores", "labels"] = Field(
        default="classes",
        description="What that column of a `table` holds: `classes`, a name or a whole number; `scores`, a number to "
        "be predicted (regression); `labels`, any number of names (multi-label), between semicolons, or as a list.",
    )
    path: Text | None = Field(
        default=None,
        description="A local folder (of a `table`, also one file), or a hub id; null takes the usual place on the hub.",
    )
    eval_fraction: OpenShare | None = Field(
        default=None,
        description="The share of one table or of one folder of classes that is kept to evaluate on, of each class "
        "alike, the same in every run; null: the evaluation data are apart.",
    )
    splits: dict[str, Text] = Field(
        default_factory=dict,
        description="Other names of splits, of files, folders or on a hub: `{eval: test}` evaluates on the test set.",
    )
    max_train_samples: Count | None = Field(
        default=None,
        description="Train on so many samples (of SQuAD: questions), drawn once and for all; null takes all.",
    )
    max_eval_samples: Count | None = Field(
        default=None,
        description="Evaluate on so many samples (of SQuAD: questions), drawn once and for all; null takes all.",
    )
    max_length: Count = Field(
        default=128, description="Texts are cut after so many tokens; contexts of questions into windows of as many."
    )
    stride: Count = Field(
        default=128, description="Tokens that neighbouring windows of a context share; less than half of `max_length`."
    )
    image_size: Count | None = Field(
        default=None, description="Height and width of an image at the model's input; null takes the model's own."
    )
    augment: Literal["none", "basic", "timm"] = Field(
        default="none",
        description="Of training images (see `cache.views`). `basic`: random crops, after an eighth of black is put "
        "around, and horizontal flips. `timm`: timm's own transforms, random parts of the image resized and flipped, "
        "with the next four keys.",
    )
    crop_scale: Annotated[tuple[Part, Part], BeforeValidator(as_tuple), Allowed("two shares of the area, in order")] = (
        Field(default=(0.08, 1.0), description="Under `timm`: the least and the largest part of an image's area.")
    )
    rand_augment: Text | None = Field(
        default=None,
        description="Under `timm`: a policy of random changes as timm names it, such as `rand-m9-mstd0.5-inc1` "
        "(RandAugment) or `augmix-m5`.",
    )
    color_jitter: NotNegative = Field(
        default=0.0, description="Under `timm`: how far brightness, contrast and saturation change; without a policy."
    )
    erasing: Share = Field(default=0.0, description="Under `timm`: the chance that a rectangle of an image is erased.")
    num_workers: CountOrZero = Field(
        default=0, description="Processes a rank that prepare batches; 0 prepares them in line."
    )

    @property
    def kind(self) -> Kind:
        """What the labels are."""
        return self.label_kind if self.name == "table" else DATASETS[self.name].kind


def check_data(data: DataConfig, train: TrainConfig, *, images: bool) -> None:
    """Raises UserError for keys that do not go together.

    Args:
        images: whether the data are pictures.
    """
    defaults = DataConfig.model_fields
    if data.augment != "none" and not images:
        raise UserError(f"data.augment: {data.augment} is for images; give none")
    changed = next((key for key in _OF_TIMM if getattr(data, key) != defaults[key].default), None)
    if changed is not None and data.augment != "timm":
        raise UserError(f"data.{changed}: is for data.augment timm, and that is {data.augment}; give data.augment=timm")
    if data.crop_scale[0] > data.crop_scale[1]:
        raise UserError(f"data.crop_scale: {list(data.crop_scale)} is not in order; give the smaller share first")
    if train.mixes and not images:
        raise UserError(f"train.{'mixup' if train.mixup else 'cutmix'}: is for images; leave it out")
    if data.label_kind != "classes" and data.name != "table":
        raise UserError(f"data.label_kind: is for a table; {data.name} has {data.kind}, leave it out")
    if data.kind in ("scores", "labels") and train.label_smoothing:
        raise UserError(f"train.label_smoothing: {data.name} has {data.kind}, no classes; give 0")
    if data.eval_fraction is not None and data.name in _WITH_SPLITS:
        raise UserError(f"data.eval_fraction: {data.name} has evaluation data of its own; leave it out")
    if strange := sorted(set(data.splits) - {"train", "eval", "mismatched"}):
        raise UserError(f"data.splits: {strange[0]} is no split here; name train or eval")
