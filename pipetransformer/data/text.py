"""Text classification: the splits of a dataset, tokenized once per node."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pipetransformer.data.dataset import Dataset
from pipetransformer.data.info import DataInfo
from pipetransformer.data.prepared import Lead, alone
from pipetransformer.data.reader import TextReader, reader_of
from pipetransformer.data.reading import Texts, drawn
from pipetransformer.data.tokens import TokenDataset, check_tokenizer, ragged, token_arrays

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from pipetransformer.config import DataConfig


def load_text_data(
    data: DataConfig, *, info: DataInfo, tokenizer: PreTrainedTokenizerFast, lead: Lead = alone
) -> dict[str, Dataset]:
    """The splits of the dataset that ``data`` names: ``train``, ``eval`` and, of MNLI, ``mismatched``."""
    check_tokenizer(tokenizer, max_length=data.max_length)
    reader: TextReader = reader_of(data)
    splits: dict[str, Dataset] = {}
    for split in reader.splits:
        max_samples = reader.max_samples(split)

        def read(split: str = split, max_samples: int | None = max_samples) -> Texts:
            texts = reader.read(split, label_names=info.label_names)
            return texts.rows(drawn(len(texts.labels), max_samples=max_samples))

        arrays = token_arrays(
            "texts",
            reader,
            split,
            read=read,
            content=Texts.digest,
            build=lambda texts: _tokenized(texts, tokenizer, max_length=data.max_length),
            tokenizer=tokenizer,
            settings=(data.max_length, max_samples, data.text_columns, data.label_column, data.kind, info.label_names),
            lead=lead,
        )
        splits[split] = TokenDataset(arrays, reader, tokenizer)
        splits[split].place = reader.place(split)
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
    tokens = ragged(encoded["input_ids"], encoded["token_type_ids"])
    return {**tokens, "labels": texts.labels, "extent": np.array(texts.extent)}
