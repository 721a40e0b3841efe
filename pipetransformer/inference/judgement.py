"""How good predictions are: metrics, a table of the classes, and what is taken for what. By scikit-learn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipetransformer.data.metrics import METRICS
from pipetransformer.errors import UserError


@dataclass(frozen=True, slots=True)
class ClassFigures:
    """Figures of one class: of what is called so (precision), of what is so (recall), both (f1), and how often it is
    there."""

    name: str
    precision: float
    recall: float
    f1: float
    count: int


@dataclass(frozen=True, slots=True)
class Judgement:
    """The figures of a set of predictions.

    Attributes:
        metrics: by name.
        classes: a line for each class; none where there are scores.
        confusion: number of samples by true class (rows) and predicted class (columns); empty likewise, and where a
            sample may have several labels.
    """

    metrics: dict[str, float]
    classes: tuple[ClassFigures, ...] = ()
    confusion: tuple[tuple[int, ...], ...] = ()


def judge(predicted: Sequence[str], labels: Sequence[str], names: Sequence[str]) -> Judgement:
    """Of classes.

    Args:
        names: of the classes, in the order of their numbers.

    Raises:
        UserError: for a label that is no class of the model.
    """
    from sklearn import metrics

    if strange := next((label for label in labels if label not in names), None):
        raise UserError(f"label {strange!r}: the model knows {', '.join(names)}")
    precision, recall, f1, count = metrics.precision_recall_fscore_support(
        labels, predicted, labels=list(names), zero_division=0.0
    )
    found = {
        "accuracy": float(metrics.accuracy_score(labels, predicted)),
        "macro_f1": float(np.mean(f1[count > 0])),
        "weighted_f1": float(np.average(f1, weights=count)),
        "matthews_correlation": float(metrics.matthews_corrcoef(labels, predicted)),
    }
    confusion = metrics.confusion_matrix(labels, predicted, labels=list(names))
    columns = zip(names, precision.tolist(), recall.tolist(), f1.tolist(), count.tolist())
    return Judgement(found, tuple(ClassFigures(*row) for row in columns), tuple(map(tuple, confusion.tolist())))


def judge_labels(
    predicted: Sequence[Sequence[str]], labels: Sequence[Sequence[str]], names: Sequence[str]
) -> Judgement:
    """Of samples with any number of labels each.

    Args:
        names: of the labels, in the order of their numbers.

    Raises:
        UserError: for a label that the model does not know.
    """
    from sklearn import metrics

    if strange := next((label for each in labels for label in each if label not in names), None):
        raise UserError(f"label {strange!r}: the model knows {', '.join(names)}")
    told, true = (np.array([[name in each for name in names] for each in rows]) for rows in (predicted, labels))
    columns = metrics.precision_recall_fscore_support(true, told, zero_division=0.0)
    found = {name: METRICS[name](told, true) for name in ("micro_f1", "macro_f1", "subset_accuracy")}
    lines = zip(names, *(column.tolist() for column in columns))
    return Judgement(found, tuple(ClassFigures(*line) for line in lines))


def judge_answers(predicted: Sequence[str], answers: Sequence[str | Sequence[str]]) -> Judgement:
    """Of answers to questions, each beside the right ones: SQuAD's exact match and F1, in per cent, by torchmetrics."""
    from torchmetrics.functional.text import squad

    told: list[Any] = [{"prediction_text": text, "id": str(n)} for n, text in enumerate(predicted)]
    wanted: list[Any] = []
    for number, right in enumerate(answers):
        texts = [right] if isinstance(right, str) else list(right)
        wanted.append({"id": str(number), "answers": {"text": texts, "answer_start": [0] * len(texts)}})
    scores = squad(told, wanted)
    return Judgement({name: float(scores[name]) for name in ("f1", "exact_match")})


def judge_scores(predicted: Sequence[float], labels: Sequence[float]) -> Judgement:
    """Of a regression."""
    told, wanted = np.array(predicted, dtype=np.float64), np.array(labels, dtype=np.float64)
    found = {name: METRICS[name](told, wanted) for name in ("pearson", "spearman", "r2")}
    return Judgement({**found, "mean_absolute_error": float(np.abs(told - wanted).mean())})
