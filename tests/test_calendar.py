"""When something is due, by hand: 5 batches an epoch, 4 epochs."""

from __future__ import annotations

import pytest

from pipetransformer.config import Interval
from pipetransformer.config.calendar import Calendar


def calendar(eval_every: Interval, checkpoint_every: Interval | None) -> Calendar:
    return Calendar(5, 4, eval_every, checkpoint_every)


@pytest.mark.parametrize(
    ("eval_every", "checkpoint_every", "evaluations", "checkpoints"),
    [
        (Interval(1, "epoch"), Interval(2, "epoch"), [5, 10, 15, 20], [5, 10, 15, 20]),
        (Interval(7, "step"), Interval(3, "step"), [7, 14, 20], [3, 5, 6, 9, 10, 12, 15, 18, 20]),
        (Interval(100, "epoch"), None, [20], []),
    ],
)
def test_what_is_due(
    eval_every: Interval, checkpoint_every: Interval | None, evaluations: list[int], checkpoints: list[int]
) -> None:
    dates = calendar(eval_every, checkpoint_every)
    steps = range(1, dates.total_steps + 1)
    assert [step for step in steps if dates.evaluation_is_due(step)] == evaluations
    assert [step for step in steps if dates.checkpoint_is_due(step)] == checkpoints
    for step in range(dates.total_steps + 1):
        assert dates.evaluations_from(step) == len([due for due in evaluations if due > step])


def test_the_loop_pauses_wherever_something_is_due_and_at_the_end_of_an_epoch() -> None:
    dates, pauses = calendar(Interval(7, "step"), None), [0]
    while pauses[-1] < dates.total_steps:
        pauses.append(dates.next_pause(pauses[-1], lambda step: step == 12))
    assert pauses == [0, 5, 7, 10, 12, 14, 15, 20]
