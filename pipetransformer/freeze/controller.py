"""AutoFreeze: when to ask the policy, with which norms, what to remember between answers, and the guard's last word."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence

from pipetransformer.config import Config
from pipetransformer.config.calendar import Calendar
from pipetransformer.config.learning_rate import learning_rate, share_to_come
from pipetransformer.errors import UserError
from pipetransformer.freeze.decision import FreezeDecision
from pipetransformer.freeze.freezing import Freezing
from pipetransformer.freeze.guard import Guard, GuardSize, Verdict
from pipetransformer.freeze.plasticity import plasticity
from pipetransformer.freeze.policy import Payoff, Policy, Signals, build_policy
from pipetransformer.freeze.probe import LATE, free_blocks


class AutoFreeze:
    """Asks ``policy`` every ``every_steps`` steps after ``warmup_steps`` steps; n never passes ``max_frozen``.

    Args:
        patience: hysteresis: a block freezes, or thaws, only where so many answers in a row agree that it should.
        guard: the guard on accuracy, which has the last word; None for none.
        is_pretrained: whether training begins with published weights.
        total_steps: number of steps of the whole run.
        to_come: gives the share of the sum of all learning rates that lies behind a number of steps.
        rate: gives the learning rate behind a number of steps, over the highest.
        least_frozen: blocks in which nothing trains, so that they are frozen throughout.
    """

    def __init__(
        self,
        policy: Policy | None,
        *,
        every_steps: int,
        warmup_steps: int,
        num_blocks: int,
        max_frozen: int | None = None,
        patience: int = 1,
        guard: Guard | None = None,
        is_pretrained: bool = True,
        total_steps: float = math.inf,
        to_come: Callable[[int], float] = lambda step: 1.0 - 1e-6 * step,
        rate: Callable[[int], float] = lambda step: 1.0,
        least_frozen: int = 0,
    ) -> None:
        assert every_steps >= 1 and warmup_steps >= 0 and patience >= 1
        self.policy = policy
        self._every, self._warmup, self._patience = every_steps, warmup_steps, patience
        self._num_blocks, self._is_pretrained = num_blocks, is_pretrained
        self._max_frozen = num_blocks if max_frozen is None else max_frozen
        self._least_frozen = least_frozen
        self._total_steps, self._to_come, self._rate = total_steps, to_come, rate
        self.guard = guard
        if guard is not None and not is_pretrained:
            guard.trusted = least_frozen
        self._verdict: Verdict | None = None
        self._loss_sum, self._loss_steps = 0.0, 0
        self._norm_sums: list[float] = []
        self._norm_steps = 0
        self._before: tuple[float, ...] | None = None
        self._answers: list[int] = []
        self._scores: tuple[float, ...] | None = None
        self.rests = False  # whether nothing will freeze, by what the probe has shown: no more decisions are due
        self._similarities: list[list[float]] | None = None  # [blocks, pairs] at the last decision
        self._plasticity: list[float | None] | None = None
        self._most_plastic: list[float | None] | None = None
        self._rate_frozen = 1.0

    @classmethod
    def of(
        cls, config: Config, *, num_blocks: int, batches_per_epoch: int, guard: GuardSize | None = None
    ) -> AutoFreeze:
        """The controller for a job of this configuration. Raises UserError for what so many blocks cannot do."""
        freeze, least = config.freeze, config.model.least_frozen(num_blocks)
        if freeze.max_frozen is not None and freeze.max_frozen < least:
            raise UserError(
                f"freeze.max_frozen: {freeze.max_frozen} is less than the {least} blocks before those of "
                f"model.lora.blocks, in which nothing trains; give at least {least}"
            )
        every_steps = batches_per_epoch if freeze.every == "auto" else freeze.every.steps(batches_per_epoch)
        if freeze.every == "auto" and freeze.policy == "guarded":
            every_steps = -(-batches_per_epoch // 8) if guard is None else guard.every
        total_steps = Calendar.of(config, batches_per_epoch=batches_per_epoch).total_steps
        return cls(
            build_policy(freeze, num_blocks=num_blocks),
            every_steps=every_steps,
            warmup_steps=freeze.warmup.steps(batches_per_epoch),
            num_blocks=num_blocks,
            max_frozen=freeze.max_frozen,
            patience=freeze.patience,
            guard=None if guard is None else Guard(guard.every),
            is_pretrained=config.model.pretrained,
            total_steps=total_steps,
            to_come=lambda step: share_to_come(config.train, step=step, total_steps=total_steps),
            rate=lambda step: learning_rate(config.train, step=step, total_steps=total_steps) / config.train.lr,
            least_frozen=least,
        )

    def outlook(self, step: int, *, frozen: int, wants_guard: bool) -> Freezing:
        """What it will do, as far as it is known before training.

        Args:
            step: steps that are done, with ``frozen`` blocks frozen.
            wants_guard: whether the configuration asks for one.
        """
        is_watched, is_late = self.guard is not None, self._to_come(step) <= LATE
        by_probe = step > 0 and not is_late and getattr(self.policy, "needs_probe", False)
        early = frozen if by_probe and frozen > max(self._free(step), self._least_frozen) else 0
        lacks_guard = wants_guard and not is_watched
        return Freezing(self.never_freezes(), self.schedule(), is_watched, lacks_guard, early, self.rests)

    @property
    def needs_norms(self) -> bool:
        return self.policy is not None and self.policy.needs_norms

    @property
    def needs_probe(self) -> bool:
        # Of blocks that freeze unwatched, the guard trusts what a probe shows. A class of a user's own may do without.
        watched = self.guard is not None and self._is_pretrained and self._may_freeze_at_start
        return watched or (self.policy is not None and getattr(self.policy, "needs_probe", False))

    def needs_similarities(self, step: int) -> bool:
        """Whether ``compared`` is to be told of the samples' similarity before the decision after ``step`` steps."""
        return getattr(self.policy, "needs_plasticity", False) and self._policy_is_due(step)

    @property
    def _may_freeze_at_start(self) -> bool:
        return self.policy is not None and not self._warmup and not self._first_interval

    @property
    def _first_interval(self) -> int:
        """The first interval whose answer may freeze anything; a class of a user's own may not say."""
        first, fewest = getattr(self.policy, "first_interval", 0), getattr(self.policy, "fewest_norms", 0)
        return max(first, fewest - (self._warmup > 0))

    @property
    def may_unfreeze(self) -> bool:
        return self.guard is not None or (self.policy is not None and self.policy.may_unfreeze)

    def due(self, step: int) -> bool:
        """Whether a decision is to be taken after ``step`` optimizer steps: by the policy, the guard, or both; and at
        the start, where blocks are frozen without any."""
        return self._policy_is_due(step) or self.guard_is_due(step) or (step == 0 and self._least_frozen > 0)

    def guard_is_due(self, step: int) -> bool:
        """Whether the samples set aside are to be looked at after ``step`` optimizer steps."""
        return self.guard is not None and not self.rests and self.guard.due(step)

    def _policy_is_due(self, step: int) -> bool:
        past = step - self._warmup
        return self.policy is not None and past >= 0 and past % self._every == 0 and not (step and self.rests)

    def never_freezes(self) -> bool:
        """Whether the run has too few decisions to freeze anything."""
        if self.policy is None:
            return False
        steps = range(int(self._total_steps))
        counting = [s for s in steps if self._policy_is_due(s) and self._interval(s) >= self._first_interval]
        return not any(self._may_freeze(step) for step in counting[self._patience - 1 :])

    def judged_at(self, step: int) -> int | None:
        """The step at which the guard judges a freeze at ``step``, which is tentative until then; None: it does not."""
        guard = self.guard
        can_judge = guard is not None and step > 0 and guard.can_judge(step, total_steps=self._total_steps)
        return guard.judged_at(step) if guard is not None and can_judge else None

    def _may_freeze(self, step: int) -> bool:
        """Whether any freeze at ``step`` is allowed: it can be judged, or need not."""
        return self._judgeable(self._num_blocks, step=step) > self._least_frozen

    def _free(self, step: int) -> int:
        """The blocks that the probe shows to be free behind ``step``."""
        num_blocks, pretrained, to_come = self._num_blocks, self._is_pretrained, self._to_come(step)
        return free_blocks(self._scores, num_blocks=num_blocks, is_pretrained=pretrained, to_come=to_come)

    def schedule(self) -> tuple[tuple[int, int], ...] | None:
        """The (step, frozen blocks) of each change, where the policy looks at nothing but the interval; else None."""
        # Note: a class of a user's own that derives from a schedule may look at more.
        if self.policy is None or not vars(type(self.policy)).get("is_schedule", False):
            return None
        changes, frozen, decided, answers = list[tuple[int, int]](), self._least_frozen, 0, list[int]()
        for step in filter(self._policy_is_due, range(int(self._total_steps))):
            answer = _whole(self.policy.decide(Signals(self._interval(step), frozen)), step=step)
            answers = [*answers, answer][-self._patience :]
            wanted = max(self._least_frozen, min(self._agreed(answers, frozen=frozen), self._max_frozen))
            if wanted > frozen:
                wanted = max(frozen, self._judgeable(wanted, step=step)) if step >= decided else frozen
            if wanted != frozen:
                changes.append((step, wanted))
                frozen, decided = wanted, self.judged_at(step) or 0
        return tuple(changes)

    def changes_from(self, step: int, *, frozen: int) -> tuple[tuple[tuple[int, int], ...], ...]:
        """What may freeze from ``step`` on, where ``frozen`` blocks are now: the (step, frozen blocks) of each change,
        where they are known; else of the most that may happen, and of the least."""
        known = () if self.policy is None else self.schedule()
        if known is not None:
            return (tuple((at, wanted) for at, wanted in known if at > step),)
        due = next((at for at in range(step + 1, int(self._total_steps)) if self._policy_is_due(at)), None)
        most = min(self._max_frozen, getattr(self.policy, "most", self._num_blocks))  # of a user's own class, none
        fastest = ((due, most),) if due is not None and most > frozen else ()
        trusted = None if self.guard is None else self.guard.trusted
        thaws = due is not None and trusted is not None and trusted < frozen
        return fastest, ((due, trusted),) if thaws else ()  # type: ignore[return-value]

    def _interval(self, step: int) -> int:
        return (step - self._warmup) // self._every

    def passes_from(self, step: int) -> int:
        """The number of the guard's passes after ``step``."""
        if self.guard is None or self.rests:
            return 0
        return int((self._total_steps - 1) // self.guard.every - step // self.guard.every)

    def observe(self, norm_sums: Sequence[float], *, num_steps: int) -> None:
        """Adds the gradient norms of ``num_steps`` steps, summed over the steps, one number a block."""
        before = self._norm_sums or [0.0] * len(norm_sums)
        self._norm_sums = [total + more for total, more in zip(before, norm_sums, strict=True)]
        self._norm_steps += num_steps

    def trained(self, loss: float, *, num_steps: int) -> None:
        """Adds the mean loss of the samples of ``num_steps`` steps."""
        self._loss_sum += loss * num_steps
        self._loss_steps += num_steps

    def probed(self, scores: Sequence[float] | None) -> None:
        """Takes note of the scores of the linear probe [blocks + 1]; None where there can be none."""
        self._scores = None if scores is None else tuple(scores)
        start = Signals(0, 0, None, None, self._scores, self._is_pretrained, self.guard is not None)
        later = getattr(self.policy, "may_freeze_later", None)  # a class of a user's own may do without
        self.rests = later is not None and not later(start)
        if self.guard is not None:
            self.guard.trusted = max(self._free(0), self._least_frozen)

    def compared(self, similarities: Sequence[Sequence[float]]) -> None:
        """Takes note of the similarity of every pair of samples behind each block [blocks, pairs]."""
        if self._similarities is not None:
            self._plasticity = plasticity(similarities, self._similarities)
            pairs = zip(self._plasticity, self._most_plastic or self._plasticity)
            self._most_plastic = [max((each for each in pair if each is not None), default=None) for pair in pairs]
        self._similarities = [list(pairs) for pairs in similarities]

    def watch(self, step: int, losses: Sequence[float], *, frozen: int) -> Verdict:
        """Gives the guard the losses of the samples set aside, in their order [samples]."""
        assert self.guard is not None
        loss = self._loss_sum / self._loss_steps if self._loss_steps else math.inf
        self._verdict = self.guard.observe(step, losses, frozen=frozen, trained=loss, moved=1.0 - self._to_come(step))
        if self.guard.due(step):
            self._loss_sum, self._loss_steps = 0.0, 0
        return self._verdict

    def froze(self, step: int, *, before: int, now: int) -> None:
        """Takes note of a freeze from ``before`` blocks to ``now``; before one that the guard can judge, it has seen
        the losses."""
        if self.guard is not None and self.judged_at(step) is not None:
            self.guard.froze(step, before=before)
        elif self.guard is not None and self.guard.trusted is not None and step > 0:  # what the probe shows to be free
            self.guard.trusted = max(self.guard.trusted, now)

    @property
    def tentative_from(self) -> int | None:
        """The number of frozen blocks before the last freeze, where it may still be undone; else None."""
        return None if self.guard is None or self.guard.tentative is None else self.guard.tentative.before

    @property
    def needs_frozen_state(self) -> bool:
        """Whether blocks that were trained and are frozen now may thaw."""
        # Note: what the guard thaws beyond an undone freeze was frozen from the first step on and has no state.
        return self.tentative_from is not None or (self.policy is not None and self.policy.may_unfreeze)

    def decide(self, step: int, *, frozen: int, payoff: Callable[[int], Payoff] | None = None) -> FreezeDecision:
        """The number of blocks to be frozen after ``step`` steps, where ``frozen`` are now.

        Args:
            payoff: gives the predicted payoff of so many frozen blocks; None where nothing is predicted.
        """
        norms = tuple(total / self._norm_steps for total in self._norm_sums) if self._norm_steps else None
        asks: int | None = None
        asked: list[tuple[int, float, float]] = []

        def ask(wanted: int) -> Payoff:
            assert payoff is not None
            wanted = min(wanted, self._max_frozen)
            found = payoff(wanted)
            asked.append((wanted, found.saved, found.spent))
            return found

        if frozen <= self._least_frozen:
            self._rate_frozen = self._rate(step)
        if self._policy_is_due(step):
            asks = self._answered(
                Signals(
                    *(self._interval(step), frozen, norms, self._before, self._scores, self._is_pretrained),
                    is_watched=self.guard is not None,
                    undone=0 if self.guard is None else self.guard.num_undone,
                    to_come=self._to_come(step),
                    plasticity=self._plasticity,
                    most_plastic=self._most_plastic,
                    rate=self._rate(step),
                    rate_frozen=self._rate_frozen,
                    payoff=None if payoff is None else ask,
                ),
                step=step,
            )
        answer = (0 if self.policy is None else frozen) if asks is None else min(asks, self._max_frozen)
        allowed, reason = self._allowed(max(answer, self._least_frozen), step=step, frozen=frozen)
        if answer < self._least_frozen and not reason:
            reason = "nothing trains in the blocks before those of model.lora.blocks"
        if not reason and asks is not None and asks > allowed:
            reason = f"freeze.max_frozen is {self._max_frozen}"
        changed = None if asks is None or self._plasticity is None else tuple(self._plasticity)
        seen = norms, tuple(asked), changed, reason, self._to_come(step)
        return FreezeDecision(step, self._interval(step), allowed, asks, *seen)

    def _allowed(self, answer: int, *, step: int, frozen: int) -> tuple[int, str]:
        """The number of blocks that the guard allows, and its reason for another one than ``answer``."""
        guard = self.guard
        if guard is None:
            return answer, ""
        if guard.tentative is not None:
            return min(answer, frozen), "the last freeze is tentative still" if answer > frozen else ""
        trusted, can_judge = guard.trusted, self.judged_at(step) is not None
        verdict = self._verdict if self._verdict is not None and self._verdict.step == step else None
        is_flat = verdict is not None and verdict.flat and not verdict.undone  # an undone freeze has its own wait
        if trusted is not None and frozen > trusted and is_flat and can_judge:
            guard.thaw()
            return min(answer, trusted), f"the loss of the samples set aside stays, and evidence is for {trusted} alone"
        most = guard.most(step)
        if most is not None and answer > most:
            is_undone = verdict is not None and verdict.undone
            allowed = max(min(frozen, most), self._judgeable(most, step=step))
            return allowed, "the guard undoes the last freeze" if is_undone else "these blocks thawed before"
        allowed = max(frozen, self._judgeable(answer, step=step)) if answer > frozen else answer
        return allowed, "" if allowed == answer else "the guard could not judge a freeze here"

    def _judgeable(self, answer: int, *, step: int) -> int:
        """So many blocks of ``answer`` as may freeze at ``step``. Where the run ends before a verdict, those that the
        probe shows to be free, as in a run that is too short for a guard."""
        if self.guard is None or step == 0 or self.judged_at(step) is not None:
            return answer
        is_late = self.guard.judged_at(step) >= self._total_steps
        return min(answer, self._free(step)) if is_late else self._least_frozen

    def _answered(self, signals: Signals, *, step: int) -> int:
        """The policy's answer, by its patience."""
        assert self.policy is not None
        frozen, norms = signals.frozen, signals.norms
        answer = _whole(self.policy.decide(signals), step=step)
        if not self.policy.may_unfreeze:
            answer = max(answer, frozen)
        self._norm_sums, self._norm_steps, self._before = [], 0, None if norms is None else tuple(norms)
        self._answers = [*self._answers, answer][-self._patience :]
        return self._agreed(self._answers, frozen=frozen)

    def _agreed(self, answers: Sequence[int], *, frozen: int) -> int:
        """What the last answers agree on: the least growth, or the least shrinking; no change by too few."""
        return frozen if len(answers) < self._patience else max(min(answers), min(frozen, max(answers)))

    def state_dict(self) -> dict[str, object]:
        return {
            "norm_sums": list(self._norm_sums),
            "norm_steps": self._norm_steps,
            "losses": [self._loss_sum, self._loss_steps],
            "before": self._before,
            "answers": list(self._answers),
            "scores": self._scores,
            "similarities": self._similarities,
            "most_plastic": self._most_plastic,
            "rate_frozen": self._rate_frozen,
            "guard": None if self.guard is None else self.guard.state_dict(),
        }

    def load_state_dict(self, state: dict[str, object]) -> None:
        self._norm_sums = list(state["norm_sums"])  # type: ignore[call-overload]
        self._norm_steps = int(state["norm_steps"])  # type: ignore[call-overload]
        self._loss_sum, self._loss_steps = state["losses"]  # type: ignore[misc]
        self._before = None if state["before"] is None else tuple(state["before"])  # type: ignore[arg-type]
        self._answers = list(state["answers"])  # type: ignore[call-overload]
        # Older runs have none of these.
        self._similarities = state.get("similarities")  # type: ignore[assignment]
        self._most_plastic = state.get("most_plastic")  # type: ignore[assignment]
        self._rate_frozen = float(state.get("rate_frozen", 1.0))  # type: ignore[arg-type]
        self.probed(state.get("scores"))  # type: ignore[arg-type]
        if self.guard is not None and state.get("guard") is not None:
            self.guard.load_state_dict(state["guard"], to_come=self._to_come)  # type: ignore[arg-type]


def _whole(answer: object, *, step: int) -> int:
    """A policy's answer as a plain number. Raises UserError: the class may be the user's own."""
    try:
        count = operator.index(answer)  # type: ignore[arg-type]
    except TypeError:
        count = -1
    if count < 0:
        raise UserError(f"freeze.policy: it answers {answer!r} at step {step}; give a whole number of at least 0")
    return count
