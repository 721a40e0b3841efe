"""The stored forms of activations: what an 8-bit number may be off, whole stores, and a whole run."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from laws import STATIC, Case, configuration, deviation, final_weights
from ranks import RankPool

from pipetransformer.cache.codec import decode, encode, rounding, stored_width
from pipetransformer.cache.store import ActivationStore, StoreLayout
from pipetransformer.process.world import World
from pipetransformer.run import events
from pipetransformer.trainer import Trainer


@given(seed=st.integers(0, 1000), width=st.integers(1, 40), power=st.integers(-12, 12))
def test_a_number_is_off_by_half_a_step_of_its_position_at_most(seed: int, width: int, power: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(2, 3, width, generator=generator) * 10.0**power
    hidden[0, 1] = 0.0
    stored = encode(hidden, torch.int8)
    assert stored.shape == (2, 3, stored_width(width, torch.int8)) and stored.dtype == torch.int8
    back = decode(stored, torch.float32)
    step = hidden.abs().amax(-1, keepdim=True) / 127
    assert ((back - hidden).abs() <= step * 0.5001).all() and not back[0, 1].any()
    assert torch.equal(encode(back, torch.int8)[..., :width], stored[..., :width]), "a second rounding changes nothing"


def test_other_types_are_stored_as_they_are() -> None:
    hidden = torch.randn(2, 3, 4, dtype=torch.bfloat16)
    assert torch.equal(encode(hidden, torch.bfloat16), hidden) and torch.equal(decode(hidden, torch.bfloat16), hidden)
    assert rounding(hidden, torch.float32) == 0 and stored_width(4, torch.float32) == 4


def test_the_error_is_relative() -> None:
    hidden = torch.tensor([[[127.0, 0.4, -0.4, 3.0]]])
    assert rounding(hidden, torch.int8) == pytest.approx(np.sqrt(2 * 0.16 / (127**2 + 2 * 0.16 + 9)))


@pytest.mark.parametrize("ids", [[2, 3, 4], [4, 1]])  # a run of slots, and some
def test_a_store_of_integers_gives_back_what_it_was_given(ids: list[int]) -> None:
    layout = StoreLayout(np.full(6, 5), width=7, dtype=torch.int8, has_rows=True)
    assert layout.num_bytes == 6 * (5 + 1) * (7 + 4) + 6
    store = ActivationStore.reserve(layout)
    hidden = torch.randn(len(ids), 5, 7)
    store.write(np.array(ids), hidden, boundary=2)
    read = store.read(np.array(ids), positions=5)
    assert torch.equal(decode(read, torch.float32), decode(encode(hidden, torch.int8), torch.float32))
    assert store.holds(np.arange(6), 2).tolist() == [number in ids for number in range(6)]
    with pytest.raises(RuntimeError, match="shape"):
        store.write(np.array(ids), torch.zeros(len(ids), 5, 7 + 4), boundary=3)
    store.close()


def frozen_run(world: World, folder: str, dtype: str) -> tuple[object, Counter[str], float | None]:
    heard: Counter[str] = Counter()
    roundings: list[float | None] = []

    def note(event: events.Event) -> None:
        if isinstance(event, events.Logged):
            heard["hits"] += event.figures.hits
        elif isinstance(event, events.Advanced):
            roundings.append(event.advance.rounding)

    own = ("freeze.policy=static", "freeze.max_frozen=3", f"cache.dtype={dtype}", "cache.disk_budget=null")
    case = Case("vit", world.size, STATIC[1], precision="float32")
    trainer = Trainer(
        configuration("vit", [*case.overrides(""), *own, f"run.dir={folder}", "run.id=x", "run.overwrite=true"]),
        world,
        listeners=[note],
    )
    trainer.run()
    return final_weights(trainer), heard, roundings[0]


def test_a_run_on_integers_is_close_to_one_on_what_is_computed(ranks: RankPool, tmp_path: Path) -> None:
    runs = {dtype: ranks.run(2, frozen_run, str(tmp_path), dtype)[0] for dtype in ("compute", "int8", "bfloat16")}
    assert all(heard["hits"] > 0 for _, heard, _ in runs.values())
    errors = [rounding for *_, rounding in runs.values()]
    assert errors[0] is None and 0 < errors[2] < errors[1] < 0.02, errors  # type: ignore[operator]
    exact, integers, narrower = (weights for weights, *_ in runs.values())
    assert 0 < deviation(narrower, exact) < deviation(integers, exact) < 0.05  # type: ignore[arg-type]
