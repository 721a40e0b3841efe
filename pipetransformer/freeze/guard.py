"""The guard on accuracy: it watches the loss of samples set aside, and takes back what freezing makes worse.

No statistic of gradients tells how deep freezing is safe, so its cost is watched. Every freeze is tentative for two
intervals. Then the loss of the samples set aside is compared with what the intervals before the freeze predict; if it
lies more than one paired standard error above that, the blocks thaw, and wait twice as long as before until they may
freeze again. Blocks that are frozen from the first step on, where there is nothing to predict from, thaw as far as no
evidence is for them, once the loss stays where it is while that of the training samples falls. A pure function of plain
numbers, the same on every rank.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

_TENTATIVE = 2  # intervals
_FEWEST_FITTED, _MOST_FITTED = 3, 5  # passes, for a line through them
_LEAST_EVERY = 50  # steps between two passes
FEWEST_STEPS = (_FEWEST_FITTED + _TENTATIVE) * _LEAST_EVERY
"""A run needs more than these, for a freeze to be judged in it."""
_MOST_SAMPLES, _MOST_SHARE = 1000, 0.1  # of the training samples
_OF_A_RUN = 7  # passes, at least
_ENOUGH, _ENOUGH_SHARE = 64, 0.00625  # samples
_MOST_COST = 0.03  # of the steps' work, where a step does three forwards' work a sample


@dataclass(frozen=True, slots=True)
class GuardSize:
    """The work of the guard.

    Attributes:
        every: steps between two passes.
        num_samples: the most samples to set aside.
    """

    every: int
    num_samples: int


@dataclass(frozen=True, slots=True)
class Pass:
    """A pass over the samples set aside.

    Attributes:
        step: number of steps done.
        loss: mean loss of the samples.
        moved: share of the sum of all learning rates that lies before it.
    """

    step: int
    loss: float
    moved: float


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
        flat: whether the loss is not lower than two passes ago, by one paired standard error, while that of the
            training samples is.
        predicted: the loss that the passes before the freeze predict; None where nothing is judged.
        error: standard error of the mean of the samples' differences since the freeze; None likewise.
    """

    step: int
    loss: float
    most: int | None
    judged: bool = False
    undone: bool = False
    flat: bool = False
    predicted: float | None = None
    error: float | None = None


