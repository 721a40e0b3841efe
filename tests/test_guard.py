"""The guard on accuracy: tentative freezes, judged by samples set aside, and exact through all of it."""

from __future__ import annotations

import json
from collections.abc import Collection
from contextlib import AbstractContextManager
from itertools import pairwise
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from laws import STATIC, Case, Weights, configuration, deviation, final_weights, plain_run
from ranks import RankPool

from pipetransformer.config import FreezeConfig
from pipetransformer.data import Dataset
from pipetransformer.data.set_aside import set_aside
from pipetransformer.freeze import AutoFreeze, GuardSize, build_policy, guard_size
from pipetransformer.freeze.guard import Guard, Pass, Verdict, paired_error, predicted_loss
from pipetransformer.process.world import World
from pipetransformer.run import events
from pipetransformer.trainer import Trainer

EVERY = 10
SPREAD = np.linspace(-0.5, 0.5, 50)


def losses(mean: float, *, noise: float = 0.0) -> list[float]:
    """Losses of 50 samples: their own differences, and noise that changes sign from sample to sample."""
    return (mean + SPREAD + noise * (-1.0) ** np.arange(50)).tolist()


def curve(step: int) -> float:
    return 0.9 - 0.004 * step


def watched(guard: Guard, *, frozen_at: int, rise: float, stop: int, start: int = 0, before: int = 1) -> list[Verdict]:
    """Passes along a curve; from the freeze on the loss lies ``rise`` above it, with a standard error of 0.07."""
    verdicts = []
    for step in range(start + EVERY, stop + 1, EVERY):
        behind = step > frozen_at
        verdicts.append(guard.observe(step, losses(curve(step) + rise * behind, noise=0.5 * behind)))
        if step == frozen_at:
            guard.froze(step, before=before)
    return verdicts


@pytest.mark.parametrize(("rise", "undone"), [(0.0, False), (0.06, False), (0.08, True), (-0.2, False)])
def test_a_freeze_is_undone_where_the_loss_lies_above_what_was_to_come(rise: float, undone: bool) -> None:
    *before, last = watched(Guard(EVERY), frozen_at=40, rise=rise, stop=60)
    assert not any(verdict.judged for verdict in before), "a freeze is tentative for two intervals"
    assert last.judged and last.undone == undone
    assert last.predicted == pytest.approx(curve(60)) and last.error == pytest.approx(0.5 / 7, rel=0.02)
    assert last.most == (1 if undone else None)


def test_the_wait_of_what_was_undone_doubles() -> None:
    guard = Guard(EVERY)
    first = watched(guard, frozen_at=40, rise=1.0, stop=60)[-1]
    assert first.undone and [guard.most(step) for step in (60, 79, 80)] == [1, 1, None]
    guard.observe(80, losses(curve(80)))
    guard.froze(80, before=1)
    guard.observe(90, losses(2.0))
    again = guard.observe(100, losses(2.0, noise=0.1))
    assert again.undone and [guard.most(step) for step in (100, 139, 140)] == [1, 1, None]


def test_a_guard_goes_on_from_its_state() -> None:
    for cut in (30, 40, 50):
        whole, first, second = Guard(EVERY), Guard(EVERY), Guard(EVERY)
        expected = watched(whole, frozen_at=40, rise=0.08, stop=60)
        watched(first, frozen_at=40, rise=0.08, stop=cut)
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        rest = watched(second, frozen_at=40, rise=0.08, stop=60, start=cut)
        assert rest == expected[-len(rest) :]


def test_a_guard_goes_on_in_a_longer_run_by_the_learning_rates_of_that() -> None:
    first, second = Guard(EVERY), Guard(EVERY)
    for step in (10, 20, 30, 40):
        first.observe(step, losses(curve(step)), moved=step / 40)
    second.load_state_dict(first.state_dict(), to_come=lambda step: 1 - step / 80)
    second.froze(40, before=1)
    second.observe(50, losses(curve(50)), moved=50 / 80)
    judged = second.observe(60, losses(curve(60), noise=0.5), moved=60 / 80)
    assert judged.predicted == pytest.approx(curve(60)), "passes of before count on the same scale"


def test_the_line_through_the_passes() -> None:
    passes = [Pass(step, 0.9 - 0.4 * moved, moved) for step, moved in ((10, 0.2), (20, 0.5), (30, 0.7))]
    assert predicted_loss(passes, moved=0.95) == pytest.approx(0.52), "by the learning rates, not by steps"
    assert paired_error([1.0, 2.0], [0.0, 1.0]) == 0 and paired_error([1.0], [0.0]) == float("inf")


