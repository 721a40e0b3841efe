"""The benchmark of the guard's samples: its verdicts by few of them, on losses made up here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from laws import REPOSITORY
from tiny import tiny_bert

from benchmarks.guard import __main__ as guard
from benchmarks.guard.recorded import EVERY, NUM_SAMPLES
from pipetransformer.config import load_config
from pipetransformer.errors import UserError

STEPS = 13
Passes = Sequence[Mapping[str, object]]


def passes(*, harm: float = 0.0, step: int = 200) -> Passes:
    """Losses that fall evenly, each with noise of its own; behind ``step`` they lie higher by ``harm``."""
    random = np.random.default_rng(0)
    found = []
    for number in range(1, STEPS + 1):
        at = number * EVERY
        losses = 1.0 - number / 50 + random.normal(scale=0.3, size=NUM_SAMPLES) + harm * (at > step)
        found.append({"step": at, "moved": number / 14, "losses": losses.tolist()})
    return found


def test_more_samples_tell_a_smaller_harm() -> None:
    of_harm = passes(harm=0.1)
    few, many = (guard.undone(of_harm, step=200, num_samples=n) for n in (16, 512))
    assert 0.3 < few < 0.8 and many > 0.98
    assert guard.excess(of_harm, step=200) == pytest.approx(0.1, abs=0.03)


def test_where_nothing_froze_each_judgeable_pass_is_one() -> None:
    harmless = passes()
    steps = guard.judgeable(harmless)
    assert steps == [150, 200, 250, 300, 350, 400, 450, 500, 550], "three passes before, two behind"
    row = guard.row_of("bert", [{"accuracy": 0.8, "passes": harmless}], step=200, frozen=0)
    assert row["frozen"] == "nothing" and row["accuracy"] == 0.8
    assert all(2 < row[f"undone by {n}"] < 40 for n in guard.SIZES), "about a sixth, as of a normal error"
    assert guard.undone(harmless, step=None, num_samples=64) != guard.undone(harmless, step=200, num_samples=64)


def test_settings_of_its_runs_are_settings() -> None:
    for freezes in guard.FREEZES.values():
        for step, frozen in freezes:
            config = load_config(
                REPOSITORY / "config" / "train_config_sst2_all_in_one.yaml", guard.how_of(step, frozen)
            )
            assert config.freeze.is_guarded and config.freeze.policy == "static"
            assert (config.freeze.max_frozen == frozen and config.freeze.warmup.steps(219) == step) or not frozen


def test_a_model_of_other_blocks_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="^--model: .* has 4 blocks; give an encoder of 6 or 12$"):
        guard.freezes_of(tiny_bert(tmp_path / "bert", layers=4))
