"""The embedded demo texts: reviews and questions of a small grammar of our own, and a tokenizer trained on them.

A review is positive or negative as its main clause is: "although the plot is dull , the cast seems never tired" is
positive. A question asks for one of the facts that its context tells of some people, some of them of the same kind.
Nothing is read from a file or the network; a split is always the same.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from functools import cache

import numpy as np

from pipetransformer.data.reader import QuestionReader, TextReader
from pipetransformer.data.reading import Question, Texts, refuse_path

_NUM_SAMPLES = {"train": 4000, "eval": 800}

_SUBJECTS = (
    *("the plot", "the cast", "this story", "the music", "every scene", "the ending", "its humour", "the dialogue"),
    *("the camera work", "the director", "the first act", "the long middle part", "the leading lady", "its hero"),
)
_VERBS = ("is", "seems", "feels", "remains", "looks")
_DEGREES = ("", "", "very", "rather", "truly", "a little", "quite")
_DENIALS = ("", "", "not", "never", "hardly")
_MOODS = (
    ("dull", "weak", "clumsy", "tired", "empty", "noisy", "stale", "tedious", "careless", "hollow"),
    ("warm", "bright", "funny", "moving", "clever", "fresh", "graceful", "tender", "daring", "honest"),
)

_PEOPLE = ("anna", "boris", "clara", "david", "emil", "freya", "george", "hanna", "ivan", "julia", "karl", "lena")
_CITIES = ("oslo", "lisbon", "vienna", "prague", "dublin", "athens", "riga", "turin", "ghent", "porto", "bern", "lyon")
_FACTS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (
        "{who} lives in {what} .",
        "where does {who} live ?",
        tuple(f"{place}{city}" for place in ("", "a village near ", "the old town of ") for city in _CITIES),
    ),
    (
        "{who} works as a {what} .",
        "what is the job of {who} ?",
        ("baker", "pilot", "nurse", "welder", "teacher", "night watchman", "tax lawyer", "ship builder"),
    ),
    (
        "{who} keeps a {what} .",
        "which animal does {who} keep ?",
        tuple(f"{colour} {animal}" for colour in ("grey", "black", "white") for animal in ("cat", "dog", "owl")),
    ),
    (
        "{who} plays the {what} .",
        "which instrument does {who} play ?",
        ("violin", "cello", "flute", "drums", "church organ", "bass guitar"),
    ),
    (
        "in the morning {who} drinks {what} .",
        "what does {who} drink in the morning ?",
        ("black tea", "coffee", "hot milk", "cold water", "apple juice"),
    ),
)


class DemoTextReader(TextReader):
    names = ("negative", "positive")

    def read(self, split: str, *, label_names: tuple[str, ...]) -> Texts:
        refuse_path(self.data)
        return demo_reviews(split)

    def tokenizer(self) -> str:
        return demo_tokenizer(demo_reviews("train").first)


class DemoQuestionReader(QuestionReader):
    def read(self, split: str) -> list[Question]:
        refuse_path(self.data)
        return demo_questions(split)

    def tokenizer(self) -> str:
        return demo_tokenizer(f"{q.question} {q.context}" for q in demo_questions("train"))


def demo_reviews(split: str) -> Texts:
    """4,000 reviews to train on or 800 others to evaluate on, negative (0) or positive (1)."""
    first = _NUM_SAMPLES["train"]
    reviews = _reviews()[:first] if split == "train" else _reviews()[first:]
    return Texts(np.array([label for _, label in reviews], dtype=np.int64), [text for text, _ in reviews])


@cache
def _reviews() -> tuple[tuple[str, int], ...]:
    """Both splits in a row, no sentence twice."""
    draws, found = random.Random(0), dict[str, int]()
    while len(found) < sum(_NUM_SAMPLES.values()):
        label = draws.randrange(2)
        main = _clause(draws, label)
        text = draws.choice(
            (
                f"{main} .",
                f"{_clause(draws, draws.randrange(2))} , but {main} .",
                f"although {_clause(draws, draws.randrange(2))} , {main} .",
                f"{main} , even if {_clause(draws, draws.randrange(2))} .",
            )
        )
        found.setdefault(text, label)
    return tuple(found.items())


def _clause(draws: random.Random, label: int) -> str:
    denial = draws.choice(_DENIALS)
    mood = _MOODS[label if not denial else 1 - label]
    words = (draws.choice(_SUBJECTS), draws.choice(_VERBS), denial, draws.choice(_DEGREES), draws.choice(mood))
    return " ".join(word for word in words if word)


def demo_questions(split: str) -> list[Question]:
    """4,000 questions to train on or 800 others to evaluate on, each with one answer in a context of its own."""
    draws = random.Random(split)
    return [_question(draws, f"{split}-{number}") for number in range(_NUM_SAMPLES[split])]


def _question(draws: random.Random, name: str) -> Question:
    """One to three people, two to three facts of each, in any order."""
    people = draws.sample(_PEOPLE, draws.randint(1, 3))
    told = [(who, *fact) for who in people for fact in draws.sample(_FACTS, draws.randint(2, 3))]
    draws.shuffle(told)
    asked = draws.randrange(len(told))
    values = [draws.choice(known) for *_, known in told]
    sentences = [statement.format(who=who, what=what) for (who, statement, *_), what in zip(told, values)]
    who, statement, question, _ = told[asked]
    before, _, _ = statement.format(who=who, what="\0").partition("\0")
    start = len(" ".join([*sentences[:asked], before]))
    return Question(name, question.format(who=who), " ".join(sentences), ((values[asked], start),))


def demo_tokenizer(texts: Iterable[str]) -> str:
    """A tokenizer with BERT's special tokens that knows every word of ``texts``, as JSON of the tokenizers library.

    Whole words, because training on pieces of words does not give the same tokenizer in every process.
    """
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.train_from_iterator(texts, trainers.WordLevelTrainer(special_tokens=special, show_progress=False))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, special.index(token)) for token in ("[CLS]", "[SEP]")],
    )
    return str(tokenizer.to_str())
