"""The linear probe: each head by hand, the same scores on every rank, and the number of blocks that they free."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from laws import STATIC, Case, configuration
from ranks import RankPool
from tiny import tiny_bert, tiny_squad, tiny_sst2, tiny_text_model

from pipetransformer.data import Dataset, alone
from pipetransformer.engine import linear_probe
from pipetransformer.engine.linear_probe import boundary_scores, explained
from pipetransformer.freeze import AutoFreeze, free_blocks, transfer
from pipetransformer.models import Chain
from pipetransformer.process.world import World
from pipetransformer.run import events
from pipetransformer.run.job import build_job
from pipetransformer.trainer import Trainer


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("texts")
    tiny_bert(folder / "bert", layers=6)
    tiny_sst2(folder / "sst2", 150, num_eval_samples=40)
    tiny_squad(folder / "squad", 40, num_eval_questions=10)
    tiny_text_model(folder / "bert-qa", "Bert-qa")
    return str(folder)


@pytest.mark.parametrize("width", [12, 40])
def test_each_sample_is_judged_by_a_head_of_all_others(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    """Against as many ridge regressions as there are samples, each with its own mean."""
    random = np.random.default_rng(0)
    features = random.normal(size=(30, 12))
    targets = np.eye(3)[(features[:, :3] + 0.3 * random.normal(size=(30, 3))).argmax(1)]
    if width > 30:
        features = features @ random.normal(size=(12, width))
    features /= features.std(0)
    monkeypatch.setattr(linear_probe, "_PENALTIES", np.array([0.3]))
    centred = features - features.mean(0)
    centred /= centred.std(0)
    penalty = 0.3 * np.linalg.eigvalsh(centred @ centred.T).mean()
    errors = 0.0
    for out in range(30):
        rest = np.delete(np.arange(30), out)
        x, y = centred[rest] - centred[rest].mean(0), targets[rest] - targets[rest].mean(0)
        dual = np.linalg.solve(x @ x.T + penalty * np.eye(29), y)
        told = targets[rest].mean(0) + (centred[out] - centred[rest].mean(0)) @ x.T @ dual
        errors += float(((told - targets[out]) ** 2).sum())
    expected = 1 - errors / float(((targets - targets.mean(0)) ** 2).sum())
    assert expected > 0.01
    assert explained(features, targets) == pytest.approx(expected, rel=1e-6)


def test_noise_explains_nothing_and_the_labels_themselves_everything() -> None:
    random = np.random.default_rng(1)
    labels = np.eye(2)[random.integers(0, 2, size=200)]
    assert explained(random.normal(size=(200, 20)), labels) < 0.05
    assert explained(np.concatenate([labels, random.normal(size=(200, 3))], 1), labels) > 0.95
    assert explained(np.zeros((200, 4)), labels) == 0.0
    assert explained(random.normal(size=(200, 20)), np.ones((200, 1))) == 0.0, "one class"


@pytest.mark.parametrize(
    ("scores", "share", "free"),
    [
        ([0.2] * 13, 0.0, (0, 0, 0)),
        ([0.2, 0.1, 0.1, 0.0], 0.0, (0, 0, 0)),
        ([0.2, *[0.6] * 12], 0.5, (4, 4, 10)),
        ([0.0, *[0.39] * 12], 0.39, (4, 4, 10)),
        ([0.0, *[0.24] * 12], 0.24, (0, 0, 0)),
        ([0.0, *[0.25] * 6], 0.25, (2, 2, 5)),
        ([0.0, *[0.09] * 12], 0.09, (0, 0, 0)),
        ([0.0, *[0.3] * 4], 0.3, (2, 2, 3)),
        ([0.0, 0.5, 1.0], 1.0, (1, 1, 1)),
        ([1.0, 1.0, 1.0], 0.0, (0, 0, 0)),
        ([0.95, *[1.0] * 12], 1.0, (4, 4, 10)),
        ([0.97, *[1.0] * 12], 0.0, (0, 0, 0)),  # too little is left to tell anything by
    ],
)
def test_blocks_are_free_where_they_hold_a_quarter_of_the_task(
    scores: list[float], share: float, free: tuple[int, int, int]
) -> None:
    num_blocks = len(scores) - 1
    found = [free_blocks(scores, num_blocks=num_blocks, is_pretrained=True, to_come=s) for s in (1.0, 0.5, 0.05)]
    assert transfer(scores) == pytest.approx(share) and found == list(free)
    assert free_blocks(scores, num_blocks=num_blocks, is_pretrained=True) == free[0]


def test_targets_of_the_samples_alone_are_made() -> None:
    """Not of all training samples: a million of a thousand classes would take 8 GB a rank."""
    labels = torch.arange(2_000_000) % 5_000
    ids, dataset = np.array([7, 5_004]), mock.Mock(kind="classes", labels=labels)
    tracemalloc.start()
    targets = linear_probe._targets(dataset, ids)
    assert tracemalloc.get_traced_memory()[1] < 10e6
    tracemalloc.stop()
    assert targets.shape == (2, 5_000) and targets[0, 7] == targets[1, 4] == 1 and targets.sum() == 2


def scores_of(world: World, model: str, data: str) -> tuple[tuple[float, ...] | None, bool]:
    config = configuration(model, Case(model, world.size, STATIC[1]).overrides(data))
    job = build_job(config, world, lead=alone)
    scores = boundary_scores(job.chain, job.datasets["train"], world=world, rows=8)
    return scores, all(module.training for module in job.chain.model.modules())


@pytest.mark.parametrize("model", ["vit", "bert"])
def test_all_ranks_have_the_same_scores_as_one(model: str, ranks: RankPool, texts: str) -> None:
    ((alone_scores, trains),) = ranks.run(1, scores_of, model, texts)
    assert alone_scores is not None and len(alone_scores) == 7 and max(alone_scores) <= 1 and trains
    for scores, _ in ranks.run(2, scores_of, model, texts):
        assert scores == pytest.approx(alone_scores, abs=1e-3)
    found = ranks.run(2, scores_of, model, texts)
    assert found[0] == found[1]


def batches_of(world: World, data: str, rows: int) -> list[tuple[list[int], int]]:
    """Sample ids and padded length of every batch of this rank."""
    config = configuration("bert", Case("bert", world.size, STATIC[1]).overrides(data))
    job, seen, pooled = build_job(config, world, lead=alone), list[tuple[list[int], int]](), linear_probe.pooled

    def noted(chain: Chain, dataset: Dataset, batches: Sequence[tuple[np.ndarray, int]]) -> list[list[np.ndarray]]:
        seen.extend((ids.tolist(), length) for ids, length in batches)
        return pooled(chain, dataset, batches)

    with mock.patch.object(linear_probe, "pooled", noted), mock.patch.object(linear_probe, "_MANY", 6):
        boundary_scores(job.chain, job.datasets["train"], world=world, rows=rows)
    return seen


@pytest.mark.parametrize(("rows", "most"), [(1, 4), (2, 6), (7, 7)])
def test_a_forward_takes_four_times_the_samples_of_training_where_they_are_few(
    ranks: RankPool, texts: str, rows: int, most: int
) -> None:
    (batches,) = ranks.run(1, batches_of, texts, rows)
    assert max(len(ids) for ids, _ in batches) == most


def test_ranks_share_out_a_quarter_of_the_samples_by_their_length(ranks: RankPool, texts: str) -> None:
    shares = ranks.run(3, batches_of, texts, 1)
    positions = [[len(ids) * length for ids, length in share] for share in shares]
    sums = sorted(map(sum, positions))
    assert sums[-1] - sums[0] <= max(map(max, positions)), "no rank could give its neighbour a batch"
    assert len({length for share in shares for _, length in share}) > 1
    seen = [one for share in shares for ids, _ in share for one in ids]
    assert len(seen) == len(set(seen)) == 150 // 4


def test_questions_have_none(ranks: RankPool, texts: str) -> None:
    assert ranks.run(1, scores_of, "bert-qa", texts)[0][0] is None


def probed_run(world: World, folder: str, extra: tuple[str, ...]) -> tuple[list[events.Probed], object]:
    heard: list[events.Probed] = []

    def note(event: events.Event) -> None:
        if isinstance(event, events.Probed):
            heard.append(event)

    overrides = [*Case("vit", world.size, STATIC[2]).overrides(""), *extra, f"run.dir={folder}", "run.id=probed"]
    trainer = Trainer(configuration("vit", overrides), world, timed=True, listeners=[note])
    trainer.run()
    return heard, trainer.autofreeze.state_dict()["scores"]


def test_a_run_that_asks_for_it_is_told_once(ranks: RankPool, tmp_path: Path) -> None:
    for heard, kept in ranks.run(2, probed_run, str(tmp_path / "a"), ("freeze.probe=true", "train.epochs=1")):
        (event,) = heard
        assert event.scores == kept and event.scores is not None and len(event.scores) == 7 and event.seconds > 0
    assert ranks.run(2, probed_run, str(tmp_path / "b"), ("train.epochs=1",))[0] == ([], None)


def test_scores_are_part_of_a_checkpoint() -> None:
    def controller() -> AutoFreeze:
        return AutoFreeze(None, every_steps=1, warmup_steps=0, num_blocks=6)

    one, other = controller(), controller()
    one.probed((0.1, 0.2))
    other.load_state_dict(one.state_dict())
    assert other.state_dict()["scores"] == (0.1, 0.2)
