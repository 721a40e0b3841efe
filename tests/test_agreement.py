"""Ranks that do not hold the same end the job with their names, before they train on."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch
from laws import STATIC, Case, configuration
from ranks import RankPool

from pipetransformer.data import alone
from pipetransformer.errors import UserError
from pipetransformer.process.agreement import Disagreement
from pipetransformer.process.world import World
from pipetransformer.run import events
from pipetransformer.run.job import build_job
from pipetransformer.trainer import Trainer


def disagrees(world: World, folder: str, how: str, extra: tuple[str, ...]) -> tuple[int, str]:
    """Rank 1 has other samples, or one weight that is off by its last bit behind step 3: (steps done, the error)."""
    overrides = [*Case("vit", world.size, STATIC[1]).overrides(""), *extra, f"run.dir={folder}", f"run.id={how}"]

    def note(event: events.Event) -> None:
        if how == "weights" and world.rank == 1 and isinstance(event, events.Stepped) and event.step == 3:
            parameter = next(reversed(trainer.engine.layout.parameters.values()))
            with torch.no_grad():
                first = parameter.view(-1)[:1]
                first.copy_(torch.nextafter(first, first + 1))

    own = f"{'other' if how == 'samples' and world.rank == 1 else 'same'} samples"
    trainer = Trainer(configuration("vit", overrides), world, listeners=[note])
    try:
        with mock.patch("pipetransformer.run.job.Job.train_digest", lambda *_: own):
            trainer.run()
    except Disagreement as error:
        return trainer.step, str(error)
    return trainer.step, ""


@pytest.mark.parametrize("how", [pytest.param("samples", marks=pytest.mark.full), "weights", "nothing"])
def test_ranks_that_differ_are_named(how: str, ranks: RankPool, tmp_path: Path) -> None:
    (step, error), other = ranks.run(2, disagrees, str(tmp_path), how, ("run.verify_every=3 steps",))
    assert (step, error) == other, "all ranks end alike"
    if how == "samples":
        assert (
            step == 0 and error.startswith("rank 1 has another start than the other ranks") and "other samples" in error
        )
    elif how == "weights":
        assert step == 3 and error.startswith("step 3: rank 1 has other weights of head.")
    else:
        assert not error and step > 3


def refused(world: World, folder: str) -> str:
    settings = (*Case("vit", 2, STATIC[1]).overrides(""), f"run.dir={folder}", f"train.lr={0.1 * (1 + world.rank)}")
    with pytest.raises(UserError) as caught:
        Trainer(configuration("vit", settings), world, timed=False)
    return str(caught.value)


def test_ranks_with_other_settings_are_told_which(ranks: RankPool, tmp_path: Path) -> None:
    """Nodes that come and go have no roll call."""
    told = "train.lr: rank 1 has 0.2 and rank 0 0.1; give all the same"
    assert ranks.run(2, refused, str(tmp_path)) == [told] * 2
    assert not list(tmp_path.iterdir())


def test_nothing_is_compared_where_it_is_off(ranks: RankPool, tmp_path: Path) -> None:
    found = ranks.run(2, disagrees, str(tmp_path), "weights", ("run.verify_every=null",))
    assert [error for _, error in found] == ["", ""]


def test_the_digest_of_an_epoch_tells_its_samples_and_their_order(ranks: RankPool) -> None:
    (same, again, later), _ = ranks.run(2, digests_of_epochs)
    assert same == again != later


def digests_of_epochs(world: World) -> tuple[str, str, str]:
    job = build_job(configuration("vit", Case("vit", 2, STATIC[1]).overrides("")), world, lead=alone)
    return job.train_digest(0), job.train_digest(0), job.train_digest(1)
