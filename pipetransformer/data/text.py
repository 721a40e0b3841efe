"""Text classification: the splits of a dataset, tokenized once per node."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING

import numpy as np

from pipetransformer.config.datasets import DATASETS
from pipetransformer.data.dataset import Dataset
from pipetransformer.data.info import DataInfo
from pipetransformer.data.prepared import Lead, alone, prepared
from pipetransformer.data.reader import TextReader, reader_of
from pipetransformer.data.reading import Texts
from pipetransformer.data.tokens import TokenDataset, check_tokenizer, ragged, tokenizer_identity

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from pipetransformer.config import DataConfig


Read = Callable[[], Texts]


def load_text_data(
    data: DataConfig, *, info: DataInfo, tokenizer: PreTrainedTokenizerFast, lead: Lead = alone
) -> dict[str, Dataset]:
    """The splits of the dataset that ``data`` names: ``train``, ``eval`` and, of MNLI, ``mismatched``."""
    check_tokenizer(tokenizer, max_length=data.max_length)
    reader = reader_of(data)
    assert isinstance(reader, TextReader), reader
    splits: dict[str, Dataset] = {}
    for split in reader.splits:
        max_samples = data.max_train_samples if split == "train" else data.max_eval_samples
        # Kept, because the key of what comes from the hub reads it, too.
        read = cache(partial(reader.read, split, label_names=info.label_names, max_samples=max_samples))

        def key(split: str = split, max_samples: int | None = max_samples, read: Read = read) -> object:
            source = reader.digest(split)
            # What the hub gives may change under its id: it is read each time.
            content = source if source is not None else read().digest()
            shape = (data.max_length, max_samples, data.text_columns, data.label_column, info.label_names)
            return ("texts", content, tokenizer_identity(tokenizer), *shape)

        def build(read: Read = read) -> dict[str, np.ndarray]:
            return _tokenized(read(), tokenizer, max_length=data.max_length)

        splits[split] = TokenDataset(
            prepared(key, build, lead=lead),
            kind=DATASETS[data.name].kind,
            metric_names=reader.metrics,
            padding_id=tokenizer.pad_token_id,
            max_length=data.max_length,
        )
    return splits


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
