"""The keys of ``model.lora``."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import MinLen
from pydantic import BeforeValidator, Field

from pipetransformer.config.types import Count, Positive, Section, Share, Text
from pipetransformer.config.words import Allowed

ALL_LINEAR = "all-linear"


class LoraConfig(Section):
    r: Count = Field(default=8, description="Rank of the two matrices of an adapter.")
    alpha: Positive = Field(default=16.0, description="What an adapter adds is multiplied by `alpha / r`.")
    dropout: Share = Field(default=0.0, description="Dropout rate of what enters an adapter.")
    targets: Annotated[
        Annotated[tuple[Text, ...], MinLen(1)] | Literal["all-linear"],
        BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value),
        Allowed("a list of module names, or all-linear"),
    ] = Field(
        default="all-linear",
        description="Linear layers that get an adapter, by the last parts of their names (`[query, value]`), or "
        "`all-linear`: all of the blocks'.",
    )
    blocks: Count | None = Field(
        default=None,
        description="Adapters in so many of the last blocks alone, so that all blocks before them are frozen from the "
        "first step on, and can be cached; null: in all blocks.",
    )
