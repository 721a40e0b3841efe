"""Views: few augmented inputs of each sample in turn, and the number of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from laws import STATIC, Case, configuration
from ranks import RankPool

from pipetransformer.cache.views import in_views, view_numbers
from pipetransformer.config import DataConfig
from pipetransformer.data import Dataset, ImageDataset, ImagePreprocessing, alone, describe, load_image_data
from pipetransformer.process.world import World
from pipetransformer.run.job import build_job


def pixels(data: Dataset, ids: np.ndarray, *, epoch: int) -> torch.Tensor:
    return data.inputs(ids, length=32, epoch=epoch)["pixel_values"]


def test_views_take_turns() -> None:
    settings = DataConfig(name="digits", augment="basic", max_train_samples=20)
    preprocessing = ImagePreprocessing(32, 1, mean=(0.5,), std=(0.5,), interpolation="bilinear")
    train = load_image_data(settings, info=describe(settings), preprocessing=preprocessing, seed=3)["train"]
    assert isinstance(train, ImageDataset)
    ids, few = np.arange(20), train.with_views(3)
    seen = [pixels(few, ids, epoch=epoch) for epoch in range(6)]
    assert all(torch.equal(seen[epoch], pixels(train, ids, epoch=epoch % 3)) for epoch in range(6))
    assert not torch.equal(seen[0], seen[1]) and train.views is None and few.fingerprint != train.fingerprint
    every, mixed = in_views(few), np.array([45, 3, 24, 5])
    assert len(every) == 60 and len(every.lengths) == 60 and every.views == 1
    expected = torch.stack([seen[number // 20][number % 20] for number in mixed])
    assert torch.equal(pixels(every, mixed, epoch=0), expected)
    assert view_numbers(few, np.array([5, 4]), epoch=5).tolist() == [45, 44]
    assert in_views(train) is train and view_numbers(train, ids, epoch=5) is ids


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ((), None),  # nothing freezes
        (("freeze.policy=schedule",), 2),
        (("freeze.policy=schedule", "train.epochs=20"), 5),
        (("freeze.policy=schedule", "train.epochs=20", "cache.host_budget=250 kB"), 3),
        (("freeze.policy=schedule", "train.epochs=20", "cache.host_budget=240 kB"), 2),  # 39 kB are to evaluate on
        (("freeze.policy=schedule", "cache.host_budget=140 kB"), None),  # one view alone
        (("freeze.policy=schedule", "cache.enabled=false"), None),
        (("cache.views=7", "cache.host_budget=1 B"), 7),
        (("freeze.policy=schedule", "cache.views=null"), None),
    ],
)
def test_views_are_as_many_as_epochs_and_budget_are_worth(
    keys: tuple[str, ...], expected: int | None, ranks: RankPool
) -> None:
    assert ranks.run(1, settled_views, keys) == [expected]


def settled_views(world: World, keys: tuple[str, ...]) -> int | None:
    """Of 64 samples of 17 positions of 16 numbers in float32: 70 kB a view."""
    config = configuration("vit", [*Case("vit", 1, STATIC[1], precision="float32").overrides(""), *keys])
    augmented = config.with_overrides(
        {"data.augment": "basic", "data.max_train_samples": 64, "data.max_eval_samples": 36}
    )
    job = build_job(augmented, world, lead=alone)
    found: Any = job.config.cache.views
    assert job.datasets["train"].views == found
    return found
