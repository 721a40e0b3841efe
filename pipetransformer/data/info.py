"""What is known of a dataset before its samples are read, so that the model can be built first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipetransformer.data.demo import DEMO_LABEL_NAMES, demo_questions, demo_reviews, demo_tokenizer
from pipetransformer.data.glue import GLUE
from pipetransformer.data.pictures import picture_label_names
from pipetransformer.data.tables import table_label_names

if TYPE_CHECKING:
    from pipetransformer.config import DataConfig

__all__ = ["DataInfo", "describe"]


@dataclass(frozen=True, slots=True)
class DataInfo:
    """What a model is built for.

    Attributes:
        label_names: of the classes; none of scores and spans. channels: of pictures; None for texts.
        tokenizer: JSON of a tokenizer trained on the data's own texts; None where the model brings one.
    """

    label_names: tuple[str, ...]
    channels: int | None = None
    tokenizer: str | None = None


def describe(data: DataConfig) -> DataInfo:
    """Reads metadata, and of a user's own table its labels. Raises UserError."""
    if data.name in GLUE:
        return DataInfo(GLUE[data.name].names)
    if data.name == "squad":
        return DataInfo(())
    if data.name == "table":
        return DataInfo(table_label_names(data))
    if data.name == "demo_text":
        return DataInfo(DEMO_LABEL_NAMES, tokenizer=demo_tokenizer(demo_reviews("train").first))
    if data.name == "demo_qa":
        return DataInfo((), tokenizer=demo_tokenizer(f"{q.question} {q.context}" for q in demo_questions("train")))
    return DataInfo(picture_label_names(data), channels=1 if data.name == "digits" else 3)
