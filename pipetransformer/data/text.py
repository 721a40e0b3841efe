"""Text classification: the splits of a GLUE task or of a user's own table, tokenized once per node."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pipetransformer.data.dataset import Dataset
from pipetransformer.data.demo import demo_reviews
from pipetransformer.data.glue import GLUE, GLUE_HUB_ID, read_glue
from pipetransformer.data.info import DataInfo
from pipetransformer.data.prepared import Lead, alone, file_digest, prepared
from pipetransformer.data.sources import Texts, locate, refuse_path
from pipetransformer.data.tables import read_table_texts, table_file
from pipetransformer.data.tokens import TokenDataset, check_tokenizer, ragged, tokenizer_identity

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from pipetransformer.config import DataConfig

__all__ = ["load_text_data"]


def load_text_data(
    data: DataConfig, *, info: DataInfo, tokenizer: PreTrainedTokenizerFast, lead: Lead = alone
) -> dict[str, Dataset]:
    """The splits of the dataset that ``data`` names: ``train``, ``eval`` and, of MNLI, ``mismatched``."""
    check_tokenizer(tokenizer, max_length=data.max_length)
    task = GLUE.get(data.name)
    splits: dict[str, Dataset] = {}
    for split in task.splits if task is not None else ("train", "eval"):
        max_samples = data.max_train_samples if split == "train" else data.max_eval_samples

        @cache  # the key of what comes from the hub reads it, too
        def read(split: str = split, max_samples: int | None = max_samples) -> Texts:
            if data.name == "demo_text":
                refuse_path(data)
                return demo_reviews(split).head(max_samples)
            if task is not None:
                return read_glue(data.name, _glue_location(data), split=split, max_samples=max_samples)
            return read_table_texts(data, split=split, label_names=info.label_names, max_samples=max_samples)

        def key(split: str = split, max_samples: int | None = max_samples) -> object:
            source = _digest(data, split)
            # What the hub gives may change under its id: it is read each time.
            content = source if source is not None else read().digest()
            shape = (data.max_length, max_samples, data.text_columns, data.label_column, info.label_names)
            return ("texts", content, tokenizer_identity(tokenizer), *shape)

        def build(read: Callable[[], Texts] = read) -> dict[str, np.ndarray]:
            return _tokenized(read(), tokenizer, max_length=data.max_length)

        splits[split] = TokenDataset(
            prepared(key, build, lead=lead),
            kind="classes" if task is None else task.kind,
            metric_names=("accuracy",) if task is None else task.metrics,
            padding_id=tokenizer.pad_token_id,
            max_length=data.max_length,
        )
    return splits


def _glue_location(data: DataConfig) -> Path | str:
    return locate(data, default_hub_id=GLUE_HUB_ID)


def _digest(data: DataConfig, split: str) -> str | None:
    """Of the local file that holds a split; None where there is none: missing (its reader says so), hub, or demo."""
    if data.name == "demo_text":
        return None
    if (task := GLUE.get(data.name)) is not None:
        location = _glue_location(data)
        path = location / task.splits[split][0] if isinstance(location, Path) else None
    else:
        path = table_file(data, split)
    return file_digest(path) if path is not None and path.is_file() else None


def _tokenized(texts: Texts, tokenizer: PreTrainedTokenizerFast, *, max_length: int) -> dict[str, np.ndarray]:
    encoded = tokenizer(
        texts.first,
        texts.second,
        truncation=True,
        max_length=max_length,
        return_token_type_ids=True,
        return_attention_mask=False,
    )
    return {**ragged(encoded["input_ids"], encoded["token_type_ids"]), "labels": texts.labels}
