"""The policy ``guarded``: where it starts, when it proposes more, and a whole run against the plain loop."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from laws import STATIC, Case, Weights, configuration, deviation, final_weights, plain_run
from ranks import RankPool
from test_guard import frequent_guard

from pipetransformer.config import FreezeConfig
from pipetransformer.dp import EMA, RECENT
from pipetransformer.engine.average import Average
from pipetransformer.freeze import AutoFreeze, Payoff, Policy, Signals, build_policy
from pipetransformer.freeze.guard import Guard
from pipetransformer.pipe.controller import AutoPipe
from pipetransformer.pipe.planner.answers import Outlook, Settled
from pipetransformer.plan import ParallelPlan
from pipetransformer.process.world import World
from pipetransformer.run import events
from pipetransformer.trainer import Trainer


def guarded(num_blocks: int) -> Policy:
    built = build_policy(FreezeConfig(policy="guarded"), num_blocks=num_blocks)
    assert built is not None
    return built


@pytest.mark.parametrize(
    ("num_blocks", "scores", "is_pretrained", "expected"),
    [
        (12, [0.2] + [0.2] * 11 + [0.6], True, 4),  # half of what is left open
        (12, [0.2] + [0.2] * 11 + [0.29], True, 0),  # more than a tenth, less than a quarter
        (12, [0.2] + [0.2] * 11 + [0.27], True, 0),  # less than a tenth
        (6, [0.2] * 7, True, 0),
        (12, [0.2] + [0.2] * 11 + [0.6], False, 0),
        (6, [0.4] + [0.4] * 5 + [0.47], True, 0),
        (12, [0.0] + [0.2] * 11 + [0.98], True, 4),
        (12, None, True, 0),
        (12, None, False, 0),
        (1, [0.0, 1.0], True, 0),
        (2, [0.0, 0.5, 1.0], True, 1),
    ],
)
def test_it_starts_with_what_is_free(
    num_blocks: int, scores: list[float] | None, is_pretrained: bool, expected: int
) -> None:
    assert guarded(num_blocks).decide(Signals(0, 0, scores=scores, is_pretrained=is_pretrained)) == expected


MUCH, SOME = [0.2] * 12 + [0.6], [0.2] * 12 + [0.29]
"""Scores of blocks that hold more than a quarter of the task, and more than a tenth of it."""


@pytest.mark.parametrize(
    ("scores", "now", "to_come", "expected"),
    [
        *((MUCH, 4, share, n) for share, n in ((0.5, 4), (0.06, 4), (0.05, 10))),
        *((SOME, 0, share, n) for share, n in ((0.5, 0), (0.06, 0), (0.05, 4), (0.0, 4))),
        *((None, 0, share, n) for share, n in ((0.06, 0), (0.05, 4))),
    ],
)
@pytest.mark.parametrize("is_watched", [False, True])
def test_more_become_free_once_little_is_to_be_learnt(
    scores: list[float] | None, now: int, to_come: float, expected: int, is_watched: bool
) -> None:
    def decided(payoff: Payoff | None) -> int:
        signals = Signals(
            *(3, now),
            scores=scores,
            is_watched=is_watched,
            payoff=None if payoff is None else lambda wanted: payoff,
            to_come=to_come,
        )
        return guarded(12).decide(signals)

    is_free = scores is MUCH
    assert decided(Payoff(10.0, 1.0)) == (expected if is_free or is_watched else now), "the others must be judged"
    assert decided(Payoff(1.0, 1.0)) == decided(None) == now, "only where it is predicted to pay"


LITTLE = (0.2, *[0.25] * 12)
"""Scores of blocks that hold less than a tenth of the task: none start frozen."""


@pytest.mark.parametrize(
    ("frozen", "scores", "saved", "spent", "undone", "expected"),
    [
        (0, LITTLE, 10.0, 9.5, 0, 10),
        (0, LITTLE, 10.0, 9.6, 0, 0),  # less than a twentieth more than it costs
        (2, [0.2] * 13, 10.0, 1.0, 0, 2),  # the blocks hold nothing of the task
        (9, LITTLE, 10.0, 1.0, 0, 10),
        (10, LITTLE, 10.0, 1.0, 0, 10),  # some blocks always train
        (2, LITTLE, -1.0, 0.0, 0, 2),
        (2, LITTLE, 0.0, math.inf, 0, 2),
        (0, LITTLE, 10.0, 1.0, 0, 10),
        (0, LITTLE, 10.0, 1.0, 1, 5),
        (0, LITTLE, 10.0, 1.0, 2, 2),
        (0, LITTLE, 10.0, 1.0, 9, 2),
        (5, LITTLE, 10.0, 1.0, 1, 7),
        (2, SOME, 10.0, 1.0, 0, 4),
        (4, SOME, 10.0, 1.0, 0, 4),
        (6, SOME, 10.0, 1.0, 0, 6),
        (0, SOME, 10.0, 1.0, 1, 2),
    ],
)
def test_where_none_are_free_it_proposes_some_late_where_that_pays(
    frozen: int, scores: list[float], saved: float, spent: float, undone: int, expected: int
) -> None:
    asked: list[int] = []

    def payoff(wanted: int) -> Payoff:
        asked.append(wanted)
        return Payoff(saved, spent)

    signals = Signals(3, frozen, scores=scores, is_watched=True, payoff=payoff, undone=undone, to_come=0.05)
    assert guarded(12).decide(signals) == expected
    assert all(wanted > frozen for wanted in asked) and (expected == frozen or asked == [expected])


def test_it_waits_where_the_blocks_hold_little_and_proposes_nothing_unwatched_or_unpredicted() -> None:
    def decided(**more: object) -> int:
        return guarded(12).decide(Signals(3, **{"scores": LITTLE, "frozen": 0, "payoff": payoff, **more}))  # type: ignore[arg-type]

    def payoff(wanted: int) -> Payoff:
        return Payoff(10.0, 1.0)

    assert decided(is_watched=True, to_come=0.05) == 10
    assert decided(is_watched=True, to_come=0.06) == 0, "the weights still move"
    assert decided(is_watched=True, to_come=0.05, scores=None, is_pretrained=False) == 10
    assert decided(is_watched=True, to_come=0.05, payoff=None) == 0
    assert decided(to_come=0.05) == 0, "no one would judge it"


@pytest.mark.parametrize(
    ("scores", "is_watched", "rests"),
    [(LITTLE, False, True), (LITTLE, True, False), (MUCH, False, False), ([0.2] * 13, True, True)],
)
def test_no_decision_is_due_where_nothing_will_freeze(scores: list[float], is_watched: bool, rests: bool) -> None:
    guard = Guard(10) if is_watched else None
    controller = AutoFreeze(guarded(12), every_steps=10, warmup_steps=0, num_blocks=12, guard=guard, total_steps=100)
    controller.probed(scores)
    assert controller.rests == rests and controller.due(0) and controller.due(10) != rests
    assert controller.outlook(0, frozen=0, wants_guard=True).rests == rests, "the run says so before it trains"
    again = AutoFreeze(guarded(12), every_steps=10, warmup_steps=0, num_blocks=12, guard=guard, total_steps=100)
    again.load_state_dict(controller.state_dict())
    assert again.rests == rests
    assert controller.guard_is_due(10) == (is_watched and not rests)
    assert controller.passes_from(0) == (9 if is_watched and not rests else 0), "no pass looks at what rests"


def late(guard: Guard | None, *, scores: list[float], max_frozen: int | None = None) -> AutoFreeze:
    """Of a run of 100 steps whose learning rate falls in a line to 0."""
    settings = {"every_steps": 10, "warmup_steps": 0, "num_blocks": 12, "total_steps": 100, "max_frozen": max_frozen}
    controller = AutoFreeze(guarded(12), guard=guard, to_come=lambda step: (1 - step / 100) ** 2, **settings)
    controller.probed(scores)
    return controller


def test_what_is_free_freezes_late_though_no_pass_could_judge_it() -> None:
    """As in a run that is too short for a guard; what is not free does not."""

    def at_80(scores: list[float], *, frozen: int, every: int = 20) -> tuple[int, bool]:
        controller = late(Guard(every), scores=scores)
        decision = controller.decide(80, frozen=frozen, payoff=lambda wanted: Payoff(10.0, 1.0))
        return decision.frozen, controller.judged_at(80) is not None

    assert at_80(MUCH, frozen=4) == (10, False), "unjudged, and so not tentative"
    assert at_80(list(LITTLE), frozen=0) == (0, False)
    assert at_80(MUCH, frozen=4, every=5) == (10, True) and at_80(list(LITTLE), frozen=0, every=5) == (10, True)


def test_what_froze_late_is_trusted_in_a_longer_run() -> None:
    """Its moments are let go: it does not thaw once more steps follow."""
    controller = late(Guard(20), scores=MUCH)
    assert controller.guard is not None and controller.guard.trusted == 4
    controller.froze(80, before=4, now=9)
    assert controller.guard.trusted == 9 and controller.tentative_from is None and not controller.needs_frozen_state
    controller.froze(0, before=0, now=11)
    assert controller.guard.trusted == 9, "nothing speaks for what a policy freezes at the start"


def test_after_an_undone_freeze_no_more_blocks_freeze_than_a_pass_could_judge() -> None:
    controller = late(Guard(20), scores=list(LITTLE))
    assert controller.guard is not None
    controller.guard._cap, controller.guard._cap_until = 3, 100  # a freeze from three on was undone
    with mock.patch.object(type(controller.policy), "decide", lambda *_: 8):
        assert controller.judged_at(80) is None and controller.decide(80, frozen=0).frozen == 0
        assert controller.decide(80, frozen=2).frozen == 2 and controller.decide(80, frozen=8).frozen == 3


def test_norms_are_told_where_the_guard_alone_decides() -> None:
    controller = late(Guard(5), scores=MUCH)
    controller.observe([2.0] * 12, num_steps=2)
    decision = controller.decide(85, frozen=4)
    assert decision.to_come == pytest.approx(0.15**2)
    assert decision.asked is None and decision.norms == (1.0,) * 12


def test_the_planner_is_asked_about_what_may_freeze() -> None:
    asked: list[int] = []

    def payoff(wanted: int) -> Payoff:
        asked.append(wanted)
        return Payoff(1.0 if wanted > 5 else 0.0, 1.0)

    decision = late(None, scores=MUCH, max_frozen=5).decide(80, frozen=4, payoff=payoff)
    assert asked == [5] and decision.frozen == 4, "ten would pay, five do not"


def test_a_longer_run_tells_what_froze_for_the_end_of_a_shorter_one() -> None:
    controller = late(None, scores=MUCH)
    early = [controller.outlook(s, frozen=n, wants_guard=True).early for s, n in ((50, 10), (50, 4), (80, 10), (0, 10))]
    assert early == [10, 0, 0, 0]


def rests(world: World, folder: str) -> tuple[list[str], list[str], bool]:
    """In a run that saves and freezes nothing: the averages that are kept up, those that are kept at the end, and
    whether the one to freeze with would go on from the weights as they are."""
    kept_up, update = list[str](), Average.update

    def updated(self: Average, step: int) -> None:
        kept_up.append(self.key)
        update(self, step)

    settings = [
        "freeze.policy=guarded",
        "freeze.averaged=auto",
        "train.ema=0.9",
        "train.epochs=1",
        "checkpoint.every=3 steps",
    ]
    overrides = [*Case("vit", world.size, STATIC[1]).overrides(""), *settings, f"run.dir={folder}", "run.id=rests"]
    kept, is_saved = list[str](), True

    def hear(event: events.Event) -> None:
        nonlocal is_saved
        if isinstance(event, events.TrainingEnds):
            layout = trainer.engine.layout
            layout.rest()  # once more changes nothing
            kept.extend(average.key for average in layout.averages)
            saved = layout.state()
            is_saved = all(torch.equal(saved[name][RECENT], p.detach()) for name, p in layout.updated.items())

    with mock.patch.object(Average, "update", updated):
        trainer = Trainer(configuration("vit", overrides), world, listeners=[hear])
        trainer.run()
    return kept_up, kept, is_saved


def test_the_average_to_freeze_with_is_dropped_where_nothing_will_freeze(ranks: RankPool, tmp_path: Path) -> None:
    ((kept_up, kept, is_saved),) = ranks.run(1, rests, str(tmp_path))
    assert EMA in kept_up and RECENT not in kept_up[-5:], "the one that is evaluated is kept up"
    assert kept == [EMA], "it would take as much memory as the weights"
    assert is_saved, "for a run that goes on with another policy"


def free_soon(*_: object, to_come: float = 1.0, **__: object) -> int:
    return 1 if to_come > 0.99 else 2


def free_late(*_: object, to_come: float = 1.0, **__: object) -> int:
    return 1 if to_come > 0.1 else 2


def guarded_run(
    world: World, folder: str, undoes: bool, shard: str, free: Callable[..., int] = free_soon
) -> tuple[Weights | None, list[tuple[int, int]], list[str]]:
    """A run in which a sixth of the blocks is free at first and a third from the next step on, and saves time: (weights
    on rank 0, (step, frozen blocks) of each change, parameters whose optimizer state waits at the end).
    """
    plans: list[tuple[int, int]] = []
    parked: list[str] = []

    def note(event: events.Event) -> None:
        if isinstance(event, events.TrainingEnds):
            parked.extend(trainer.autodp.parked)
        if isinstance(event, events.Adopted) and (not plans or plans[-1][1] != event.plan.frozen):
            plans.append((event.step, event.plan.frozen))

    overrides = [*Case("vit", world.size, STATIC[1]).overrides(""), *SETTINGS, f"run.dir={folder}", "run.id=guarded"]
    overrides.append(f"dp.shard={shard}")
    told = -1.0 if undoes else 100.0

    def gains(*_: object, outlook: Outlook, tentative_steps: float, **__: object) -> tuple[float, float]:
        mean = trainer.autopipe._mean_step
        step = trainer.calendar.total_steps - round(outlook.remaining_steps / mean)
        judged_at = trainer.autofreeze.judged_at(step)
        assert tentative_steps / mean == pytest.approx(0 if judged_at is None else judged_at - step)
        return 10.0, 1.0

    with (
        mock.patch("pipetransformer.run.probing.boundary_scores", lambda *_, **__: (0.0, *[0.5] * 6)),
        mock.patch("pipetransformer.pipe.planner.choice.Planner.gains", gains),
        frequent_guard(),
        mock.patch("pipetransformer.freeze.guard.predicted_loss", lambda passes, moved: told),
        mock.patch("pipetransformer.freeze.guarded.free_blocks", free),
        mock.patch("pipetransformer.freeze.controller.free_blocks", free),
    ):
        trainer = Trainer(configuration("vit", overrides), world, listeners=[note])
        trainer.autofreeze._is_pretrained = True
        trainer.run()
    return final_weights(trainer), plans, parked


SETTINGS = ("freeze.policy=guarded", "freeze.averaged=auto", "freeze.every=4 steps", "cache.disk_budget=null")


@pytest.mark.parametrize(("undoes", "shard"), [(False, "none"), (True, "none"), (True, "full"), (False, "optimizer")])
def test_a_run_is_the_plain_loop_with_its_freezes(undoes: bool, shard: str, ranks: RankPool, tmp_path: Path) -> None:
    (weights, plans, _), (_, theirs, _) = ranks.run(2, guarded_run, str(tmp_path), undoes, shard)
    assert plans == theirs, "ranks decided differently"
    moves = [(step, frozen) for step, frozen in plans if frozen]
    assert moves[0] == (0, 1) and moves[1] == (8, 2), "four steps between decisions, and three passes before the first"
    assert (moves[2:3] == [(12, 1)]) == undoes, moves
    case = Case("vit", 2, tuple((step, frozen, 1) for step, frozen in moves))
    with frequent_guard():  # the same samples are set aside
        expected, _ = plain_run("vit", tuple(moves), (*case.overrides(""), *SETTINGS))
    assert weights is not None and deviation(weights, expected) < 1e-10


def test_moments_of_a_freeze_that_no_pass_will_judge_are_let_go(ranks: RankPool, tmp_path: Path) -> None:
    ((_, plans, parked),) = ranks.run(1, guarded_run, str(tmp_path), False, "none", free_late)
    assert plans[-1] == (16, 2) and parked == [], "the planner does not count them"


def held_run(world: World, folder: str) -> tuple[Weights | None, list[tuple[int, int]], list[str]]:
    """``guarded_run`` of a freeze that is undone at step 12, for which no layout has room before step 14."""
    settle = AutoPipe.settle

    def crowded(self: AutoPipe, wanted: int, *, step: int, current: ParallelPlan, **given: Any) -> Settled:
        if step == 12 and wanted < current.frozen:
            return Settled(None, current.frozen, "no room")
        return settle(self, wanted, step=step, current=current, **given)

    with mock.patch.object(AutoPipe, "settle", crowded):
        return guarded_run(world, folder, True, "none")


def test_a_thaw_that_has_to_wait_for_room_has_its_moments(ranks: RankPool, tmp_path: Path) -> None:
    ((weights, plans, _),) = ranks.run(1, held_run, str(tmp_path))
    moves = [(step, frozen) for step, frozen in plans if frozen]
    assert moves == [(0, 1), (8, 2), (14, 1), (16, 2)]
    with frequent_guard():
        expected, _ = plain_run("vit", tuple(moves), (*Case("vit", 1, ()).overrides(""), *SETTINGS))
    assert weights is not None and deviation(weights, expected) < 1e-10