def test_a_freeze_is_judged_by_a_curve_before_it_and_with_time_left() -> None:
    guard = Guard(EVERY)
    able = []
    for step in (10, 20, 30):
        guard.observe(step, losses(curve(step)))
        able.append([guard.can_judge(step, total_steps=total) for total in (step + 20, step + 21)])
    assert able == [[False, False], [False, False], [False, True]], "three passes before it, and two behind it"
    assert not guard.can_judge(31, total_steps=60) and guard.can_judge(31, total_steps=61), "at step 60"


@pytest.mark.parametrize(
    ("num_samples", "batch_size", "epochs", "expected"),
    [
        (67_349, 32, 3, GuardSize(264, 420)),
        (200_000, 32, 1, GuardSize(782, 1000)),
        (40_000, 16, 3, GuardSize(313, 250)),  # one of 160
        (20_000, 16, 3, GuardSize(157, 125)),
        (20_000, 32, 3, GuardSize(79, 125)),
        (10_000, 64, 8, GuardSize(50, 64)),
        (8_000, 32, 3, GuardSize(50, 64)),
        (4_000, 8, 1, GuardSize(71, 51)),  # a seventh of the run: 3 % of 71 steps of 8 samples, each of three forwards
        (500, 16, 10, GuardSize(50, 50)),  # a tenth
        (2_000, 32, 3, None),  # 189 steps
        (10, 1, 100, None),
    ],
)
def test_passes_are_cheap(num_samples: int, batch_size: int, epochs: int, expected: GuardSize | None) -> None:
    size = guard_size(num_samples, batch_size=batch_size, epochs=epochs)
    assert size == expected
    wanted = size.num_samples if size else None
    again = guard_size(num_samples, batch_size=batch_size, epochs=epochs, wanted=wanted)
    assert again == expected, "a resumed run gives the settled number"


def test_samples_that_are_asked_for_are_a_tenth_at_most_and_looked_at_rarely() -> None:
    assert guard_size(10_000, batch_size=32, epochs=10, wanted=1000) == GuardSize(348, 1000)  # 3 % of 348 steps
    assert guard_size(2_600, batch_size=32, epochs=10, wanted=1000) == GuardSize(91, 260)
    assert guard_size(2_600, batch_size=32, epochs=4, wanted=1000) is None, "3 passes in 296 steps"


def test_a_run_that_ends_before_a_freeze_can_be_judged_sets_nothing_aside() -> None:
    assert guard_size(67_349, batch_size=32, epochs=3, max_steps=200) is None
    assert guard_size(67_349, batch_size=32, epochs=3, max_steps=1400) == GuardSize(175, 420)
    assert guard_size(67_349, batch_size=32, epochs=3, max_steps=1000) == GuardSize(125, 360), (
        "it ends in its first epoch"
    )
    assert guard_size(67_349, batch_size=32, epochs=3, max_steps=1400, wanted=760) == GuardSize(264, 760)


SCORES = (0.0, *[0.5] * 12)  # for 4 of 12 blocks


def decided(
    means: list[float], *, frozen: int, scores: tuple[float, ...] | None = SCORES, learns: bool = True
) -> list[tuple[int, str]]:
    """Decisions of a run of 200 steps with ``frozen`` blocks from the first step on, a pass each 10 steps."""
    built = build_policy(FreezeConfig(policy="static", max_frozen=frozen), num_blocks=12)
    controller = AutoFreeze(
        *(built,), every_steps=EVERY, warmup_steps=0, num_blocks=12, guard=Guard(EVERY), total_steps=200
    )
    controller.probed(scores)
    now, found = controller.decide(0, frozen=0).frozen, list[tuple[int, str]]()
    for number, mean in enumerate(means, start=1):
        controller.trained(1 / number if learns else 1.0, num_steps=EVERY)
        controller.watch(number * EVERY, losses(mean, noise=0.01 * number), frozen=now)
        decision = controller.decide(number * EVERY, frozen=now)
        now = decision.frozen
        found.append((now, decision.reason))
    return found


def test_blocks_that_no_evidence_is_for_thaw_once_the_loss_stays() -> None:
    stays = [0.9, 0.6, 0.5, 0.5, 0.5, 0.5]
    found = decided(stays, frozen=11)
    assert [frozen for frozen, _ in found] == [11, 11, 11, 11, 4, 4]
    assert "evidence is for 4 alone" in found[4][1] and found[5][1] == "these blocks thawed before"
    assert {frozen for frozen, _ in decided([0.9, 0.6, 0.5, 0.4, 0.3, 0.2], frozen=11)} == {11}, "the loss falls"
    assert {frozen for frozen, _ in decided(stays, frozen=4)} == {4}
    assert {frozen for frozen, _ in decided(stays, frozen=11, learns=False)} == {11}, "nothing learns any more"
    assert [frozen for frozen, _ in decided(stays, frozen=11, scores=None)][-1] == 0, "questions have no probe"


