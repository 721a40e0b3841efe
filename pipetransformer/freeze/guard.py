"""The guard on accuracy: it watches the loss of samples set aside, and takes back what freezing makes worse.

No statistic of gradients tells how deep freezing is safe, so its cost is watched. Every freeze is tentative for two
intervals. Then the loss of the samples set aside is compared with what the intervals before the freeze predict; if it
lies more than one paired standard error above that, the blocks thaw, and wait twice as long as before until they may
freeze again. A pure function of plain numbers, the same on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

TENTATIVE_INTERVALS = 2
_FEWEST_FITTED = 3  # passes, for a curve through them


@dataclass(frozen=True, slots=True)
class Pass:
    """A pass over the samples set aside.

    Attributes:
        step: number of steps done.
        loss: mean loss of the samples.
    """

    step: int
    loss: float


@dataclass(frozen=True, slots=True)
class Tentative:
    """A freeze that may be undone.

    Attributes:
        step: number of steps done at the freeze.
        before: number of frozen blocks before it.
        losses: loss of every sample at the freeze [samples].
    """

    step: int
    before: int
    losses: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The guard's answer after a pass, with its evidence.

    Attributes:
        step: number of steps done.
        loss: mean loss of the samples set aside.
        most: the most blocks that may be frozen now; None for any number.
        judged: whether a tentative freeze was decided by this pass.
        undone: whether it was undone.
        predicted: the loss that the passes before the freeze predict; None where nothing is judged.
        error: standard error of the mean of the samples' differences since the freeze; None likewise.
    """

    step: int
    loss: float
    most: int | None
    judged: bool = False
    undone: bool = False
    predicted: float | None = None
    error: float | None = None


@dataclass
class Guard:
    """Judges freezes by passes over the samples set aside, one every ``every`` steps.

    Args:
        every: steps between two passes.

    Attributes:
        tentative: the freeze that is not decided yet; None for none.
    """

    every: int
    tentative: Tentative | None = None
    _passes: list[Pass] = field(default_factory=list)
    _latest: tuple[float, ...] = ()
    _cap: int | None = None  # no more blocks freeze before ``_cap_until``
    _cap_until: int = 0
    _wait: int = TENTATIVE_INTERVALS  # intervals, of the next undone freeze

    def due(self, step: int) -> bool:
        """Whether a pass is due after ``step`` steps."""
        return step > 0 and step % self.every == 0

    def observe(self, step: int, losses: Sequence[float]) -> Verdict:
        """Takes note of a pass, and decides a tentative freeze that is old enough.

        Args:
            losses: loss of every sample set aside, in their order [samples].
        """
        loss = float(np.mean(losses))
        tentative = self.tentative
        self._latest = tuple(losses)
        if tentative is None or step < tentative.step + TENTATIVE_INTERVALS * self.every:
            self._passes.append(Pass(step, loss))
            return Verdict(step, loss, self.most(step))
        predicted = predicted_loss([p for p in self._passes if p.step <= tentative.step], step=step)
        error = paired_error(losses, tentative.losses)
        undone = loss > predicted + error
        if undone:
            self._cap, self._cap_until = tentative.before, step + self._wait * self.every
            self._wait *= 2
        self.tentative = None
        self._passes.append(Pass(step, loss))
        return Verdict(step, loss, self.most(step), True, undone, predicted, error)

    def froze(self, step: int, *, before: int) -> None:
        """Takes note of a freeze from ``before`` blocks on, behind a pass at the same step."""
        if self.tentative is None:
            self.tentative = Tentative(step, before, self._latest)

    def most(self, step: int) -> int | None:
        """The most blocks that may be frozen at ``step``, where ``cap`` holds; None for any number."""
        return self._cap if self._cap is not None and step < self._cap_until else None

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        tentative = state["tentative"]
        self.tentative = None if tentative is None else Tentative(**{**tentative, "losses": tuple(tentative["losses"])})
        self._passes = [Pass(**each) for each in state["_passes"]]
        self._latest = tuple(state["_latest"])
        self._cap, self._cap_until, self._wait = state["_cap"], state["_cap_until"], state["_wait"]


def guard_interval(batches_per_epoch: int) -> int:
    """Steps between two passes: an eighth of an epoch, and at least 50."""
    return max(50, -(-batches_per_epoch // 8))


def predicted_loss(passes: Sequence[Pass], *, step: int) -> float:
    """The loss at ``step`` that passes before it predict: a + b / t through them by least squares; of fewer than three
    passes, the last one's loss.

    Args:
        passes: earlier passes, at least one. One at step 0 tells nothing of the curve.
    """
    fitted = [each for each in passes if each.step > 0]
    if len(fitted) < _FEWEST_FITTED:
        return passes[-1].loss
    terms = np.array([[1.0, 1.0 / each.step] for each in fitted])
    (constant, slope), *_ = np.linalg.lstsq(terms, np.array([each.loss for each in fitted]), rcond=None)
    return float(constant + slope / step)


def paired_error(losses: Sequence[float], before: Sequence[float]) -> float:
    """Standard error of the mean difference of two losses of the same samples."""
    differences = np.asarray(losses) - np.asarray(before)
    return float(differences.std(ddof=1) / math.sqrt(len(differences))) if len(differences) > 1 else math.inf
