"""The guard on accuracy: tentative freezes, judged by samples set aside, and exact through all of it."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from laws import STATIC, Case, Weights, configuration, deviation, final_weights, plain_run
from ranks import RankPool

from pipetransformer.data import Dataset
from pipetransformer.data.set_aside import set_aside
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
    return 0.3 + 4.0 / step


def watched(guard: Guard, *, frozen_at: int, rise: float, stop: int, start: int = 0) -> list[Verdict]:
    """Passes along a curve; from the freeze on the loss lies ``rise`` above it, with a standard error of 0.07."""
    verdicts = []
    for step in range(start + EVERY, stop + 1, EVERY):
        behind = step > frozen_at
        verdicts.append(guard.observe(step, losses(curve(step) + rise * behind, noise=0.5 * behind)))
        if step == frozen_at:
            guard.froze(step, before=1)
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


def test_the_curve_of_the_passes() -> None:
    passes = [Pass(0, 9.0), *(Pass(step, curve(step)) for step in (10, 20, 30))]
    assert predicted_loss(passes, step=50) == pytest.approx(curve(50)), "step 0 is no part of the curve"
    assert predicted_loss(passes[:3], step=50) == curve(20), "two points tell no curve"
    assert paired_error([1.0, 2.0], [0.0, 1.0]) == 0 and paired_error([1.0], [0.0]) == float("inf")


# Samples set aside


class Numbered(Dataset):
    """Samples whose labels are their numbers; inputs tell number and epoch."""

    kind, metric_names, augmented, fingerprint, num_tokens = "classes", ("accuracy",), True, "numbered", None

    def __init__(self, num_samples: int) -> None:
        self.labels, self.lengths = torch.arange(num_samples), np.full(num_samples, 8)

    def inputs(
        self, ids: np.ndarray, *, length: int, epoch: int | None, keys: Collection[str] | None = None
    ) -> dict[str, torch.Tensor]:
        return {"x": torch.tensor([[int(i), -1 if epoch is None else epoch] for i in ids])}


def test_a_tenth_is_set_aside_and_nothing_is_in_both() -> None:
    data = Numbered(205)
    parts = set_aside(data, seed=0)
    assert parts is not None
    train, aside = parts
    ids = [set(part.labels.tolist()) for part in parts]  # a sample's label is its number
    assert len(aside) == 20 and not ids[0] & ids[1] and len(ids[0] | ids[1]) == 205
    assert train.augmented and not aside.augmented
    again = set_aside(data, seed=1)
    assert again is not None and set(again[1].labels.tolist()) != ids[1]
    assert len({train.fingerprint, aside.fingerprint, again[0].fingerprint, data.fingerprint}) == 4
    rows = np.array([3, 0])
    assert aside.inputs(rows, length=8, epoch=2)["x"][:, 0].tolist() == aside.labels[rows].tolist()
    assert aside.inputs(rows, length=8, epoch=2)["x"][:, 1].tolist() == [-1, -1], "no epoch, no augmentation"
    assert train.inputs(rows, length=8, epoch=2)["x"][:, 1].tolist() == [2, 2]


def test_samples_of_a_group_go_together_and_few_leave_none() -> None:
    data = Numbered(100)
    data.groups = np.arange(100) // 3
    parts = set_aside(data, seed=0)
    assert parts is not None and 8 <= len(parts[1]) <= 10
    groups = [set(part.groups.tolist()) for part in parts if part.groups is not None]
    assert not groups[0] & groups[1]
    assert set_aside(Numbered(9), seed=0) is None
    most = set_aside(Numbered(20_000), seed=0)
    assert most is not None and len(most[1]) == 1000


# Whole runs


def guarded_run(
    world: World, folder: str, extra: list[str], undoes: bool
) -> tuple[Weights | None, list[tuple[int, int, int | None]], list[Verdict]]:
    """A run with a pass every 2 steps: (weights on rank 0, (step, frozen, cached) of each plan, verdicts)."""
    plans: list[tuple[int, int, int | None]] = []
    verdicts: list[Verdict] = []

    def note(event: events.Event) -> None:
        if isinstance(event, events.Adopted):
            plans.append((event.step, event.plan.frozen, event.plan.cached))
        elif isinstance(event, events.Watched):
            verdicts.append(event.verdict)

    overrides = [*Case("vit", world.size, STATIC[1]).overrides(""), *extra, f"run.dir={folder}", "run.id=guarded"]
    told = -1.0 if undoes else 100.0
    with (
        mock.patch("pipetransformer.freeze.controller.guard_interval", lambda batches: 2),
        mock.patch("pipetransformer.freeze.guard.predicted_loss", lambda passes, step: told),
    ):
        trainer = Trainer(configuration("vit", overrides), world, listeners=[note])
        trainer.run()
    return final_weights(trainer), plans, verdicts


GUARDED = ["freeze.policy=static", "freeze.max_frozen=4", "freeze.warmup=4 steps", "freeze.every=2 steps"]


@pytest.mark.parametrize("undoes", [False, True])
def test_a_guarded_run_is_the_plain_loop_on_the_rest(undoes: bool, ranks: RankPool, tmp_path: Path) -> None:
    extra = [*GUARDED, "freeze.guard=true"]
    (weights, plans, verdicts), *others = ranks.run(2, guarded_run, str(tmp_path), extra, undoes)
    assert all((plans, verdicts) == (theirs, heard) for _, theirs, heard in others), "ranks decided differently"
    frozen_at = {step: frozen for step, frozen, _ in plans}
    assert frozen_at[4] == 4 and all(frozen == (0 if undoes else 4) for step, frozen in frozen_at.items() if step == 8)
    assert all(cached is None for step, _, cached in plans if step < 8), "nothing is cached before a freeze is kept"
    case = Case("vit", 2, tuple((step, frozen, 1) for step, frozen in frozen_at.items()))
    frozen = tuple((step, frozen) for step, frozen, _ in case.moves)
    expected, _ = plain_run("vit", frozen, (*case.overrides(""), *GUARDED, "freeze.guard=true"))
    assert weights is not None and deviation(weights, expected) < 1e-10