def test_an_undone_freeze_waits_though_the_loss_stays() -> None:
    """A freeze that is undone is one of more blocks than evidence is for, and the loss mostly stays where it is: it
    waits, and is not refused for good."""
    guard = Guard(EVERY)
    controller = AutoFreeze(
        *(build_policy(FreezeConfig(policy="static", max_frozen=8, warmup="80 steps"), num_blocks=12),),
        every_steps=EVERY,
        warmup_steps=80,
        num_blocks=12,
        guard=guard,
        total_steps=200,
    )
    controller.probed(SCORES)
    now, found = 0, list[tuple[int, str]]()
    for number, mean in enumerate([0.8, 0.7, 0.65, 0.6, 0.55, 0.5, 0.45, 0.4, 0.4, 0.4, 0.4, 0.4], start=1):
        step = number * EVERY
        controller.trained(1 / number, num_steps=EVERY)
        controller.watch(step, losses(mean, noise=0.01 * number), frozen=now)
        decision = controller.decide(step, frozen=now)
        if decision.frozen > now:
            controller.froze(step, before=now, now=decision.frozen)
        now = decision.frozen
        found.append((now, decision.reason))
    assert [frozen for frozen, _ in found] == [0] * 7 + [8, 8, 0, 0, 8]
    assert found[9][1] == "the guard undoes the last freeze" and guard.trusted == 4


def test_what_the_guard_kept_is_trusted() -> None:
    guard = Guard(EVERY, trusted=2)
    watched(guard, frozen_at=40, rise=0.0, stop=50)
    guard.observe(60, losses(curve(60), noise=0.5), frozen=4)
    assert guard.trusted == 4


def test_what_lies_on_blocks_that_were_never_judged_is_not_trusted() -> None:
    guard = Guard(EVERY, trusted=2)
    watched(guard, frozen_at=40, rise=0.0, stop=50, before=3)
    assert guard.observe(60, losses(curve(60), noise=0.5), frozen=4).judged
    assert guard.trusted == 2


# Samples set aside


class Numbered(Dataset):
    """Samples whose labels are their numbers; inputs tell number and epoch."""

    kind, metric_names, views, fingerprint, num_tokens = "classes", ("accuracy",), None, "numbered", None

    def __init__(self, num_samples: int) -> None:
        self.labels, self.lengths = torch.arange(num_samples), np.full(num_samples, 8)

    def inputs(
        self, ids: np.ndarray, *, length: int, epoch: int | None, keys: Collection[str] | None = None
    ) -> dict[str, torch.Tensor]:
        return {"x": torch.tensor([[int(i), -1 if epoch is None else epoch] for i in ids])}


def test_samples_are_set_aside_and_nothing_is_in_both() -> None:
    data = Numbered(205)
    parts = set_aside(data, most=20)
    assert parts is not None
    train, aside = parts
    ids = [set(part.labels.tolist()) for part in parts]  # a sample's label is its number
    assert len(aside) == 20 and not ids[0] & ids[1] and len(ids[0] | ids[1]) == 205
    assert (train.views, aside.views) == (None, 1)
    assert len({train.fingerprint, aside.fingerprint, data.fingerprint}) == 3
    rows = np.array([3, 0])
    assert aside.inputs(rows, length=8, epoch=2)["x"][:, 0].tolist() == aside.labels[rows].tolist()
    assert aside.inputs(rows, length=8, epoch=2)["x"][:, 1].tolist() == [-1, -1], "no epoch, no augmentation"
    assert train.inputs(rows, length=8, epoch=2)["x"][:, 1].tolist() == [2, 2]


def test_samples_of_a_group_go_together_and_few_leave_none() -> None:
    data = Numbered(100)
    data.groups = np.arange(100) // 3
    parts = set_aside(data, most=10)
    assert parts is not None and 8 <= len(parts[1]) <= 10
    groups = [set(part.groups.tolist()) for part in parts if part.groups is not None]
    assert not groups[0] & groups[1]
    assert set_aside(data, most=2) is None, "one sample would fit"


# Whole runs


def frequent_guard() -> AbstractContextManager[object]:
    """A pass every 2 steps, over 16 samples."""
    return mock.patch("pipetransformer.run.job.guard_size", lambda *_, **__: GuardSize(2, 16))


class _Stop(Exception):
    pass


