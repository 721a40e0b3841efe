"""Metrics of GLUE and image classification, from a model's predictions for all samples, by scikit-learn and scipy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np


def _accuracy(classes: np.ndarray, labels: np.ndarray) -> float:
    return float((classes == labels).mean())


def _of_classes(name: str, classes: np.ndarray, labels: np.ndarray, **settings: object) -> float:
    from sklearn import metrics

    return float(getattr(metrics, name)(labels, classes, **settings))


def _of_numbers(name: str, scores: np.ndarray, labels: np.ndarray) -> float:
    from sklearn import metrics

    return float(getattr(metrics, name)(labels, scores)) if len(labels) > 1 else 0.0


def _correlation(name: str, scores: np.ndarray, labels: np.ndarray) -> float:
    """0 for a model that says the same of every sample: it correlates with nothing."""
    from scipy import stats

    vary = np.ptp(scores) > 0 and np.ptp(labels) > 0
    return float(getattr(stats, name)(scores, labels).statistic) if vary else 0.0


METRICS: Mapping[str, Callable[[np.ndarray, np.ndarray], float]] = {
    "accuracy": _accuracy,
    "f1": partial(_of_classes, "f1_score", zero_division=0.0),
    "micro_f1": partial(_of_classes, "f1_score", zero_division=0.0, average="micro"),
    "macro_f1": partial(_of_classes, "f1_score", zero_division=0.0, average="macro"),
    "matthews_correlation": partial(_of_classes, "matthews_corrcoef"),
    "subset_accuracy": lambda told, labels: float((told == labels).all(axis=1).mean()),
    "r2": partial(_of_numbers, "r2_score"),
    "pearson": partial(_correlation, "pearsonr"),
    "spearman": partial(_correlation, "spearmanr"),
}
"""``(classes or scores [samples], labels [samples]) -> figure``, or both [samples, labels] of several labels each;
``f1`` is that of class 1 of two, ``macro_f1`` of all classes their mean, ``micro_f1`` that of all labels together,
``subset_accuracy`` the share of samples with all labels right."""
