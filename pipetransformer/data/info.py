"""What is known of a dataset before its samples are read, so that the model can be built first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipetransformer.data.cifar import CIFAR
from pipetransformer.data.demo import DEMO_LABEL_NAMES, demo_questions, demo_reviews, demo_tokenizer
from pipetransformer.data.digits import DIGIT_NAMES
from pipetransformer.data.glue import GLUE
from pipetransformer.data.pictures import picture_label_names
from pipetransformer.data.tables import table_label_names

if TYPE_CHECKING:
    from pipetransformer.config import DataConfig

__all__ = ["DataInfo", "channels_of", "describe", "known_classes"]


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
    return DataInfo(picture_label_names(data), channels=channels_of(data))


def channels_of(data: DataConfig) -> int | None:
    """Channels of pictures; None for texts."""
    if data.name == "digits":
        return 1
    return 3 if data.name in CIFAR or data.name == "image_folder" else None


def known_classes(data: DataConfig) -> int | None:
    """How many classes there are, by the name of the data alone; 0 for scores and spans, None where files tell."""
    if data.name in ("table", "image_folder"):
        return None
    if data.name in ("squad", "demo_qa"):
        return 0
    named = {"demo_text": DEMO_LABEL_NAMES, "digits": DIGIT_NAMES}
    named |= {name: cifar.names for name, cifar in CIFAR.items()} | {name: task.names for name, task in GLUE.items()}
    return len(named[data.name])
