"""AutoFreeze against hand-computed tables, and the line that answers what it cannot do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipetransformer.config import Config, FreezeConfig, load_config
from pipetransformer.errors import UserError
from pipetransformer.freeze import AutoFreeze, GuardSize, Policy, Signals, build_policy
from pipetransformer.freeze.guard import Guard

CONFIG = """\
task: image_classification
model: {name: vit_tiny_patch16_224}
data: {name: digits}
train: {epochs: 1, batch_size: 64, lr: 1e-3}
freeze: {policy: schedule}
"""


def configuration(folder: Path, *overrides: str) -> Config:
    path = folder / "config.yaml"
    path.write_text(CONFIG)
    return load_config(path, overrides)


def policy(name: str, *, num_blocks: int = 12, **keys: object) -> Policy:
    built = build_policy(FreezeConfig(policy=name, **keys), num_blocks=num_blocks)  # type: ignore[arg-type]
    assert built is not None
    return built


def frozen_by_step(controller: AutoFreeze, *, num_steps: int) -> list[int]:
    """n after every step from 0 on, as a loop asks for it."""
    frozen, history = 0, []
    for step in range(num_steps):
        if controller.due(step):
            frozen = controller.decide(step, frozen=frozen).frozen
        history.append(frozen)
    return history


# Policies


@pytest.mark.parametrize(
    ("num_blocks", "alpha", "expected"),
    [
        (12, 1 / 3, [0, 4, 7, 9, 10, 11, 11, 12]),
        (12, 1 / 2, [0, 6, 9, 11, 12]),
        (12, 0.99, [0, 12, 12]),
        (12, 0.01, [0, 1, 1, 1, 1, 1, 1, 1, 1, 2]),
        (10, 0.3, [0, 3, 6, 7]),  # 10 (1 - 0.7) is 3, though a little more in floating point
    ],
)
def test_schedule_against_its_table(num_blocks: int, alpha: float, expected: list[int]) -> None:
    schedule = policy("schedule", num_blocks=num_blocks, alpha=alpha)
    assert [schedule.decide(Signals(interval, 0)) for interval in range(len(expected))] == expected


def test_paper_waits_for_norms() -> None:
    assert policy("paper", num_blocks=6).decide(Signals(3, 2)) == 2, "a resumed run that had another policy has none"


def test_schedule_ends_with_all_blocks_frozen() -> None:
    assert policy("schedule", alpha=0.1).decide(Signals(10_000, 0)) == 12


@pytest.mark.parametrize(
    ("frozen", "norms", "expected"),
    [
        (0, (6.0, 5.0, 4.0, 3.0, 1.0, 2.0), 3),  # smallest at 4, cap 0 + 6/2 = 3
        (0, (6.0, 1.0, 4.0, 3.0, 2.0, 2.0), 1),  # smallest at 1, under the cap
        (0, (1.0, 2.0, 3.0, 4.0, 5.0, 6.0), 0),  # the first block is the smallest: nothing to freeze
        (0, (5.0, 2.0, 2.0, 4.0, 5.0, 6.0), 1),  # the first of equals
        (3, (0.0, 0.0, 0.0, 3.0, 2.0, 1.0), 5),  # zeros of frozen blocks do not count; cap 3 + 3/2, rounded up
        (4, (0.0, 0.0, 0.0, 0.0, 2.0, 1.0), 5),
        (5, (0.0, 0.0, 0.0, 0.0, 0.0, 1.0), 5),  # the last block is the smallest of itself
        (6, (0.0, 0.0, 0.0, 0.0, 0.0, 0.0), 6),
    ],
)
def test_paper_against_its_table(frozen: int, norms: tuple[float, ...], expected: int) -> None:
    assert policy("paper", num_blocks=6).decide(Signals(1, frozen, norms)) == expected


@pytest.mark.parametrize(("max_frozen", "expected"), [(5, 5), (0, 0), (12, 12)])
def test_static_freezes_its_count(max_frozen: int, expected: int) -> None:
    assert policy("static", max_frozen=max_frozen).decide(Signals(0, 0)) == expected


# When it is asked, and what it remembers


@pytest.mark.parametrize(
    ("name", "every", "warmup", "max_frozen", "expected"),
    [
        ("schedule", 1, 0, 12, [0, 6, 9, 11, 12, 12, 12, 12]),
        ("schedule", 2, 0, 12, [0, 0, 6, 6, 9, 9, 11, 11]),
        ("schedule", 2, 3, 12, [0, 0, 0, 0, 0, 6, 6, 9]),
        ("schedule", 1, 0, 7, [0, 6, 7, 7, 7, 7, 7, 7]),
        ("static", 5, 2, 4, [0, 0, 4, 4, 4, 4, 4, 4]),
        ("static", 1, 0, 4, [4, 4, 4, 4, 4, 4, 4, 4]),
    ],
)
def test_intervals_warmup_and_cap(name: str, every: int, warmup: int, max_frozen: int, expected: list[int]) -> None:
    built = policy(name, max_frozen=max_frozen)
    controller = AutoFreeze(built, every_steps=every, warmup_steps=warmup, num_blocks=12, max_frozen=max_frozen)
    assert frozen_by_step(controller, num_steps=len(expected)) == expected


def test_a_configuration_gives_its_intervals_cap_and_patience(tmp_path: Path) -> None:
    """Epochs of 10 steps: asked after 5, 25, 45 ... steps; two answers must agree."""
    keys = ("freeze.alpha=0.5", "freeze.every=2 epochs", "freeze.warmup=5 steps", "freeze.patience=2", "train.epochs=7")
    controller = AutoFreeze.of(configuration(tmp_path, *keys), num_blocks=12, batches_per_epoch=10)
    assert [step for step in range(50) if controller.due(step)] == [5, 25, 45]
    assert frozen_by_step(controller, num_steps=70)[5::20] == [0, 0, 6, 9]
    capped = AutoFreeze.of(configuration(tmp_path, *keys, "freeze.max_frozen=7"), num_blocks=12, batches_per_epoch=10)
    assert frozen_by_step(capped, num_steps=70)[5::20] == [0, 0, 6, 7]
    assert controller.schedule() == ((45, 6), (65, 9)) and capped.schedule() == ((45, 6), (65, 7))
    short = [
        AutoFreeze.of(configuration(tmp_path, *keys, f"train.epochs={n}"), num_blocks=12, batches_per_epoch=10)
        for n in (4, 5)
    ]
    assert [each.never_freezes() for each in short] == [True, False], "the first answer of a schedule is 0"


def test_a_guarded_run_decides_each_eighth_of_an_epoch_or_with_the_guard(tmp_path: Path) -> None:
    config = configuration(tmp_path, "freeze.policy=guarded", "train.epochs=3")
    guard = GuardSize(every=50, num_samples=20)
    for size, batches, every in ((None, 80, 10), (None, 71, 9), (None, 9, 2), (None, 5, 1), (guard, 80, 50)):
        controller = AutoFreeze.of(config, num_blocks=12, batches_per_epoch=batches, guard=size)
        due = [step for step in range(3 * batches) if controller.due(step)]
        assert due == list(range(0, 3 * batches, every))


@pytest.mark.parametrize("warmup", [0, 5])
@pytest.mark.parametrize("name", ["static", "schedule", "paper", "percentile"])
def test_a_run_that_ends_before_anything_can_freeze_is_told_so(name: str, warmup: int) -> None:
    first = {"static": 0, "schedule": 1, "paper": 1, "percentile": 1 if warmup else 2}[name]
    last = warmup + 10 * first

    def controller_of(total_steps: int) -> AutoFreeze:
        built = policy(name, max_frozen=3)
        return AutoFreeze(built, every_steps=10, warmup_steps=warmup, num_blocks=12, total_steps=total_steps)

    controller = controller_of(last + 1)
    assert controller_of(last).never_freezes() and not controller.never_freezes()
    known = controller.schedule() if name in ("static", "schedule") else None
    assert known is None if name in ("paper", "percentile") else known == ((last, {"static": 3, "schedule": 6}[name]),)
    frozen, history = 0, []
    for step in range(last + 1):
        if controller.due(step):
            frozen = controller.decide(step, frozen=frozen).frozen
        history.append(frozen)
        # Of the leading half they do not change; of the last block they are smallest.
        controller.observe([(12 - block) * (1 + (block >= 6) * step) for block in range(12)], num_steps=1)
    assert not any(history[:last]) and history[last]


@pytest.mark.parametrize("patience", [1, 2])
def test_a_schedule_that_thaws_is_announced(patience: int) -> None:
    built = policy("top_down", max_frozen=7)
    settings: dict[str, Any] = {"every_steps": 10, "warmup_steps": 5, "num_blocks": 12, "patience": patience}
    controller = AutoFreeze(built, total_steps=50, max_frozen=7, **settings)
    known, history = controller.schedule(), frozen_by_step(controller, num_steps=50)
    changes = [(step, now) for step, (before, now) in enumerate(zip([0, *history], history)) if now != before]
    assert known is not None and list(known) == changes and len(changes) >= 3


def test_a_freeze_that_the_guard_cannot_judge_is_not_announced() -> None:
    """It needs three passes, one every 50 steps, before it, and two behind it."""

    def controller_of(total_steps: int) -> AutoFreeze:
        guard = Guard(50)
        return AutoFreeze(
            policy("schedule"), every_steps=90, warmup_steps=0, num_blocks=12, guard=guard, total_steps=total_steps
        )

    assert controller_of(300).never_freezes() and controller_of(300).schedule() == ()
    assert not controller_of(301).never_freezes() and controller_of(301).schedule() == ((180, 9),)
    assert controller_of(401).schedule() == ((180, 9),), "that of step 270 meets one that is tentative until step 300"


def test_no_policy_is_never_due() -> None:
    built = build_policy(FreezeConfig(policy="none"), num_blocks=12)
    controller = AutoFreeze(built, every_steps=1, warmup_steps=0, num_blocks=12)
    assert not any(controller.due(step) for step in range(10))


@pytest.mark.parametrize(("max_frozen", "expected"), [(None, [10, 8, 6, 4, 2, 0, 0]), (5, [5, 3, 1, 0, 0, 0, 0])])
def test_top_down_thaws_a_sixth_at_a_time(max_frozen: int | None, expected: list[int]) -> None:
    built = policy("top_down", max_frozen=max_frozen)
    controller = AutoFreeze(built, every_steps=1, warmup_steps=0, num_blocks=12)
    assert controller.may_unfreeze and frozen_by_step(controller, num_steps=7) == expected


def test_a_policy_that_may_not_unfreeze_never_does() -> None:
    controller = AutoFreeze(policy("static", max_frozen=2), every_steps=1, warmup_steps=0, num_blocks=12)
    assert controller.decide(1, frozen=5).frozen == 5


def test_norms_are_the_mean_over_the_interval_and_start_anew_with_the_next() -> None:
    controller = AutoFreeze(policy("paper", num_blocks=3), every_steps=4, warmup_steps=0, num_blocks=3)
    controller.observe([1.0, 2.0, 30.0], num_steps=1)
    controller.observe([7.0, 4.0, 6.0], num_steps=3)
    assert controller.decide(4, frozen=0).norms == (2.0, 1.5, 9.0)
    controller.observe([4.0, 2.0, 1.0], num_steps=2)
    assert controller.decide(8, frozen=0).norms == (2.0, 1.0, 0.5)


def test_a_restored_controller_decides_alike() -> None:
    def fresh() -> AutoFreeze:
        return AutoFreeze(policy("paper", num_blocks=3), every_steps=4, warmup_steps=0, num_blocks=3)

    undisturbed, before, after = fresh(), fresh(), fresh()
    for controller in (undisturbed, before):
        controller.observe([9.0, 1.0, 5.0], num_steps=2)
    after.load_state_dict(before.state_dict())
    for controller in (undisturbed, after):
        controller.observe([1.0, 1.0, 0.5], num_steps=2)
    assert after.decide(4, frozen=0) == undisturbed.decide(4, frozen=0)


def test_a_restored_percentile_knows_the_interval_before() -> None:
    """Blocks 0 and 1 hardly change from one interval to the next; without the first one nothing could freeze."""

    def fresh() -> AutoFreeze:
        built = policy("percentile", num_blocks=4, percentile=60)
        return AutoFreeze(built, every_steps=4, warmup_steps=0, num_blocks=4, patience=2)

    before, after = fresh(), fresh()
    for step, norms in ((4, [1.0, 2.0, 4.0, 8.0]), (8, [1.0, 2.0, 8.0, 4.0])):
        before.observe([4 * norm for norm in norms], num_steps=4)
        assert before.decide(step, frozen=0).frozen == 0, "one answer is too few for a patience of 2"
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    after.observe([4.0, 8.4, 16.0, 32.0], num_steps=4)
    assert after.decide(12, frozen=0).frozen == 2


# What is refused


@pytest.mark.parametrize("name", ["none", "static", "schedule", "paper"])
@pytest.mark.parametrize("alpha", [0.0, 1.0, -0.5, 1.5, float("nan")])
def test_alpha_outside_0_and_1_is_refused(name: str, alpha: float, tmp_path: Path) -> None:
    config = configuration(tmp_path, f"freeze.policy={name}", "freeze.max_frozen=4")
    with pytest.raises(UserError, match=r"^freeze\.alpha: .* above 0 and below 1$"):
        config.with_overrides({"freeze.alpha": alpha})


@pytest.mark.parametrize("name", ["none", "static", "schedule", "paper"])
@pytest.mark.parametrize("max_frozen", [13, -1])
def test_more_blocks_than_there_are_is_refused(name: str, max_frozen: int) -> None:
    config = FreezeConfig(policy=name).model_copy(update={"max_frozen": max_frozen})
    with pytest.raises(UserError, match=r"^freeze\.max_frozen: .* at most 12, which are all blocks$"):
        build_policy(config, num_blocks=12)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("freeze.alpha", "0"),
        ("freeze.alpha", "1"),
        ("freeze.alpha", "-0.5"),
        ("freeze.alpha", "1.5"),
        ("freeze.alpha", ".nan"),
        ("freeze.every", "-1 epoch"),
        ("freeze.every", "-50 steps"),
        ("freeze.every", "0 steps"),
        ("freeze.warmup", "-1 epoch"),
        ("freeze.max_frozen", "-1"),
    ],
)
def test_a_configuration_refuses_them_in_one_line(tmp_path: Path, key: str, value: str) -> None:
    with pytest.raises(UserError, match=rf"\A{key}: [^\n]+\Z"):
        configuration(tmp_path, f"{key}={value}")


# percentile


@pytest.mark.parametrize(
    ("percentile", "frozen", "before", "norms", "expected"),
    [
        # changes 0.1, 0.2, 0.4, 0.8; the median lies between the second and the third
        (50, 0, [10, 10, 10, 10], [9, 8, 6, 2], 2),
        (0, 0, [10, 10, 10, 10], [9, 8, 6, 2], 0),
        (100, 0, [10, 10, 10, 10], [9, 8, 6, 2], 3),
        (50, 0, [10, 10, 10, 10], [2, 6, 8, 9], 0),
        # of the active blocks alone: 0.4, 0.8
        (50, 2, [10, 10, 10, 10], [0, 0, 6, 2], 3),
        (50, 4, [10, 10, 10, 10], [0, 0, 0, 0], 4),
        (50, 0, None, [9, 8, 6, 2], 0),
        # growth is a change as well; a block that did not move at all has changed without measure
        (50, 0, [10, 10, 0, 10], [11, 11, 1, 30], 2),
    ],
)
def test_percentile_against_its_table(
    percentile: float, frozen: int, before: list[float] | None, norms: list[float], expected: int
) -> None:
    built = policy("percentile", num_blocks=4, percentile=percentile)
    assert built.decide(Signals(1, frozen, norms, before)) == expected


class Dictated:
    """Answers from a list."""

    needs_norms = False
    may_unfreeze = True

    def __init__(self, answers: list[int]) -> None:
        self.answers = answers

    def decide(self, signals: Signals) -> int:
        return self.answers[signals.interval - 1]


@pytest.mark.parametrize(
    ("patience", "answers", "expected"),
    [
        (1, [2, 5, 3], [2, 5, 3]),
        (2, [2, 5, 3, 4, 1, 0, 6], [0, 2, 3, 3, 3, 1, 1]),
        (3, [2, 5, 3, 4, 1, 1, 1], [0, 0, 2, 3, 3, 3, 1]),
    ],
)
def test_hysteresis(patience: int, answers: list[int], expected: list[int]) -> None:
    def controller() -> AutoFreeze:
        return AutoFreeze(Dictated(answers), every_steps=1, warmup_steps=0, num_blocks=6, patience=patience)

    one, frozen, found = controller(), 0, []
    for step in range(1, len(answers) + 1):
        frozen = one.decide(step, frozen=frozen).frozen
        found.append(frozen)
        resumed = controller()
        resumed.load_state_dict(one.state_dict())
        one = resumed
    assert found == expected
