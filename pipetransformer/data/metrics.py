"""Metrics of GLUE and image classification, from a model's outputs for all samples, by scikit-learn and scipy."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np


def _accuracy(outputs: np.ndarray, labels: np.ndarray) -> float:
    return float((outputs.argmax(axis=1) == labels).mean())


def _f1(outputs: np.ndarray, labels: np.ndarray) -> float:
    from sklearn.metrics import f1_score

    return float(f1_score(labels, outputs.argmax(axis=1), zero_division=0.0))


def _matthews(outputs: np.ndarray, labels: np.ndarray) -> float:
    from sklearn.metrics import matthews_corrcoef

    return float(matthews_corrcoef(labels, outputs.argmax(axis=1)))


def _pearson(outputs: np.ndarray, labels: np.ndarray) -> float:
    from scipy.stats import pearsonr

    return float(pearsonr(outputs[:, 0], labels).statistic) if _vary(outputs, labels) else 0.0


def _spearman(outputs: np.ndarray, labels: np.ndarray) -> float:
    from scipy.stats import spearmanr

    return float(spearmanr(outputs[:, 0], labels).statistic) if _vary(outputs, labels) else 0.0


def _vary(outputs: np.ndarray, labels: np.ndarray) -> bool:
    """A model that says the same of every sample correlates with nothing."""
    return bool(np.ptp(outputs) > 0 and np.ptp(labels) > 0)


METRICS: Mapping[str, Callable[[np.ndarray, np.ndarray], float]] = {
    "accuracy": _accuracy,
    "f1": _f1,
    "matthews_correlation": _matthews,
    "pearson": _pearson,
    "spearman": _spearman,
}
"""``(outputs [samples, classes] or [samples, 1], labels [samples]) -> figure``; ``f1`` is that of class 1 of two."""
