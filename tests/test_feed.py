"""What a step gets: its share of a batch, the prefix's activations, a mask where a text is padded and nowhere else."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_models import MODELS, inputs_of, wrapped

from pipetransformer.data import Batch, Dataset
from pipetransformer.engine import Engine
from pipetransformer.engine.feed import Feed
from pipetransformer.models import MASK
from pipetransformer.plan import ParallelPlan

LENGTH = 12


class Texts(Dataset):
    """Three texts of 12, 7 and 3 tokens, and three of 12."""

    kind, metric_names, fingerprint, num_tokens = "classes", ("accuracy",), "", None

    def __init__(self, whole: dict[str, torch.Tensor]) -> None:
        self._rows = {key: torch.cat([value, value[:1].repeat(3, 1)]) for key, value in whole.items()}
        self.labels = torch.arange(6) % 5
        self.lengths = np.full(6, LENGTH)

    def inputs(
        self, ids: np.ndarray, *, length: int, epoch: int, keys: Collection[str] | None = None
    ) -> dict[str, torch.Tensor]:
        rows = {key: value[torch.from_numpy(ids)] for key, value in self._rows.items()}
        return rows if keys is None else {key: rows[key] for key in keys}


@pytest.mark.parametrize(
    ("ids", "skips", "has_mask"), [((0, 1), True, True), ((3, 4), True, False), ((3, 4), False, True)]
)
@pytest.mark.parametrize("frozen", [0, 1])
def test_active_units_get_a_mask_where_a_text_is_padded(
    monkeypatch: pytest.MonkeyPatch, frozen: int, ids: tuple[int, ...], skips: bool, has_mask: bool
) -> None:
    chain, _ = wrapped(MODELS["bert"])
    data = Texts(inputs_of(chain))
    plan = ParallelPlan(frozen, 1, 1, (), 1, "1f1b", None, chain.num_blocks)
    feed = Feed(chain, data, plan, rank=0, store=None, num_workers=0, skips_masks=skips)
    (batch,) = feed.batches([Batch(0, (np.array(ids),), LENGTH)], epoch=0)
    assert batch.is_padded == (ids == (0, 1))
    given: list[bool] = []
    run = chain.run
    monkeypatch.setattr(
        chain, "run", lambda units, hidden, inputs: given.append(MASK in inputs) or run(units, hidden, inputs)
    )
    feed.enter(batch)
    assert (MASK in batch.inputs) == has_mask
    assert given == [True] * frozen, "the prefix is computed as for the cache, with a mask"


@pytest.mark.parametrize(("ids", "has_mask"), [((0, 1), True), ((3, 4), False)])
def test_later_stages_get_labels_and_side_inputs_alone(ids: tuple[int, ...], has_mask: bool) -> None:
    chain, _ = wrapped(MODELS["bert"])
    data = Texts(inputs_of(chain))
    plan = ParallelPlan(0, 2, 1, (1,), 2, "1f1b", None, chain.num_blocks)
    feed = Feed(chain, data, plan, rank=1, store=None, num_workers=0, skips_masks=True)
    (batch,) = feed.batches([Batch(0, (np.array(ids),), LENGTH)], epoch=0)
    feed.enter(batch)
    assert batch.hidden is None and batch.labels.tolist() == data.labels[list(ids)].tolist()
    assert chain.family.main_input not in batch.inputs
    assert (MASK in batch.inputs) == has_mask


def test_inputs_go_on_over_pauses_and_end_with_the_plan() -> None:
    """Threads and workers are not made anew where a job only pauses: the same iterator goes on."""
    made: list[list[int]] = []

    def batches(given: Sequence[Batch], *, epoch: int) -> Iterator[int]:
        made.append([epoch, *(batch.index for batch in given)])
        yield from (batch.index for batch in given)

    engine = Engine.__new__(Engine)
    feed = SimpleNamespace(batches=batches, device_bytes=0)
    engine._incoming, engine._most_cached, engine._feeds = None, 0, {"train": feed}  # type: ignore[dict-item]
    everything = [Batch(number, (np.arange(2),), LENGTH) for number in range(5)]
    first = engine.incoming(everything, epoch=0)
    assert [first.take(), first.take()] == [0, 1]
    second = engine.incoming(everything[2:], epoch=0)
    assert second is first and [second.take(), second.take(), second.take()] == [2, 3, 4]
    assert engine.incoming(everything, epoch=1).take() == 0
    engine.close_feeds()
    engine._feeds = {"train": feed}  # type: ignore[dict-item]
    assert engine.incoming(everything[1:], epoch=1).take() == 1
    assert made == [[0, 0, 1, 2, 3, 4], [1, 0, 1, 2, 3, 4], [1, 1, 2, 3, 4]]
