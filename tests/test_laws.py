"""The yardstick of the laws: what it must not let pass."""

from __future__ import annotations

import math

import numpy as np
import pytest
from laws import deviation, gradient_deviation

ONES = {"a": np.ones(2), "b": np.ones(2)}


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("bad", ["ours", "theirs"])
def test_what_is_not_finite_is_no_agreement(bad: str, value: float) -> None:
    broken = {**ONES, "b": np.array([1.0, value])}
    ours, theirs = (broken, ONES) if bad == "ours" else (ONES, broken)
    with pytest.raises(AssertionError, match="not finite"):
        deviation(ours, theirs)
    with pytest.raises(AssertionError, match="not finite"):
        gradient_deviation([{0: ours}], {0: theirs})


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_each_tensor_is_compared_on_its_own_scale(scale: float) -> None:
    theirs = {**ONES, "b": np.array([scale, 0.0])}
    assert deviation({**ONES, "b": np.array([scale, 1e-3 * scale])}, theirs) == pytest.approx(1e-3)
    assert deviation(theirs, theirs) == 0.0


def test_a_tensor_of_zeros_stays_one() -> None:
    assert deviation({"a": np.full(2, 1e-3)}, {"a": np.zeros(2)}) == 1e-3


def test_replicas_that_differ_and_parameters_that_are_missing_are_found() -> None:
    theirs = {0: {"a": np.ones(2), "b": np.full(2, 4.0)}}
    assert gradient_deviation([{0: {"a": np.ones(2)}}, {0: {"b": np.full(2, 5.0)}}], theirs) == 0.25
    assert gradient_deviation([theirs, {0: {"a": np.full(2, 3.0)}}], theirs) == 0.5
    with pytest.raises(AssertionError, match="b"):
        gradient_deviation([{0: {"a": np.ones(2)}}], theirs)
