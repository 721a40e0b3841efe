"""Text datasets: token ids of a whole split in one ragged array, padded a batch at a time."""

from __future__ import annotations

import hashlib
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import torch

from pipetransformer.data.batches import bucket_edges
from pipetransformer.data.dataset import Dataset, Kind
from pipetransformer.data.glue import GLUE, GLUE_HUB_ID, read_glue
from pipetransformer.data.info import DataInfo
from pipetransformer.data.sources import Texts, locate
from pipetransformer.data.tables import read_table_texts
from pipetransformer.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from pipetransformer.config import DataConfig

__all__ = ["TextDataset", "load_text_data"]


class TextDataset(Dataset):
    """Tokenized texts: the ids of all samples end to end, and where each begins."""

    num_tokens: np.ndarray
    augmented = False

    def __init__(
        self,
        texts: Texts,
        *,
        kind: Kind,
        metric_names: tuple[str, ...],
        label_names: tuple[str, ...],
        tokenizer: PreTrainedTokenizerFast,
        max_length: int,
    ) -> None:
        encoded = tokenizer(
            texts.first,
            texts.second,
            truncation=True,
            max_length=max_length,
            return_token_type_ids=True,
            return_attention_mask=False,
        )
        self.kind, self.metric_names = kind, metric_names
        self.labels = torch.from_numpy(texts.labels)
        self.label_names = label_names
        self.num_tokens = np.fromiter(map(len, encoded["input_ids"]), np.int64, len(texts.labels))
        self.lengths = bucket_edges(self.num_tokens, max_length=max_length)
        self._starts = np.concatenate([[0], np.cumsum(self.num_tokens)[:-1]])
        total = int(self.num_tokens.sum())
        self._token_ids = np.fromiter(chain.from_iterable(encoded["input_ids"]), np.int32, total)
        self._token_types = np.fromiter(chain.from_iterable(encoded["token_type_ids"]), np.int8, total)
        self._padding_id = tokenizer.pad_token_id

    @cached_property
    def fingerprint(self) -> str:
        digest = hashlib.sha256(repr(self._padding_id).encode())
        for array in (self.num_tokens, self.lengths, self._token_ids, self._token_types):
            digest.update(hashlib.sha256(array.data).digest())
        return digest.hexdigest()

    def inputs(self, ids: np.ndarray, *, length: int, epoch: int) -> dict[str, torch.Tensor]:
        num_tokens = self.num_tokens[ids]
        assert num_tokens.max(initial=0) <= length, (num_tokens.max(initial=0), length)
        column = np.arange(length)
        real = column < num_tokens[:, None]
        position = np.where(real, self._starts[ids, None] + column, 0)
        rows = {
            "input_ids": np.where(real, self._token_ids[position], self._padding_id),
            "attention_mask": real,
            "token_type_ids": np.where(real, self._token_types[position], 0),
        }
        return {name: torch.from_numpy(row.astype(np.int64)) for name, row in rows.items()}


def load_text_data(data: DataConfig, *, info: DataInfo, tokenizer: PreTrainedTokenizerFast) -> dict[str, Dataset]:
    """The splits of the dataset that ``data`` names: ``train``, ``eval`` and, of MNLI, ``mismatched``."""
    _check_tokenizer(tokenizer, max_length=data.max_length)
    task = GLUE.get(data.name)
    splits: dict[str, Dataset] = {}
    for split in task.splits if task is not None else ("train", "eval"):
        max_samples = data.max_train_samples if split == "train" else data.max_eval_samples
        if task is not None:
            location = locate(data, default_hub_id=GLUE_HUB_ID)
            texts = read_glue(data.name, location, split=split, max_samples=max_samples)
        else:
            texts = read_table_texts(data, split=split, label_names=info.label_names, max_samples=max_samples)
        splits[split] = TextDataset(
            texts,
            kind="classes" if task is None else task.kind,
            metric_names=("accuracy",) if task is None else task.metrics,
            label_names=info.label_names,
            tokenizer=tokenizer,
            max_length=data.max_length,
        )
    return splits


def _check_tokenizer(tokenizer: PreTrainedTokenizerFast, *, max_length: int) -> None:
    if tokenizer.pad_token_id is None:
        raise UserError(f"model.name: the tokenizer of {tokenizer.name_or_path} has no padding token")
    fewest = tokenizer.num_special_tokens_to_add() + 1
    if max_length < fewest:
        raise UserError(f"data.max_length: {max_length} is not allowed; the model's texts need at least {fewest}")
    if max_length > tokenizer.model_max_length:
        most = tokenizer.model_max_length
        raise UserError(f"data.max_length: {max_length} is not allowed; the model's texts have at most {most}")
