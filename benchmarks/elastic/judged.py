"""Whether a row is as good as the one without freezing: by paired differences, seed by seed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import mean, stdev

from scipy.stats import t as student

__all__ = ["half_interval", "is_as_good"]

_MOST_LOST, _LARGEST_ERROR = 0.003, 0.002  # of an accuracy


def half_interval(values: Sequence[float], *, level: float = 0.95) -> float | None:
    """Half of the confidence interval of the mean (Student's t); None for a single value."""
    if len(values) < 2:
        return None
    return float(student.ppf((1 + level) / 2, len(values) - 1)) * _error(values)


def is_as_good(differences: Sequence[float]) -> bool | None:
    """No, where the upper end of the 90 % interval of the mean difference lies below 0, or the mean below -0.3 points
    with a standard error of at most 0.2; None for fewer than two.

    Args:
        differences: accuracy less that of the run of the same seed without freezing.
    """
    half = half_interval(differences, level=0.9)
    if half is None:
        return None
    middle = mean(differences)
    return middle + half >= 0 and not (middle < -_MOST_LOST and _error(differences) <= _LARGEST_ERROR)


def _error(values: Sequence[float]) -> float:
    """Standard error of the mean."""
    return stdev(values) / math.sqrt(len(values))
