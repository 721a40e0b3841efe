"""Token ids for models that read text: words or tokens of a file or of WikiText, or drawn as words fall."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipetransformer.data.reading import one_line
from pipetransformer.errors import UserError

_HUB_ID = "Salesforce/wikitext"
WIKITEXT = {"wikitext2": "wikitext-2-raw-v1", "wikitext103": "wikitext-103-raw-v1"}
"""By name on the command line, the raw texts of Merity et al., arXiv 1609.07843, as the hub has them."""


Read = Callable[..., str]
"""A text, given ``num_words``: its first lines, up to that many words where there are as many."""


def file_text(path: Path, *, num_words: int) -> str:
    """The first lines of a text file, up to that many words where there are as many. Raises UserError."""
    try:
        with path.open(encoding="utf-8") as file:
            return _first_lines(file, num_words)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UserError(f"--train-data-file: {path} cannot be read ({reason}); give a text file") from error


def wikitext_text(name: str, *, num_words: int) -> str:
    """The first training texts of one of ``WIKITEXT``, up to that many words, from the hub or its local cache.

    Raises UserError.
    """
    import datasets  # costs a second

    try:
        rows = datasets.load_dataset(_HUB_ID, WIKITEXT[name], split="train")
    except Exception as error:  # three libraries raise here, each with exceptions of its own
        raise UserError(
            f"--dataset: {name} is neither in the local cache nor loaded from the hub ({type(error).__name__}: "
            f"{one_line(error)}); give its text as --train-data-file"
        ) from error
    return _first_lines((row["text"] for row in rows), num_words)


def _first_lines(lines: Iterable[str], num_words: int) -> str:
    taken: list[str] = []
    for line in lines:
        taken.append(line)
        num_words -= len(line.split())
        if num_words <= 0:
            break
    return "".join(taken)


def word_ids(read: Read, *, batch_size: int, length: int, vocabulary_size: int, source: str) -> Tensor:
    """Ids [batch_size, length] of the first words: 0 is the most frequent one, the last id all rare ones.

    Raises:
        UserError: there are fewer; begins with ``source``.
    """
    words = read(num_words=batch_size * length).split()[: batch_size * length]
    _check_enough(len(words), batch_size * length, source=source, kind="words")
    ranks = {word: rank for rank, (word, _) in enumerate(Counter(words).most_common(vocabulary_size - 1))}
    return torch.tensor([ranks.get(word, vocabulary_size - 1) for word in words]).reshape(batch_size, length)


def tokenizer_ids(
    read: Read, *, folder: Path, batch_size: int, length: int, vocabulary_size: int, source: str
) -> Tensor:
    """Ids [batch_size, length] of the first tokens, by the tokenizer that ``folder`` holds, without special tokens.

    Raises:
        UserError: there is no tokenizer, there are fewer tokens, or ids beyond the vocabulary.
    """
    tokenizer, needed = _tokenizer(folder), batch_size * length
    ids, text, num_words = list[int](), "", needed
    while len(ids) < needed and len(more := read(num_words=num_words)) > len(text):
        ids = tokenizer(more, add_special_tokens=False, verbose=False)["input_ids"][:needed]
        text, num_words = more, 2 * num_words  # some words have no token
    _check_enough(len(ids), needed, source=source, kind="tokens")
    if max(ids) >= vocabulary_size:
        raise UserError(
            f"--tokenizer: {folder} gives id {max(ids)} and the model reads ids below {vocabulary_size}; give the "
            "tokenizer that belongs to the model"
        )
    return torch.tensor(ids).reshape(batch_size, length)


def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer  # costs seconds

    if not folder.is_dir():  # else it would be sought on the hub
        raise UserError(f"--tokenizer: {folder} is no folder; give one that a tokenizer's save_pretrained wrote")
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # of the files' parsers too
        raise UserError(
            f"--tokenizer: {folder} holds no tokenizer ({one_line(error)}); give a folder that a tokenizer's "
            "save_pretrained wrote"
        ) from error


def _check_enough(found: int, needed: int, *, source: str, kind: str) -> None:
    if found < needed:
        raise UserError(f"{source} has {found} {kind}; {needed} are needed")


def zipf_ids(batch_size: int, length: int, *, vocabulary_size: int) -> Tensor:
    """Ids [batch_size, length], each as frequent as the word of that rank by Zipf's law."""
    weights = 1.0 / torch.arange(1, vocabulary_size + 1)
    random = torch.Generator().manual_seed(0)
    return torch.multinomial(weights, batch_size * length, replacement=True, generator=random).reshape(
        batch_size, length
    )
