"""AutoFreeze: when to ask the policy, with which norms, and what to remember between two answers."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

from pipetransformer.config import Config
from pipetransformer.errors import UserError
from pipetransformer.freeze.policy import Policy, build_policy


@dataclass(frozen=True, slots=True)
class FreezeDecision:
    """One answer with its evidence.

    Attributes:
        step: optimizer steps done when it was taken.
        interval: intervals since the warm-up (T).
        frozen: the wanted number of frozen blocks (n).
        norms: mean gradient norm of every block over the interval; None if the policy reads none.
    """

    step: int
    interval: int
    frozen: int
    norms: tuple[float, ...] | None


class AutoFreeze:
    """Asks ``policy`` every ``every_steps`` steps after ``warmup_steps`` steps; n never passes ``max_frozen``.

    Args:
        patience: hysteresis: a block freezes, or thaws, only where so many answers in a row agree that it should.
    """

    def __init__(
        self, policy: Policy | None, *, every_steps: int, warmup_steps: int, max_frozen: int, patience: int = 1
    ) -> None:
        assert every_steps >= 1 and warmup_steps >= 0 and patience >= 1
        self.policy = policy
        self._every = every_steps
        self._warmup = warmup_steps
        self._max_frozen = max_frozen
        self._patience = patience
        self._norm_sums: list[float] = []
        self._norm_steps = 0
        self._before: tuple[float, ...] | None = None
        self._answers: list[int] = []

    @classmethod
    def of(cls, config: Config, *, num_blocks: int, batches_per_epoch: int) -> AutoFreeze:
        """The controller for a job of this configuration. Raises UserError for what so many blocks cannot do."""
        freeze = config.freeze
        return cls(
            build_policy(freeze, num_blocks=num_blocks),
            every_steps=freeze.every.steps(batches_per_epoch),
            warmup_steps=freeze.warmup.steps(batches_per_epoch),
            max_frozen=num_blocks if freeze.max_frozen is None else freeze.max_frozen,
            patience=freeze.patience,
        )

    @property
    def needs_norms(self) -> bool:
        return self.policy is not None and self.policy.needs_norms

    @property
    def may_unfreeze(self) -> bool:
        return self.policy is not None and self.policy.may_unfreeze

    def due(self, step: int) -> bool:
        """Whether a decision is to be taken after ``step`` optimizer steps."""
        past = step - self._warmup
        return self.policy is not None and past >= 0 and past % self._every == 0

    def never_freezes(self, total_steps: int) -> bool:
        """Whether a run of so many steps has too few decisions to freeze anything."""
        if self.policy is None:
            return False
        # A class of a user's own may do without these.
        first, fewest = getattr(self.policy, "first_interval", 0), getattr(self.policy, "fewest_norms", 0)
        first = max(first, fewest - (self._warmup > 0))
        counting = (step for step in range(total_steps) if self.due(step) and self._interval(step) >= first)
        return sum(1 for _ in counting) < self._patience

    def _interval(self, step: int) -> int:
        return (step - self._warmup) // self._every

    def observe(self, norm_sums: Sequence[float], *, num_steps: int) -> None:
        """Adds the gradient norms of ``num_steps`` steps, summed over the steps, one number a block."""
        before = self._norm_sums or [0.0] * len(norm_sums)
        self._norm_sums = [total + more for total, more in zip(before, norm_sums, strict=True)]
        self._norm_steps += num_steps

    def decide(self, step: int, *, frozen: int) -> FreezeDecision:
        assert self.policy is not None
        interval = self._interval(step)
        norms = tuple(total / self._norm_steps for total in self._norm_sums) if self._norm_steps else None
        answer = _whole(self.policy.decide(interval, frozen=frozen, norms=norms, before=self._before), step=step)
        if not self.policy.may_unfreeze:
            answer = max(answer, frozen)
        self._norm_sums, self._norm_steps, self._before = [], 0, norms
        self._answers = [*self._answers, answer][-self._patience :]
        if len(self._answers) < self._patience:
            answer = frozen
        else:  # what all of the last answers agree on: the least growth, or the least shrinking
            answer = max(min(self._answers), min(frozen, max(self._answers)))
        return FreezeDecision(step=step, interval=interval, frozen=min(answer, self._max_frozen), norms=norms)

    def state_dict(self) -> dict[str, object]:
        return {
            "norm_sums": list(self._norm_sums),
            "norm_steps": self._norm_steps,
            "before": self._before,
            "answers": list(self._answers),
        }

    def load_state_dict(self, state: dict[str, object]) -> None:
        self._norm_sums = list(state["norm_sums"])  # type: ignore[call-overload]
        self._norm_steps = int(state["norm_steps"])  # type: ignore[call-overload]
        self._before = None if state["before"] is None else tuple(state["before"])  # type: ignore[arg-type]
        self._answers = list(state["answers"])  # type: ignore[call-overload]


def _whole(answer: object, *, step: int) -> int:
    """A policy's answer as a plain number. Raises UserError: the class may be the user's own."""
    try:
        count = operator.index(answer)  # type: ignore[arg-type]
    except TypeError:
        count = -1
    if count < 0:
        raise UserError(f"freeze.policy: it answers {answer!r} at step {step}; give a whole number of at least 0")
    return count