def guarded_run(
    world: World, folder: str, extra: list[str], undoes: bool, stop_after: int | None = None
) -> tuple[Weights | None, list[tuple[int, int, int | None]], list[Verdict]]:
    """A run with a pass every 2 steps: (weights on rank 0, (step, frozen, cached) of each plan, verdicts).

    Frozen blocks leave no optimizer state: each freeze is decided.

    Args:
        stop_after: a step behind whose gradients the run is cut off.
    """
    plans: list[tuple[int, int, int | None]] = []
    verdicts: list[Verdict] = []
    causes: dict[int, str] = {}
    parked: list[str] = []

    def note(event: events.Event) -> None:
        if isinstance(event, events.Adopted):
            plans.append((event.step, event.plan.frozen, event.plan.cached))
            causes[event.step] = event.reason
        elif isinstance(event, events.Watched):
            verdicts.append(event.verdict)
        elif isinstance(event, events.TrainingEnds):
            parked.extend(trainer.autodp.parked)

    def probe(step: int, gradients: object) -> None:
        if step == stop_after and trainer.report.folder.path.exists():
            raise _Stop

    overrides = [*Case("vit", world.size, STATIC[1]).overrides(""), *extra, f"run.dir={folder}", "run.id=guarded"]
    told = -1.0 if undoes else 100.0
    with (
        frequent_guard(),
        mock.patch("pipetransformer.freeze.guard.predicted_loss", lambda passes, moved: told),
    ):
        trainer = Trainer(configuration("vit", overrides), world, listeners=[note], probe=probe)
        try:
            trainer.run()
        except _Stop:
            return None, plans, verdicts
    assert not parked and (not undoes or causes[10] == "guard")
    return final_weights(trainer), plans, verdicts


def moves_from(first: int, plans: list[tuple[int, int, int | None]]) -> list[tuple[int, int]]:
    """(step, blocks) of each freeze and thaw from step ``first`` on. Whether a cache is used, timings decide."""
    frozen = [(0, 0), *((step, frozen) for step, frozen, _ in plans)]
    return [now for before, now in pairwise(frozen) if now[1] != before[1] and now[0] >= first]


GUARDED = ["freeze.policy=static", "freeze.max_frozen=4", "freeze.warmup=6 steps", "freeze.every=2 steps"]


@pytest.mark.parametrize("undoes", [False, True])
def test_a_guarded_run_is_the_plain_loop_on_the_rest(undoes: bool, ranks: RankPool, tmp_path: Path) -> None:
    extra = [*GUARDED, "freeze.guard=true"]
    (weights, plans, verdicts), *others = ranks.run(2, guarded_run, str(tmp_path), extra, undoes)
    assert all((plans, verdicts) == (theirs, heard) for _, theirs, heard in others), "ranks decided differently"
    frozen_at = {step: frozen for step, frozen, _ in plans}
    assert frozen_at[6] == 4 and all(frozen == (0 if undoes else 4) for step, frozen in frozen_at.items() if step == 10)
    assert all(cached is None for step, _, cached in plans if step < 10), "nothing is cached before a freeze is kept"
    case = Case("vit", 2, tuple((step, frozen, 1) for step, frozen in frozen_at.items()))
    frozen = tuple((step, frozen) for step, frozen, _ in case.moves)
    with frequent_guard():  # the same samples are set aside
        expected, _ = plain_run("vit", frozen, (*case.overrides(""), *GUARDED, "freeze.guard=true"))
    assert weights is not None and deviation(weights, expected) < 1e-10


@pytest.mark.parametrize("undoes", [False, True])
def test_a_run_that_is_resumed_between_a_freeze_and_its_verdict_decides_as_one_that_was_not(
    undoes: bool, ranks: RankPool, tmp_path: Path
) -> None:
    extra = [*GUARDED, "freeze.guard=true"]
    weights, plans, verdicts = ranks.run(2, guarded_run, str(tmp_path / "whole"), extra, undoes)[0]
    saving = [*extra, "checkpoint.every=1 steps"]
    cut = ranks.run(2, guarded_run, str(tmp_path), saving, undoes, 8)[0]
    assert cut[1][-1][:2] == (6, 4) and not any(verdict.judged for verdict in cut[2]), "it is tentative"
    again = ranks.run(2, guarded_run, str(tmp_path), [*saving, "run.resume=true"], undoes)[0]
    judged = [verdict for verdict in again[2] if verdict.judged]
    assert judged == [verdict for verdict in verdicts if verdict.judged and verdict.step > 8] and judged
    assert moves_from(10, again[1]) == moves_from(10, plans) == ([(10, 0), (14, 4), (18, 0)] if undoes else [])
    assert weights is not None and again[0] is not None and deviation(again[0], weights) < 1e-10