@dataclass
class Guard:
    """Judges freezes by passes over the samples set aside, one every ``every`` steps.

    Args:
        every: steps between two passes.

    Attributes:
        tentative: the freeze that is not decided yet; None for none.
        trusted: the most frozen blocks that evidence is for: the probe's, and those of freezes that were kept; None for
            any number.
    """

    every: int
    tentative: Tentative | None = None
    trusted: int | None = None
    _passes: list[Pass] = field(default_factory=list)
    _latest: list[tuple[float, ...]] = field(default_factory=list)  # losses of the samples, of the last due passes
    _trained: list[float] = field(default_factory=list)  # mean training loss before each of these
    _now: tuple[float, ...] = ()  # losses of the samples, of the last pass
    _cap: int | None = None  # no more blocks freeze before ``_cap_until``
    _cap_until: int = 0
    _wait: int = _TENTATIVE  # intervals, of the next undone freeze

    def due(self, step: int) -> bool:
        """Whether a pass is due after ``step`` steps."""
        return step > 0 and step % self.every == 0

    def can_judge(self, step: int, *, total_steps: float) -> bool:
        """Whether a freeze at ``step`` can be judged: there is a curve before it, and time left behind it."""
        return step // self.every >= _FEWEST_FITTED and self.judged_at(step) < total_steps

    def judged_at(self, step: int) -> int:
        """The step at which a freeze at ``step`` is decided."""
        return (-(-step // self.every) + _TENTATIVE) * self.every

    def observe(
        self,
        step: int,
        losses: Sequence[float],
        *,
        frozen: int = 0,
        trained: float = math.inf,
        moved: float | None = None,
    ) -> Verdict:
        """Takes note of a pass, and decides a tentative freeze that is old enough.

        Args:
            losses: loss of every sample set aside, in their order [samples].
            frozen: number of frozen blocks.
            trained: mean loss of the training samples since the last due pass.
            moved: share of the sum of all learning rates that lies before ``step``; None where all are alike.
        """
        moved = step if moved is None else moved
        loss, tentative = float(np.mean(losses)), self.tentative
        self._now, flat = tuple(losses), False
        if self.due(step):
            self._latest = [*self._latest[-_TENTATIVE:], self._now]
            self._trained = [*self._trained[-_TENTATIVE:], trained]
            learns = self._trained[-1] < self._trained[0]
            flat = learns and len(self._latest) > _TENTATIVE and _is_flat(losses, before=self._latest[0])
        if tentative is None or step < tentative.step + _TENTATIVE * self.every:
            self._passes.append(Pass(step, loss, moved))
            return Verdict(step, loss, self.most(step), flat=flat)
        predicted = predicted_loss(self._before(tentative.step), moved=moved)
        error = paired_error(losses, tentative.losses)
        undone = is_worse(loss, predicted, error)
        if undone:
            self._cap, self._cap_until = tentative.before, step + self._wait * self.every
            self._wait *= 2
        elif self.trusted is not None and tentative.before <= self.trusted:  # else what was below was never judged
            self.trusted = max(self.trusted, frozen)
        self.tentative = None
        self._passes.append(Pass(step, loss, moved))
        return Verdict(step, loss, self.most(step), True, undone, flat, predicted, error)

    @property
    def num_undone(self) -> int:
        """The number of freezes that were undone."""
        return (self._wait // _TENTATIVE).bit_length() - 1

    def froze(self, step: int, *, before: int) -> None:
        """Takes note of a freeze from ``before`` blocks on, behind a pass at the same step."""
        if self.tentative is None:
            self.tentative = Tentative(step, before, self._now)

    def thaw(self) -> None:
        """Lets no more blocks than the trusted ones be frozen from now on."""
        self._cap, self._cap_until = self.trusted, sys.maxsize

    def most(self, step: int) -> int | None:
        """The most blocks that may be frozen at ``step``; None for any number."""
        return self._cap if self._cap is not None and step < self._cap_until else None

    def _before(self, step: int) -> list[Pass]:
        """The passes up to ``step`` that tell how the loss falls."""
        return [each for each in self._passes if 0 < each.step <= step][-_MOST_FITTED:]

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any], *, to_come: Callable[[int], float] | None = None) -> None:
        """Goes on from ``state``.

        Args:
            to_come: gives the share of the sum of all learning rates that lies behind a step, of a run that may be
                longer than it was; None where nothing has changed.
        """
        tentative = state["tentative"]
        self.tentative = None if tentative is None else Tentative(**{**tentative, "losses": tuple(tentative["losses"])})
        self.trusted = state["trusted"]
        passes = [Pass(**each) for each in state["_passes"]]
        self._passes = passes if to_come is None else [replace(each, moved=1.0 - to_come(each.step)) for each in passes]
        self._latest, self._now = [tuple(each) for each in state["_latest"]], tuple(state["_now"])
        self._trained = list(state["_trained"])
        self._cap, self._cap_until, self._wait = state["_cap"], state["_cap_until"], state["_wait"]


def guard_size(
    num_samples: int, *, batch_size: int, epochs: int, max_steps: int | None = None, wanted: int | None = None
) -> GuardSize | None:
    """A pass every eighth of an epoch, or of a run that ends inside its first one, or every 50 steps where that is
    longer, over so few samples that all are cheap; rarer where those would be too few to tell anything, as far as a
    seventh of the run.

    One of 160 training samples, and at least 64 where there are enough. More would tell smaller costs, but nothing
    learns from them: of few samples that costs more than freezing does (``docs/results.md``, "How many samples the
    guard sets aside").

    Args:
        num_samples: training samples, before any are set aside.
        max_steps: the most steps of the run; None for those of its epochs.
        wanted: samples to set aside; passes are so rare that they stay cheap. None for as many as above.

    Returns:
        None where the guard could judge no freeze: too few samples, or steps.
    """
    limit = math.inf if max_steps is None else max_steps
    per_epoch, of_a_step = -(-num_samples // batch_size), 3 * _MOST_COST * batch_size
    seventh = int(min(per_epoch * epochs, limit)) // _OF_A_RUN
    eighth = math.ceil(min(per_epoch, limit) / 8)
    every = max(_LEAST_EVERY, eighth, min(math.ceil(_ENOUGH / of_a_step), seventh))
    enough = max(_ENOUGH, _ENOUGH_SHARE * num_samples) if wanted is None else wanted
    enough = min(enough, _MOST_SAMPLES, _MOST_SHARE * num_samples)
    if wanted is not None:  # Note: what was settled before comes out the same.
        every = max(every, math.ceil(int(enough) / of_a_step - 1e-9))
    most = int(min(enough, of_a_step * every + 1e-9))
    steps = min(-(-(num_samples - most) // batch_size) * epochs, limit)
    passes = (steps - 1) // every
    return None if most < 2 or passes < _FEWEST_FITTED + _TENTATIVE else GuardSize(every, most)


def is_worse(loss: float, predicted: float, error: float) -> bool:
    """Whether a loss lies more than its error above what was predicted, or is no number."""
    return not loss <= predicted + error


def predicted_loss(passes: Sequence[Pass], *, moved: float) -> float:
    """The loss that earlier passes predict: on the straight line through them, by least squares, over the sum of the
    learning rates so far, which the weights move with.

    Loss curves bend the other way early in a run, when much is still to be learnt: then the line is too low, and what
    freezes is undone. A curve a + b / t, which is as convex, was above almost every later loss of runs without
    freezing, on MiniLM with SST-2 and on split CIFAR-100: by up to 0.17, so that it saw no cost of any freeze.

    Args:
        passes: earlier passes, none at step 0.
        moved: share of the sum of all learning rates before the loss.
    """
    terms = np.array([[1.0, each.moved] for each in passes])
    (constant, slope), *_ = np.linalg.lstsq(terms, np.array([each.loss for each in passes]), rcond=None)
    return float(constant + slope * moved)


def paired_error(losses: Sequence[float], before: Sequence[float]) -> float:
    """Standard error of the mean difference of two losses of the same samples."""
    differences = np.asarray(losses) - np.asarray(before)
    return float(differences.std(ddof=1) / math.sqrt(len(differences))) if len(differences) > 1 else math.inf


def _is_flat(losses: Sequence[float], *, before: Sequence[float]) -> bool:
    fallen = float(np.mean(before)) - float(np.mean(losses))
    return fallen < paired_error(losses, before)
