"""Question answering: questions cut into overlapping windows, answers put together again.

A question and its context make as many windows as the context needs; each window is a sample of its own. An answer is
the best span over all windows of its question.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from pipetransformer.data.dataset import Dataset
from pipetransformer.data.prepared import Lead, Prepared, alone
from pipetransformer.data.reader import QuestionReader, reader_of
from pipetransformer.data.reading import Extent, Question, drawn
from pipetransformer.data.tokens import TokenDataset, check_tokenizer, ragged, token_arrays
from pipetransformer.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from pipetransformer.config import DataConfig


_MOST_CANDIDATES = 20
_MOST_TOKENS = 30
_NEAR = 10  # characters


class SquadDataset(TokenDataset):
    """Windows as samples.

    Args:
        source: the arrays of a ``TokenDataset``; ``question`` int64 [windows], the question that each window is of; and
            ``offsets`` int32 [all tokens, 2], first and last character (exclusive) of the context, -1 outside of it.
        read: gives the questions; called when answers are first put together, on the rank that does it.

    Attributes:
        predictions: the answer to every question by its id, after ``measure``.
    """

    def __init__(
        self,
        source: Prepared,
        reader: QuestionReader,
        tokenizer: PreTrainedTokenizerFast,
        *,
        read: Callable[[], Asked],
    ) -> None:
        super().__init__(source, reader, tokenizer)
        self._question, self._offsets = source.arrays["question"], source.arrays["offsets"]
        self._read = cache(lambda: read().questions)
        self.groups = self._question

    def predict(self, ids: np.ndarray, outputs: np.ndarray) -> np.ndarray:
        """The ``best_span`` of each window, float64 [len(ids), 3].

        Args:
            outputs: logits of first and last token [len(ids), padded length, 2].
        """
        stops = self._starts[ids] + self.num_tokens[ids]
        offsets = (self._offsets[start:stop] for start, stop in zip(self._starts[ids], stops, strict=True))
        return np.array([best_span(logits, own) for logits, own in zip(outputs, offsets)], dtype=np.float64)

    def measure(self, predictions: np.ndarray) -> dict[str, float]:
        """Official exact match and F1, in per cent, by torchmetrics.

        Args:
            predictions: of every window.
        """
        from torchmetrics.functional.text import squad

        questions, best = self._read(), np.full(len(self._read()), -np.inf)
        answers = [""] * len(questions)
        for question_number, (score, first, stop) in zip(self._question.tolist(), predictions.tolist(), strict=True):
            if score > best[question_number]:
                best[question_number] = score
                answers[question_number] = questions[question_number].context[int(first) : int(stop)]
        self.predictions = {question.id: answer for question, answer in zip(questions, answers, strict=True)}
        told: list[Any] = [{"prediction_text": text, "id": id_} for id_, text in self.predictions.items()]
        wanted: list[Any] = []
        for question in questions:
            texts, starts = zip(*question.answers)
            wanted.append({"id": question.id, "answers": {"text": list(texts), "answer_start": list(starts)}})
        scores = squad(told, wanted)
        return {name: float(scores[name]) for name in self.metric_names}


def best_span(logits: np.ndarray, offsets: np.ndarray) -> tuple[float, int, int]:
    """The span of a window's context whose first and last token have the largest summed logits.

    Of the 20 likeliest first and last tokens, spans of at most 30 tokens count (as is usual, after Devlin et al., arXiv
    1810.04805).

    Args:
        logits: of first and last token [at least tokens, 2].
        offsets: characters of the context by token [tokens, 2].

    Returns:
        The sum, -inf where there is no such span; its first character, and the one behind its last.
    """
    inside = offsets[:, 0] >= 0
    scores = np.where(inside[:, None], logits[: len(offsets)], -np.inf)
    first, last = (np.argsort(-scores[:, side], kind="stable")[:_MOST_CANDIDATES] for side in (0, 1))
    span = last[None, :] - first[:, None]
    total = scores[first, 0][:, None] + scores[last, 1][None, :]
    total = np.where((span >= 0) & (span < _MOST_TOKENS), total, -np.inf)
    row, column = np.unravel_index(int(total.argmax()), total.shape)
    return float(total[row, column]), int(offsets[first[row], 0]), int(offsets[last[column], 1])


def load_squad(data: DataConfig, *, tokenizer: PreTrainedTokenizerFast, lead: Lead = alone) -> dict[str, Dataset]:
    """The splits ``train`` and ``eval``, cut into windows once per node. Samples that are counted are questions."""
    check_tokenizer(tokenizer, max_length=data.max_length)
    if not 0 < data.stride < data.max_length // 2:
        raise UserError(
            f"data.stride: {data.stride} is not allowed; give at least 1 and less than half of data.max_length"
        )
    reader: QuestionReader = reader_of(data)
    splits: dict[str, Dataset] = {}
    for split in reader.splits:
        max_samples = reader.max_samples(split)
        read = partial(read_squad, data, split=split, max_samples=max_samples)
        arrays = token_arrays(
            "squad",
            reader,
            split,
            read=read,
            content=repr,
            build=lambda asked: {
                **_windows(asked.questions, tokenizer, max_length=data.max_length, stride=data.stride),
                "extent": np.array(asked.extent),
            },
            tokenizer=tokenizer,
            settings=(data.max_length, data.stride, max_samples),
            lead=lead,
        )
        splits[split] = SquadDataset(arrays, reader, tokenizer, read=read)
        splits[split].place = reader.place(split)
    return splits


@dataclass(frozen=True, slots=True)
class Asked:
    """The questions of a split that can be used, and how much of it they are."""

    questions: list[Question]
    extent: Extent


def read_squad(data: DataConfig, *, split: str, max_samples: int | None) -> Asked:
    """The questions of a split, or ``max_samples`` drawn from them.

    An answer that is off by a few characters is moved; one that is further off is left out, and so is a question
    without any other.

    Raises:
        UserError: naming the file and the question.
    """
    reader: QuestionReader = reader_of(data)
    found, source = list(reader.read(split)), reader.place(split)
    questions, names, mended, astray = list[Question](), set[str](), 0, list[str]()
    for question in (found[row] for row in drawn(len(found), max_samples=max_samples)):
        if not question.answers:
            raise UserError(f"{source}: question {question.id} has no answer; give SQuAD 1.1, where each has one")
        if question.id in names:
            raise UserError(f"{source}: two questions have the id {question.id}; give each its own")
        names.add(question.id)
        placed = (_placed(*answer, context=question.context) for answer in question.answers)
        if answers := tuple(answer for answer in placed if answer is not None):
            questions.append(replace(question, answers=answers))
            mended += answers != question.answers
        else:
            astray.append(question.id)
    if astray and not questions:
        text, start = next(question for question in found if question.id == astray[0]).answers[0]
        raise UserError(
            f"{source}: question {astray[0]}: the answer {text!r} is not at character {start} of its context, nor "
            f"within {_NEAR} of it, and so with all others; mend them"
        )
    if not questions:
        raise UserError(f"{source}: holds no questions; at least 1 is needed")
    return Asked(questions, Extent(len(questions), len(found), left_out=len(astray), mended=mended))


def _placed(text: str, start: int, *, context: str) -> tuple[str, int] | None:
    """An answer with the place in its context that is nearest to the given one, for files of others count their
    characters otherwise, and are off by a few; None where it stands nowhere near."""
    first = max(0, start - _NEAR)
    near = context[first : start + len(text) + _NEAR]
    places = [first + found.start() for found in re.finditer(f"(?={re.escape(text)})", near)] if text else []
    return (text, min(places, key=lambda place: abs(place - start))) if places else None


def _windows(
    questions: Sequence[Question], tokenizer: PreTrainedTokenizerFast, *, max_length: int, stride: int
) -> dict[str, np.ndarray]:
    """The windows of all questions. A window without the whole answer is labelled with its first token, twice."""
    asked = [question.question.lstrip() for question in questions]
    by_themselves = tokenizer(asked, add_special_tokens=False, return_attention_mask=False)["input_ids"]
    least = max(map(len, by_themselves)) + tokenizer.num_special_tokens_to_add(pair=True) + stride + 1
    if max_length < least:  # the tokenizer itself would panic
        raise UserError(
            f"data.max_length: {max_length} leaves no room for a context behind the longest question; "
            f"give at least {least}, or a smaller data.stride"
        )
    encoded = tokenizer(
        asked,
        [question.context for question in questions],
        truncation="only_second",
        max_length=max_length,
        stride=stride,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
        return_token_type_ids=True,
        return_attention_mask=False,
    )
    of_question = np.array(encoded["overflow_to_sample_mapping"], dtype=np.int64)
    labels = np.zeros((len(of_question), 2), dtype=np.int64)
    offsets = []
    for window, question in enumerate(of_question.tolist()):
        table = np.array(encoded["offset_mapping"][window], dtype=np.int32)
        part = np.array([-1 if s is None else s for s in encoded.sequence_ids(window)])
        table[part != 1] = -1
        text, start = questions[question].answers[0]
        labels[window] = _label(table, start, start + len(text))
        offsets.append(table)
    return {
        **ragged(encoded["input_ids"], encoded["token_type_ids"]),
        "labels": labels,
        "question": of_question,
        "offsets": np.concatenate(offsets),
    }


def _label(offsets: np.ndarray, start: int, stop: int) -> tuple[int, int]:
    """First and last token of characters start .. stop - 1; (0, 0) where the window does not hold them all."""
    inside = np.flatnonzero(offsets[:, 0] >= 0)
    if not len(inside) or offsets[inside[0], 0] > start or offsets[inside[-1], 1] < stop:
        return 0, 0
    first = inside[np.searchsorted(offsets[inside, 0], start, side="right") - 1]
    last = inside[np.searchsorted(offsets[inside, 1], stop, side="left")]
    return int(first), int(last)
