"""The order in which every rank of a pipeline works on its micro-batches: pure, and the same as torch's schedules run.

    gpipe        all forwards, then all backwards (arXiv 1811.06965)
    1f1b         as few forwards ahead as fill the pipeline, then one backward for each forward (arXiv 1806.03377)
    interleaved  1f1b over several stages a rank (arXiv 2104.04473)
    zero_bubble  interleaved, the gradients of weights computed where a rank would wait: ZB1P (arXiv 2401.10241)

Stages are numbered along the model; rank r holds the stages r, r + K, r + 2K, ... of a pipeline of K ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Literal, NamedTuple

Kind = Literal["F", "B", "I", "W"]
"""Forward; whole backward; backward of inputs alone; backward of weights alone."""

Order = list["Work"]

_BY_ROUNDS = ("interleaved", "zero_bubble")


class Work(NamedTuple):
    """One piece of a rank's work."""

    kind: Kind
    stage: int
    microbatch: int


def orders(schedule: str, *, num_ranks: int, num_microbatches: int, stages_per_rank: int = 1) -> list[Order]:
    """The work of each rank, in order.

    Args:
        schedule: one of ``SCHEDULES`` that runs with these numbers (``why_not``).
    """
    numbers = {"num_ranks": num_ranks, "num_microbatches": num_microbatches, "stages_per_rank": stages_per_rank}
    assert (reason := why_not(schedule, **numbers)) is None, f"schedule {schedule} {reason}"
    order = SCHEDULES[schedule]
    return [order(rank, num_ranks, num_microbatches, stages_per_rank) for rank in range(num_ranks)]


def why_not(schedule: str, *, num_ranks: int, num_microbatches: int, stages_per_rank: int = 1) -> str | None:
    """The reason why the schedule does not run with these numbers, with numbers that would do; None where it runs.

    A phrase that stands behind "schedule 1f1b": "over 4 ranks takes 4 or more". One rank takes one micro-batch under
    every schedule, so that these numbers ask for the stages alone.
    """
    if stages_per_rank < (fewest := fewest_stages(schedule)):
        return f"needs at least {fewest} stages a rank"
    if stages_per_rank > 1 and schedule not in _BY_ROUNDS:
        return "has 1 stage a rank"
    if _takes(schedule, num_ranks, num_microbatches):
        return None
    if schedule not in _BY_ROUNDS:
        return f"over {num_ranks} ranks takes {num_ranks if schedule == '1f1b' else 1} or more"
    near = [m for m in range(1, num_microbatches) if _takes(schedule, num_ranks, m)][-1:]
    near.append(next(m for m in count(num_microbatches + 1) if _takes(schedule, num_ranks, m)))
    return f"over {num_ranks} ranks takes {' or '.join(map(str, near))}"


def _takes(schedule: str, num_ranks: int, num_microbatches: int) -> bool:
    """GPipe takes any M, 1F1B at least K. The others go in M // K rounds (at least one) of equally many."""
    if schedule in _BY_ROUNDS:
        return num_microbatches > 0 and num_microbatches % max(1, num_microbatches // num_ranks) == 0
    return num_microbatches >= (num_ranks if schedule == "1f1b" else 1)


def fewest_stages(schedule: str) -> int:
    """The fewest stages a rank that the schedule runs with."""
    return 2 if schedule == "interleaved" else 1


def keeps_sends(schedule: str) -> bool:
    """Whether sent tensors stay on their rank: outputs at least until their backward, gradients until the step ends.

    Note: so does torch's runtime of schedules that may have several stages a rank. How long outputs stay depends on the
    version, which is measured (``JobCosts.keeps_boundaries``).
    """
    return schedule in _BY_ROUNDS


def peak_alive(order: Sequence[Work]) -> int:
    """The most forwards of a rank whose backwards are to come at once."""
    alive = most = 0
    ends: Kind = "B" if any(work.kind == "B" for work in order) else "W"
    for work in order:
        if work.kind == "F":
            alive += 1
            most = max(most, alive)
        elif work.kind == ends:
            alive -= 1
    return most


def _gpipe(rank: int, num_ranks: int, num_microbatches: int, stages_per_rank: int) -> Order:
    every = range(num_microbatches)
    return [*(Work("F", rank, m) for m in every), *(Work("B", rank, m) for m in every)]


def _one_f_one_b(rank: int, num_ranks: int, num_microbatches: int, stages_per_rank: int) -> Order:
    ahead = min(num_microbatches, num_ranks - rank)
    order = [Work("F", rank, m) for m in range(ahead)]
    for m in range(num_microbatches):
        order.append(Work("B", rank, m))
        if ahead + m < num_microbatches:
            order.append(Work("F", rank, ahead + m))
    return order


def _by_rounds(rank: int, num_ranks: int, num_microbatches: int, stages_per_rank: int, *, is_split: bool) -> Order:
    """Forwards and backwards run through the rank's stages a round of micro-batches at a time.

    With ``is_split``, weights follow inputs at a distance of ``rank`` backwards.
    """
    per_round = num_microbatches // max(1, num_microbatches // num_ranks)
    total = stages_per_rank * num_microbatches
    ahead = (stages_per_rank - 1) * per_round + (1 if is_split else 2) * (num_ranks - 1 - rank)
    ahead = min(ahead, total)

    def pieces(kind: Kind, *, reverse: bool) -> Order:
        found, done = [], [0] * stages_per_rank
        for step in range(total):
            local = step // per_round % stages_per_rank
            local = stages_per_rank - 1 - local if reverse else local
            found.append(Work(kind, local * num_ranks + rank, done[local]))
            done[local] += 1
        return found

    forwards = pieces("F", reverse=False)
    backwards = pieces("I" if is_split else "B", reverse=True)
    order, pending = forwards[:ahead], list[Work]()
    for step, backward in enumerate(backwards):
        order += forwards[ahead + step : ahead + step + 1]
        order.append(backward)
        if is_split:
            pending.append(backward._replace(kind="W"))
            if step >= rank:
                order.append(pending.pop(0))
    return order + pending


SCHEDULES: Mapping[str, Callable[[int, int, int, int], Order]] = {
    "gpipe": _gpipe,
    "1f1b": _one_f_one_b,
    "interleaved": partial(_by_rounds, is_split=False),
    "zero_bubble": partial(_by_rounds, is_split=True),
}
