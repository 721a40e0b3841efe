"""Facts about a dataset before its samples are read, so that the model can be built first."""

from __future__ import annotations

from dataclasses import dataclass

from pipetransformer.config import DataConfig
from pipetransformer.data.reader import Reader, reader_of


@dataclass(frozen=True, slots=True)
class DataInfo:
    """The labels and pictures that a model is built for.

    Attributes:
        label_names: names of the classes; none for scores and spans.
        channels: channels of pictures; None for texts.
        tokenizer: JSON of a tokenizer trained on the data's own texts; None where the model brings one.
    """

    label_names: tuple[str, ...]
    channels: int | None = None
    tokenizer: str | None = None


def describe(data: DataConfig) -> DataInfo:
    """Reads metadata, and of a user's own table its labels. Raises UserError."""
    reader: Reader = reader_of(data)
    return DataInfo(reader.label_names(), channels=reader.channels, tokenizer=reader.tokenizer())


def channels_of(data: DataConfig) -> int | None:
    """Channels of pictures; None for texts."""
    reader: Reader = reader_of(data)
    return reader.channels


def known_classes(data: DataConfig) -> int | None:
    """The number of classes, by the name of the data alone; 0 for scores and spans, None where files tell."""
    reader: Reader = reader_of(data)
    return None if reader.names is None else len(reader.names)
