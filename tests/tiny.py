"""Tiny models and texts, made on the spot in the formats that the real ones come in."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import BertTokenizerFast

__all__ = ["tiny_bert", "tiny_squad", "tiny_sst2", "tiny_stsb", "tiny_text_model", "tiny_tokenizer"]

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
        grown(BertForSequenceClassification(config)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def tiny_text_model(folder: Path, family: str, *, layers: int = 6) -> Path:
    """Saves a random ``family`` ("Roberta", "GPT2"; with "-qa" a reader) with the tokenizer of ``tiny_bert``."""
    import torch
    import transformers

    family, _, qa = family.partition("-")
    tokenizer = tiny_tokenizer()
    sizes: dict[str, Any] = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    if family == "DistilBert":
        sizes |= {"dim": 16, "hidden_dim": 64, "n_layers": layers, "n_heads": 2}
    elif family == "GPT2":
        sizes |= {"n_embd": 16, "n_layer": layers, "n_head": 2, "n_positions": 128}
    else:
        sizes |= {"hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": layers, "num_attention_heads": 4}
        sizes |= {"max_position_embeddings": 140}
        sizes |= {"embedding_size": 8} if family == "Electra" else {}
        sizes |= {"num_key_value_heads": 2} if family in ("Llama", "Mistral", "Qwen2", "Qwen3") else {}
        sizes |= {"head_dim": 4} if family == "Qwen3" else {}
        sizes |= {"vocab_size": len(tokenizer) + 4} if family.startswith("Qwen") else {}  # their tokenizers add some
        sizes |= {"ffn_dim": 64, "word_embed_proj_dim": 8} if family == "OPT" else {}
        sizes |= {"local_attention": 8, "global_attn_every_n_layers": 2} if family == "ModernBert" else {}
    config = getattr(transformers, f"{family}Config")(**sizes)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        task = "QuestionAnswering" if qa else "SequenceClassification"
        grown(getattr(transformers, f"{family}For{task}")(config)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def grown(network: Any) -> Any:
    """``network`` with biases and norms of the size that they have in a trained model, instead of zeros and ones.

    A bias that starts at zero is, after a few steps, nothing but a sum of gradients that cancel: the key bias, whose
    true gradient is zero, would be rounding noise.
    """
    import torch

    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.ndim <= 1:
                parameter += 0.1 * torch.randn_like(parameter)
    return network


def tiny_squad(folder: Path, num_questions: int, *, num_eval_questions: int, seed: int = 0) -> Path:
    """Writes train-v1.1.json and dev-v1.1.json; every answer is a span of words of its context."""
    folder.mkdir(parents=True, exist_ok=True)
    draws = random.Random(seed)
    for split, count in (("train", num_questions), ("dev", num_eval_questions)):
        paragraphs = []
        for number in range(count):
            context = " ".join(_sentence(draws, label=draws.randrange(2)) for _ in range(draws.randint(1, 3)))
            words = context.split()
            first = draws.randrange(len(words))
            answer = " ".join(words[first : first + draws.randint(1, 3)])
            start = len(" ".join([*words[:first], ""]))
            answers = [{"text": answer, "answer_start": start}]
            question = {"id": f"{split}{number}", "question": f"{draws.choice(_SUBJECTS)} is", "answers": answers}
            paragraphs.append({"context": context, "qas": [question]})
        content = {"version": "1.1", "data": [{"title": split, "paragraphs": paragraphs}]}
        (folder / f"{split}-v1.1.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def tiny_stsb(folder: Path, num_pairs: int, *, num_eval_pairs: int, seed: int = 0) -> Path:
    """Writes train.tsv and dev.tsv as GLUE's STS-B: pairs of sentences with a score from 0 to 5."""
    folder.mkdir(parents=True, exist_ok=True)
    draws = random.Random(seed)
    header = "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore\n"
    for split, count in (("train", num_pairs), ("dev", num_eval_pairs)):
        rows = []
        for index in range(count):
            pair = "\t".join(_sentence(draws, label=draws.randrange(2)) for _ in range(2))
            rows.append(f"{index}\tg\tf\t2020\t0\ts\ts\t{pair}\t{draws.uniform(0, 5):.3f}\n")
        (folder / f"{split}.tsv").write_text(header + "".join(rows), encoding="utf-8")
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
