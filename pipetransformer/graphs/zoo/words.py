"""Token ids for models that read text: words of a file or of WikiText, or drawn as words fall."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from pipetransformer.data.reading import one_line
from pipetransformer.errors import UserError

_HUB_ID = "Salesforce/wikitext"
WIKITEXT = {"wikitext2": "wikitext-2-raw-v1", "wikitext103": "wikitext-103-raw-v1"}
"""By name on the command line, the raw texts of Merity et al., arXiv 1609.07843, as the hub has them."""


def file_words(path: Path, *, num_words: int) -> list[str]:
    """The first words of a text file. Raises UserError."""
    try:
        words = path.read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UserError(f"--train-data-file: {path} cannot be read ({reason}); give a text file") from error
    return _first(words, num_words, source=f"--train-data-file: {path}")


def wikitext_words(name: str, *, num_words: int) -> list[str]:
    """The first training words of one of ``WIKITEXT``, from the hub or its local cache. Raises UserError."""
    import datasets  # costs a second

    try:
        rows = datasets.load_dataset(_HUB_ID, WIKITEXT[name], split="train")
    except Exception as error:  # three libraries raise here, each with exceptions of its own
        raise UserError(
            f"--dataset: {name} is neither in the local cache nor loaded from the hub ({type(error).__name__}: "
            f"{one_line(error)}); give its text as --train-data-file"
        ) from error
    words: list[str] = []
    for row in rows:
        words += row["text"].split()
        if len(words) >= num_words:
            break
    return _first(words, num_words, source=f"--dataset: {name}")


def _first(words: list[str], num_words: int, *, source: str) -> list[str]:
    if len(words) < num_words:
        raise UserError(f"{source} has {len(words)} words; {num_words} are needed")
    return words[:num_words]


def token_ids(words: Sequence[str], *, batch_size: int, vocabulary_size: int) -> Tensor:
    """Ids [batch_size, len(words) / batch_size]: 0 is the most frequent word, the last id all rare ones."""
    ranks = {word: rank for rank, (word, _) in enumerate(Counter(words).most_common(vocabulary_size - 1))}
    return torch.tensor([ranks.get(word, vocabulary_size - 1) for word in words]).reshape(batch_size, -1)


def zipf_ids(batch_size: int, length: int, *, vocabulary_size: int) -> Tensor:
    """Ids [batch_size, length], each as frequent as the word of that rank by Zipf's law."""
    weights = 1.0 / torch.arange(1, vocabulary_size + 1)
    random = torch.Generator().manual_seed(0)
    return torch.multinomial(weights, batch_size * length, replacement=True, generator=random).reshape(
        batch_size, length
    )
