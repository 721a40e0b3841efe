"""Token ids of a whole split in one ragged array, padded a batch at a time."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch

from pipetransformer.data.batches import bucket_edges
from pipetransformer.data.dataset import Dataset
from pipetransformer.data.prepared import Lead, Prepared, prepared
from pipetransformer.data.reader import TokenReader
from pipetransformer.data.reading import Extent
from pipetransformer.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Samples = TypeVar("Samples")


class TokenDataset(Dataset):
    """Tokenized texts: the ids of all samples end to end, and where each begins.

    Args:
        source: arrays ``num_tokens`` int64 [samples], ``token_ids`` int32 and ``token_types`` int8 [all tokens],
            ``labels``, ``extent``.
    """

    num_tokens: np.ndarray

    def __init__(self, source: Prepared, reader: TokenReader, tokenizer: PreTrainedTokenizerFast) -> None:
        self.kind, self.metric_names = reader.data.kind, reader.metrics
        max_length, self._padding_id = reader.data.max_length, int(tokenizer.pad_token_id)
        arrays = source.arrays
        # Of what a checkpoint or a cache depends on: inputs, padding and labels.
        self.fingerprint = hashlib.sha256(repr((source.digest, self._padding_id, max_length)).encode()).hexdigest()
        self.labels = torch.from_numpy(arrays["labels"].copy())
        self.extent = Extent(*arrays["extent"].tolist())
        self.num_tokens = np.array(arrays["num_tokens"])
        self.lengths = bucket_edges(self.num_tokens, max_length=max_length)
        self._starts = np.concatenate([[0], np.cumsum(self.num_tokens)[:-1]])
        self._token_ids, self._token_types = arrays["token_ids"], arrays["token_types"]

    def inputs(
        self, ids: np.ndarray, *, length: int, epoch: int | None, keys: Collection[str] | None = None
    ) -> dict[str, torch.Tensor]:
        num_tokens = self.num_tokens[ids]
        assert num_tokens.max(initial=0) <= length, (num_tokens.max(initial=0), length)
        column = np.arange(length)
        real = column < num_tokens[:, None]
        rows = {"attention_mask": real}
        if keys is None or not {"input_ids", "token_type_ids"}.isdisjoint(keys):
            position = np.where(real, self._starts[ids, None] + column, 0)
            rows["input_ids"] = np.where(real, self._token_ids[position], self._padding_id)
            rows["token_type_ids"] = np.where(real, self._token_types[position], 0)
        wanted = rows if keys is None else keys
        return {name: torch.from_numpy(rows[name].astype(np.int64)) for name in wanted}


def ragged(token_ids: Sequence[Sequence[int]], token_types: Sequence[Sequence[int]]) -> dict[str, np.ndarray]:
    """The arrays of a ``TokenDataset`` but its labels, from what a tokenizer gives."""
    num_tokens = np.fromiter(map(len, token_ids), np.int64, len(token_ids))
    total = int(num_tokens.sum())
    return {
        "num_tokens": num_tokens,
        "token_ids": np.fromiter(chain.from_iterable(token_ids), np.int32, total),
        "token_types": np.fromiter(chain.from_iterable(token_types), np.int8, total),
    }


def token_arrays(
    kind: str,
    reader: TokenReader,
    split: str,
    *,
    read: Callable[[], Samples],
    content: Callable[[Samples], str],
    build: Callable[[Samples], Mapping[str, np.ndarray]],
    tokenizer: PreTrainedTokenizerFast,
    settings: tuple[object, ...],
    lead: Lead,
) -> Prepared:
    """The arrays that ``build`` makes of what ``read`` gives, made once per node.

    Args:
        content: what the arrays depend on of samples from the hub, which may change under their id.
        settings: what they depend on beside the samples and the tokenizer.
    """
    read = cache(read)

    def key() -> object:
        source = reader.digest(split)
        return (kind, content(read()) if source is None else source, _identity(tokenizer), *settings)

    return prepared(key, lambda: build(read()), lead=lead)


def _identity(tokenizer: PreTrainedTokenizerFast) -> str:
    """All that a fast tokenizer's results depend on, without the state that its last call left in it."""
    settings = json.loads(tokenizer.backend_tokenizer.to_str())
    del settings["truncation"], settings["padding"]
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def check_tokenizer(tokenizer: PreTrainedTokenizerFast, *, max_length: int) -> None:
    """Refuses a tokenizer that is slow or cannot pad, or a length that leaves no room for a text. Raises UserError."""
    if not tokenizer.is_fast:
        raise UserError(
            f"model.name: {tokenizer.name_or_path} has a tokenizer ({type(tokenizer).__name__}) that is not one of the "
            "tokenizers library; use a model with a tokenizer.json"
        )
    if tokenizer.pad_token_id is None:
        raise UserError(f"model.name: the tokenizer of {tokenizer.name_or_path} has no padding token")
    fewest = tokenizer.num_special_tokens_to_add() + 1
    if max_length < fewest:
        raise UserError(f"data.max_length: {max_length} is not allowed; the model's texts need at least {fewest}")
    if max_length > tokenizer.model_max_length:
        most = tokenizer.model_max_length
        raise UserError(f"data.max_length: {max_length} is not allowed; the model's texts have at most {most}")
