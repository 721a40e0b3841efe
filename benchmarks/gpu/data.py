"""Data and a reader's folder that the script makes itself: no network, no files of the user."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

__all__ = ["write_reader", "write_questions"]

_WORDS = [f"w{number}" for number in range(2000)]
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def write_reader(folder: Path, **sizes: int) -> Path:
    """The configuration of a BERT of these sizes, and a tokenizer that knows words alone; no weights. Returns it."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate([*_SPECIAL, *_WORDS, "?"])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])],
    )
    named = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, model_input_names=["input_ids", "token_type_ids", "attention_mask"], **named
    )
    folder.mkdir(parents=True, exist_ok=True)
    BertConfig(vocab_size=len(vocabulary), pad_token_id=0, **sizes).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_questions(folder: Path, *, num_train: int, num_words: int) -> Path:
    """SQuAD's files with contexts of so many random words; each answer is one of them. Returns the folder."""
    random = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    for name, number in (("train", num_train), ("dev", 4)):
        paragraphs = []
        for index in range(number):
            words = [_WORDS[i] for i in random.integers(0, len(_WORDS), num_words)]
            at = int(random.integers(0, num_words))
            answer = {"text": words[at], "answer_start": sum(len(word) + 1 for word in words[:at])}
            entry = {"id": f"{name}-{index}", "question": f"{words[at]} ?", "answers": [answer]}
            paragraphs.append({"context": " ".join(words), "qas": [entry]})
        text = json.dumps({"version": "1.1", "data": [{"title": "made", "paragraphs": paragraphs}]})
        (folder / f"{name}-v1.1.json").write_text(text, encoding="utf-8")
    return folder
