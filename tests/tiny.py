"""Tiny models and texts, made on the spot in the formats that the real ones come in."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import BertTokenizerFast

__all__ = ["tiny_bert", "tiny_sst2", "tiny_tokenizer"]

_SUBJECTS = ("the film", "this story", "its cast", "the plot", "a slow second act", "the director", "every joke")
_VERBS = ("is", "seems", "remains", "feels")
_WORDS = (
    ("dull", "weak", "clumsy", "tired", "bad", "empty"),
    ("warm", "bright", "funny", "moving", "good", "clever"),
)
_DEGREES = ("", "very", "rather", "truly", "never less than")
_JOINTS = ("and", "while", "because", ", although")
_MOST_CLAUSES = 8


def tiny_bert(
    folder: Path, *, layers: int = 4, hidden: int = 16, heads: int = 2, max_positions: int = 128, **settings: Any
) -> Path:
    """Saves a BERT for sequence classification, random but always the same, and its tokenizer; returns ``folder``.

    Args:
        settings: further entries of the model's configuration, such as ``hidden_dropout_prob=0.0``.
    """
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    tokenizer = tiny_tokenizer(max_length=max_positions)
    config = BertConfig(
        vocab_size=len(tokenizer),
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_attention_heads=heads,
        max_position_embeddings=max_positions,
        **settings,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        BertForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def tiny_tokenizer(*, max_length: int = 128) -> BertTokenizerFast:
    """Of all words that ``tiny_sst2`` writes."""
    from transformers import BertTokenizerFast

    phrases = (*_SUBJECTS, *_VERBS, *_WORDS[0], *_WORDS[1], *_DEGREES, *_JOINTS, ".")
    words = sorted({word for phrase in phrases for word in phrase.split()})
    vocabulary = {word: index for index, word in enumerate(("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words))}
    return BertTokenizerFast(vocab=vocabulary, model_max_length=max_length)


def tiny_sst2(folder: Path, num_samples: int, *, num_eval_samples: int | None = None, seed: int = 0) -> Path:
    """Writes train.tsv and dev.tsv as GLUE does, sentences of 4 to some 80 words; returns ``folder``.

    Args:
        num_eval_samples: lines of dev.tsv; None takes a quarter of ``num_samples``, at least 1.
    """
    folder.mkdir(parents=True, exist_ok=True)
    draws = random.Random(seed)
    counts = {"train": num_samples, "dev": max(1, num_samples // 4) if num_eval_samples is None else num_eval_samples}
    for split, count in counts.items():
        labels = [draws.randrange(2) for _ in range(count)]
        lines = [f"{_sentence(draws, label=label)}\t{label}\n" for label in labels]
        (folder / f"{split}.tsv").write_text("".join(["sentence\tlabel\n", *lines]), encoding="utf-8")
    return folder


def _sentence(draws: random.Random, *, label: int) -> str:
    """One to eight clauses of one mood; short ones are more frequent, as in the real data."""
    num_clauses = min(draws.randint(1, _MOST_CLAUSES), draws.randint(1, _MOST_CLAUSES))
    words = []
    for number in range(num_clauses):
        joint = [draws.choice(_JOINTS)] if number else []
        parts = (draws.choice(_SUBJECTS), draws.choice(_VERBS), draws.choice(_DEGREES), draws.choice(_WORDS[label]))
        words += [*joint, *(part for part in parts if part)]
    return " ".join([*words, "."])
