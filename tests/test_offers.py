"""What AutoCache offers, and the bytes that steps read, by hand."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from laws import Case, configuration

from pipetransformer.cache import ActivationStore, AutoCache
from pipetransformer.cache.shared import ActivationCache
from pipetransformer.data import alone
from pipetransformer.plan.prefix import PrefixWork
from pipetransformer.process.world import World
from pipetransformer.run.job import build_job

WORLD = World(0, 1, 0, 1, torch.device("cpu"))
NUM_TRAIN, NUM_EVAL, LENGTH, EVALUATIONS = 150, 40, 8, 3


@pytest.fixture
def autocache() -> Iterator[AutoCache]:
    config = configuration("vit", Case("vit", 1, ()).overrides(""))
    job = build_job(config, WORLD, lead=alone)
    made = AutoCache(config, chain=job.chain, datasets=job.datasets, world=WORLD)
    yield made
    made.close()


def passed(first: int, stop: int) -> list[PrefixWork]:
    """An advance pass of both splits over these units."""
    return [PrefixWork(first, stop, LENGTH, NUM_TRAIN), PrefixWork(first, stop, LENGTH, NUM_EVAL)]


def rest(first: int, stop: int) -> PrefixWork:
    """What evaluations compute of the prefix."""
    return PrefixWork(first, stop, LENGTH, NUM_EVAL, times=EVALUATIONS)


def works(offers: dict[int | None, tuple[PrefixWork, ...]]) -> dict[int | None, list[PrefixWork]]:
    return {cached: sorted(work, key=repr) for cached, work in offers.items()}


def test_an_empty_cache_offers_none_and_the_whole_prefix(autocache: AutoCache) -> None:
    found = works(autocache.offers(2, evaluations=EVALUATIONS))
    assert found == {None: [rest(0, 3)], 2: sorted([rest(3, 3), *passed(0, 3)], key=repr)}


def test_a_cache_at_block_2_goes_on_from_there(autocache: AutoCache) -> None:
    autocache.boundary = 2
    found = works(autocache.offers(4, evaluations=EVALUATIONS))
    assert found == {
        None: [rest(0, 5)],
        2: [rest(3, 5)],  # it is there
        4: sorted([rest(5, 5), *passed(3, 5)], key=repr),
    }


def test_what_thaws_must_be_cached_anew(autocache: AutoCache) -> None:
    autocache.boundary = 4
    found = works(autocache.offers(2, evaluations=EVALUATIONS))
    assert found == {None: [rest(0, 3)], 2: sorted([rest(3, 3), *passed(0, 3)], key=repr)}


def test_a_cache_that_was_declined_is_not_offered(autocache: AutoCache) -> None:
    autocache.declined = "no memory"
    assert works(autocache.offers(2, evaluations=EVALUATIONS)) == {None: [rest(0, 3)]}


def test_a_boundary_that_stays_is_the_only_one(autocache: AutoCache) -> None:
    autocache.boundary, autocache.stays = 2, "no room"
    assert list(autocache.offers(4, evaluations=EVALUATIONS)) == [None, 2]


def test_the_bytes_of_a_step_are_those_of_its_samples(autocache: AutoCache) -> None:
    """17 tokens of 16 numbers of 8 bytes a picture; nothing before there is a store."""
    assert autocache.read_bytes(np.arange(5)) == 0 and autocache.num_bytes == 0
    layout = autocache._layouts()["train"]
    autocache._cache = ActivationCache({"train": ActivationStore.reserve(layout)})
    autocache.boundary = 2
    assert autocache.read_bytes(np.arange(5)) == 5 * 17 * 16 * 8
    autocache.boundary = 6
    assert autocache.read_bytes(np.arange(5)) == 5 * 16 * 8, "the head reads one row"
    assert autocache.num_bytes == NUM_TRAIN * ((17 + 1) * 16 * 8 + 1), "with a row apart for each"
